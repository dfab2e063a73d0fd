"""Statements of Knights-and-Knaves puzzles: solve and compare them.

A statement is a nested tuple: ("telling-truth", i) and ("lying", i) about person i, ("not", s), ("and" | "or", s, s,
…), ("->", s, s) and ("<=>", s, s). A puzzle is a tuple of statements; statement i is made by person i.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import permutations, product
from operator import and_, or_
from typing import Any

from sharpscope.tasks.base import content_id

Statement = tuple[Any, ...]
Puzzle = tuple[Statement, ...]

ATOMS = ("telling-truth", "lying")


def solve(puzzle: Puzzle) -> list[tuple[bool, ...]]:
    """All solutions: assignments (True = knight) in which a person's statement is true if and only if they are a knight.

    The search is exhaustive. A statement's values under all 2**n assignments are the bits of one integer; person i is a
    knight in assignment a if bit i of a is set. Solutions are in the order of a.
    """
    people = len(puzzle)
    ones = (1 << (1 << people)) - 1
    knight = [sum(1 << a for a in range(1 << people) if a >> i & 1) for i in range(people)]

    consistent = reduce(and_, (ones ^ knight[i] ^ truth(said, knight, ones) for i, said in enumerate(puzzle)), ones)
    return [tuple(bool(a >> i & 1) for i in range(people)) for a in range(1 << people) if consistent >> a & 1]


def truth(statement: Statement, knight: Sequence[int], ones: int) -> int:
    """Truth of a statement in all worlds at once, a bit of `ones` for each; bit a of knight[i]: person i is one in world a."""
    operator = statement[0]
    if operator == "telling-truth":
        return knight[statement[1]]
    if operator == "lying":
        return ones ^ knight[statement[1]]
    parts = [truth(part, knight, ones) for part in statement[1:]]
    if operator == "not":
        return ones ^ parts[0]
    if operator == "->":
        return (ones ^ parts[0]) | parts[1]
    if operator == "<=>":
        return ones ^ parts[0] ^ parts[1]
    return reduce(and_ if operator == "and" else or_, parts)


def content_key(puzzle: Puzzle) -> str:
    """Hash of a puzzle's content, equal for two puzzles if and only if they are equivalent.

    Puzzles are equivalent if they are equal up to the names and the order of the people, the order and repetition of the
    operands of and, or, if and only if, double negation, and "not a knight" for "a knave".
    """
    groups: dict[int, list[int]] = {}
    for person, color in enumerate(_colors(puzzle)):
        groups.setdefault(color, []).append(person)
    forms = []
    for arrangement in product(*(permutations(groups[color]) for color in sorted(groups))):
        order = [person for group in arrangement for person in group]
        labels = [0] * len(puzzle)
        for position, person in enumerate(order):
            labels[person] = position
        forms.append(repr([_normalize(puzzle[person], labels) for person in order]))
    return content_id("knights_knaves", min(forms))


def _colors(puzzle: Puzzle) -> list[int]:
    """Color refinement: split people by their statements about people of each color until the coloring is stable."""
    colors = [0] * len(puzzle)
    while True:
        signatures = []
        for person, statement in enumerate(puzzle):
            labels = [-1 if other == person else color for other, color in enumerate(colors)]
            signatures.append((colors[person], repr(_normalize(statement, labels))))
        ranks = {signature: rank for rank, signature in enumerate(sorted(set(signatures)))}
        refined = [ranks[signature] for signature in signatures]
        if len(set(refined)) == len(set(colors)):
            return refined
        colors = refined


def _normalize(statement: Statement, labels: Sequence[int]) -> Statement:
    """Normal form of a statement, in which person i is labels[i]."""
    operator = statement[0]
    if operator in ATOMS:
        return (operator, labels[statement[1]])
    parts = [_normalize(part, labels) for part in statement[1:]]
    if operator == "not":
        inner = parts[0]
        if inner[0] in ATOMS:
            return (ATOMS[1 - ATOMS.index(inner[0])], inner[1])
        return inner[1] if inner[0] == "not" else ("not", inner)
    if operator == "->":
        return (operator, *parts)
    if operator == "<=>":
        return (operator, *sorted(parts, key=repr))
    distinct = sorted(set(parts), key=repr)
    return distinct[0] if len(distinct) == 1 else (operator, *distinct)
