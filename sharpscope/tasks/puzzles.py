"""Random Knights-and-Knaves statements and their English text, independent of library versions.

The sampler and the wording are those of mem-kk-logic (arXiv 2410.23123, MIT license) as adapted in reasoning-gym 0.1.19
(Apache 2.0), with the words knight and knave: a seed gives the same puzzle as there. Random bits come from NumPy's PCG64,
whose stream is guaranteed to be stable. `Draws` reimplements methods of NumPy's `Generator`, which have no such guarantee.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from sharpscope.tasks.statements import ATOMS, Puzzle, Statement

T = TypeVar("T")

_NAMES = (
    "Emma Liam Olivia Noah Ava Ethan Sophia Mason Isabella William Mia James Charlotte Benjamin Amelia Lucas "
    "Harper Henry Evelyn Alexander Abigail Michael Emily Daniel Elizabeth Jacob Sofia Logan Avery Jackson Ella "
    "Sebastian Scarlett Jack Grace Aiden Chloe Owen Victoria Samuel Riley Matthew Aria Joseph Lily Luke Aurora "
    "David Zoey Oliver Penelope"
)
NAMES = tuple(_NAMES.split())
ROLE_PAIRS = 7
"""Number of role pairs (knight and knave, saint and sinner, …) from which reasoning-gym draws one; the draw is discarded."""
SAYINGS = (
    "{name} said that {content}.",
    "{name} told you that {content}.",
    '{name} said, "{content}."',
    '{name} stated, "{content}".',
    'According to {name}, "{content}".',
    'In {name}\'s words: "{content}".',
    '{name} remarked, "{content}".',
    '"{content}," {name} declared.',
    '{name} was heard saying, "{content}".',
    "{name} expressed that {content}.",
    '"{content}" - {name}.',
    'As {name} put it, "{content}".',
    '{name} asserted: "{content}".',
    '"{content}," {name} mentioned.',
    '{name} commented, "{content}".',
    'In a statement by {name}: "{content}".',
    '{name} noted, "{content}".',
    '"{content}," {name} claimed.',
)


class Draws:
    """Random integers from PCG64, equal to those of `numpy.random.default_rng(seed)`."""

    def __init__(self, seed: int) -> None:
        self._bits = np.random.PCG64(seed)
        self._words: list[int] = []  # 32-bit words in reverse order of use

    def below(self, end: int) -> int:
        """Uniform integer in [0, end) by Lemire's method (arXiv 1805.10941); end = 1 consumes no random bits."""
        if end == 1:
            return 0
        while True:
            product = self._word() * end
            if product & 0xFFFFFFFF >= 2**32 % end:  # rejection makes the distribution uniform
                return product >> 32

    def choice(self, items: Sequence[T]) -> T:
        """A uniformly random item."""
        return items[self.below(len(items))]

    def sample(self, items: Sequence[T], count: int) -> list[T]:
        """`count` distinct items in random order, by Floyd's algorithm and a shuffle."""
        chosen: list[int] = []
        for last in range(len(items) - count, len(items)):
            index = self.below(last + 1)
            chosen.append(last if index in chosen else index)
        for i in range(count - 1, 0, -1):
            j = self.below(i + 1)
            chosen[i], chosen[j] = chosen[j], chosen[i]
        return [items[index] for index in chosen]

    def _word(self) -> int:
        if not self._words:
            for bits in reversed(self._bits.random_raw(64).tolist()):
                self._words += [bits >> 32, bits & 0xFFFFFFFF]
        return self._words.pop()


def sample_puzzle(draws: Draws, people: int, depth: int) -> Puzzle:
    """Sample one statement per person, nested at most `depth` deep. The puzzle may have any number of solutions."""
    return tuple(_statement(draws, person, people, depth) for person in range(people))


def _statement(draws: Draws, speaker: int, people: int, depth: int) -> Statement:
    kind = draws.below(6)
    if depth == 1 or kind == 0:
        while True:
            claim = (draws.choice(ATOMS), draws.below(people))
            if claim != ("lying", speaker):  # "I am a knave" has no consistent assignment
                return claim
    if kind == 1:
        return ("not", _statement(draws, speaker, people, depth - 1))
    parts: list[Statement] = []
    while len(parts) < 2:
        part = _statement(draws, speaker, people, depth - 1)
        if part not in parts:
            parts.append(part)
    return (("and", "or", "->", "<=>")[kind - 2], *parts)


def word_puzzle(puzzle: Puzzle, draws: Draws) -> tuple[str, tuple[str, ...]]:
    """Text of a puzzle in English, and the names of the people in order."""
    names = tuple(draws.sample(NAMES, len(puzzle)))
    draws.below(ROLE_PAIRS)
    sayings = [
        draws.choice(SAYINGS).format(name=name, content=_clause(statement, names))
        for name, statement in zip(names, puzzle, strict=True)
    ]
    text = (
        "A very special island is inhabited only by knights and knaves. Knights always tell the truth, and knaves always lie. "
        f"You meet {len(names)} inhabitants: {', '.join(names[:-1])}, and {names[-1]}. "
        f"{' '.join(sayings)} So who is a knight and who is a knave?"
    )
    return text, names


def _clause(statement: Statement, names: Sequence[str]) -> str:
    operator, *parts = statement
    if operator in ATOMS:
        return f"{names[parts[0]]} is a {'knight' if operator == 'telling-truth' else 'knave'}"
    if operator == "not" and parts[0][0] in ATOMS:
        return _clause((ATOMS[1 - ATOMS.index(parts[0][0])], parts[0][1]), names)
    clauses = [_clause(part, names) if part[0] in ATOMS else f"({_clause(part, names)})" for part in parts]
    if operator == "not":
        return f"it is not the case that {clauses[0]}"
    if operator == "->":
        return f"if {clauses[0]} then {clauses[1]}"
    return {"and": " and ", "or": " or ", "<=>": " if and only if "}[operator].join(clauses)
