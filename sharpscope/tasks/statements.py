"""What people say in a Knights-and-Knaves puzzle: reading, solving and comparing it.

A statement is a nested tuple: ("telling-truth", i) and ("lying", i) about person i, ("not", s), ("and" | "or", s, s,
…), ("->", s, s) and ("<=>", s, s). A puzzle is a tuple of statements; statement i is what person i says.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from itertools import permutations, product
from typing import Any

from sharpscope.errors import UserError
from sharpscope.tasks.base import content_id

Statement = tuple[Any, ...]
Puzzle = tuple[Statement, ...]

ATOMS = ("telling-truth", "lying")
MAX_PEOPLE = 12
MAX_DEPTH = 30
MAX_TEXT = 100_000


def parse_statements(literal: object, where: str = "statements") -> Puzzle:
    """Read a puzzle from its Python literal (text, or the nested tuples or lists themselves) and check its structure.

    Text goes through `ast.literal_eval`, never through evaluation.

    Raises:
        UserError: not a literal, or not a puzzle; the message starts with `where`.
    """
    value = literal
    if isinstance(literal, str):
        if len(literal) > MAX_TEXT:
            raise UserError(f"{where}: {len(literal)} characters are too many for one puzzle (at most {MAX_TEXT})")
        try:
            value = ast.literal_eval(literal.strip())
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
            raise UserError(
                f"{where}: not a Python literal ({_short(literal)}); expected nested tuples of statements"
            ) from error
    if not isinstance(value, (tuple, list)) or not 1 <= len(value) <= MAX_PEOPLE:
        raise UserError(f"{where}: expected 1 to {MAX_PEOPLE} statements, one a person, got {_short(value)}")
    return tuple(_check(statement, len(value), where, 0) for statement in value)


def _check(statement: object, people: int, where: str, depth: int) -> Statement:
    """The statement as nested tuples, or a UserError that quotes the part that is not one."""
    if depth > MAX_DEPTH:
        raise UserError(f"{where}: statements nested deeper than {MAX_DEPTH}")
    if not isinstance(statement, (tuple, list)) or len(statement) < 2:
        raise UserError(f"{where}: {_short(statement)} is not a statement such as ('telling-truth', 0)")
    operator, *rest = statement
    if operator in ATOMS:
        if len(rest) != 1 or type(rest[0]) is not int or not 0 <= rest[0] < people:
            raise UserError(f"{where}: {_short(statement)} must name one person from 0 to {people - 1}")
        return (operator, rest[0])
    arity = {"not": (1, 1), "and": (2, 99), "or": (2, 99), "->": (2, 2), "<=>": (2, 2)}.get(
        operator if isinstance(operator, str) else ""
    )
    if arity is None:
        raise UserError(
            f"{where}: unknown operator {_short(operator)}; valid: telling-truth, lying, not, and, or, ->, <=>"
        )
    if not arity[0] <= len(rest) <= arity[1]:
        raise UserError(f"{where}: {_short(statement)} has {len(rest)} operands, which '{operator}' does not take")
    return (operator, *(_check(part, people, where, depth + 1) for part in rest))


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"


def solve(puzzle: Puzzle) -> list[tuple[bool, ...]]:
    """Every assignment (True = knight) under which each person's statement is true exactly if that person is a knight.

    Exhaustive: a statement's value under all 2**n assignments is one integer, bit a for assignment a, whose bit i says
    whether person i is a knight. Solutions come in the order of a.
    """
    people = len(puzzle)
    everything = (1 << (1 << people)) - 1
    knight = [sum(1 << a for a in range(1 << people) if a >> i & 1) for i in range(people)]

    def value(statement: Statement) -> int:
        operator = statement[0]
        if operator == "telling-truth":
            return knight[statement[1]]
        if operator == "lying":
            return everything ^ knight[statement[1]]
        parts = [value(part) for part in statement[1:]]
        if operator == "not":
            return everything ^ parts[0]
        if operator == "->":
            return (everything ^ parts[0]) | parts[1]
        if operator == "<=>":
            return everything ^ parts[0] ^ parts[1]
        result = parts[0]
        for part in parts[1:]:
            result = result & part if operator == "and" else result | part
        return result

    consistent = everything
    for i, statement in enumerate(puzzle):
        consistent &= everything ^ knight[i] ^ value(statement)
    return [tuple(bool(a >> i & 1) for i in range(people)) for a in range(1 << people) if consistent >> a & 1]


def content_key(puzzle: Puzzle) -> str:
    """Hash that two puzzles share exactly if they say the same thing; no training content is in a held-out set.

    The same thing means: equal up to the people's names, the order in which they are introduced and speak, the order
    and repetition of the operands of and, or, if and only if, double negation, and "not a knight" for "a knave".
    """
    groups: dict[int, list[int]] = {}
    for person, colour in enumerate(_colours(puzzle)):
        groups.setdefault(colour, []).append(person)
    forms = []
    for arrangement in product(*(permutations(groups[colour]) for colour in sorted(groups))):
        order = [person for group in arrangement for person in group]
        labels = [0] * len(puzzle)
        for position, person in enumerate(order):
            labels[person] = position
        forms.append(repr([_normal(puzzle[person], labels) for person in order]))
    return content_id("knights_knaves", min(forms))


def _colours(puzzle: Puzzle) -> list[int]:
    """Split people by what they say about people of which colour, until nothing splits: most become fully ordered."""
    colours = [0] * len(puzzle)
    while True:
        signatures = []
        for person, statement in enumerate(puzzle):
            labels = [-1 if other == person else colour for other, colour in enumerate(colours)]
            signatures.append((colours[person], repr(_normal(statement, labels))))
        ranks = {signature: rank for rank, signature in enumerate(sorted(set(signatures)))}
        refined = [ranks[signature] for signature in signatures]
        if len(set(refined)) == len(set(colours)):
            return refined
        colours = refined


def _normal(statement: Statement, labels: Sequence[int]) -> Statement:
    """Normal form with person i called labels[i]."""
    operator = statement[0]
    if operator in ATOMS:
        return (operator, labels[statement[1]])
    parts = [_normal(part, labels) for part in statement[1:]]
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
