"""Task `knights_knaves`: generated Knights-and-Knaves puzzles with exactly one solution, and the Logic-RL reward.

A set depends only on its seed and settings. Every puzzle is solved exhaustively by `solve`. The hash of its
content up to names (`content_key`) determines its split: a quarter of all contents is held out for every seed and size, so a held-out set
never shares content with any training set.

A statement is a nested tuple: ("telling-truth", i) and ("lying", i) about person i, ("not", s), ("and" | "or", s, s,
…), ("->", s, s) and ("<=>", s, s). A puzzle is a tuple of statements; statement i is made by person i.

The sampler and the wording are those of mem-kk-logic (arXiv 2410.23123, MIT license) as adapted in reasoning-gym 0.1.19
(Apache 2.0), with the words knight and knave: a seed gives the same puzzle as there. Random numbers come from NumPy's default
generator; tests compare the first puzzles with those of earlier versions.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from itertools import permutations, product
from operator import and_, or_
from typing import Any

from numpy.random import Generator, default_rng

from sharpscope.config.tasks import KnightsKnavesSpec
from sharpscope.errors import UserError
from sharpscope.tasks.base import (
    HELD_OUT,
    Example,
    Reward,
    content_id,
    held_out_share,
    once,
    splits_by_level,
    stream_seed,
)

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

    consistent = reduce(
        and_,
        (ones ^ knight[i] ^ truth(said, knight, ones) for i, said in enumerate(puzzle)),
        ones,
    )
    return [
        tuple(bool(a >> i & 1) for i in range(people))
        for a in range(1 << people)
        if consistent >> a & 1
    ]


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
            labels = [*colors[:person], -1, *colors[person + 1 :]]
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


# -- sampler and wording

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


def sample_puzzle(rng: Generator, people: int, depth: int) -> Puzzle:
    """Sample one statement per person, nested at most `depth` deep. The puzzle may have any number of solutions."""
    return tuple(_statement(rng, person, people, depth) for person in range(people))


def _statement(rng: Generator, speaker: int, people: int, depth: int) -> Statement:
    kind = int(rng.integers(6))
    if depth == 1 or kind == 0:
        while True:
            claim = (ATOMS[rng.integers(2)], int(rng.integers(people)))
            if claim != ("lying", speaker):  # "I am a knave" has no consistent assignment
                return claim
    if kind == 1:
        return ("not", _statement(rng, speaker, people, depth - 1))
    parts: list[Statement] = []
    while len(parts) < 2:
        part = _statement(rng, speaker, people, depth - 1)
        if part not in parts:
            parts.append(part)
    return (("and", "or", "->", "<=>")[kind - 2], *parts)


def word_puzzle(puzzle: Puzzle, rng: Generator) -> tuple[str, tuple[str, ...]]:
    """Text of a puzzle in English, and the names of the people in order."""
    names = tuple(rng.choice(NAMES, len(puzzle), replace=False).tolist())
    rng.integers(ROLE_PAIRS)
    sayings = [
        SAYINGS[rng.integers(len(SAYINGS))].format(name=name, content=_clause(statement, names))
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
    clauses = [
        _clause(part, names) if part[0] in ATOMS else f"({_clause(part, names)})" for part in parts
    ]
    if operator == "not":
        return f"it is not the case that {clauses[0]}"
    if operator == "->":
        return f"if {clauses[0]} then {clauses[1]}"
    return {"and": " and ", "or": " or ", "<=>": " if and only if "}[operator].join(clauses)


# -- reward

TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_LINE = re.compile(r"\b([A-Za-z]+)\s+is\s+an?\s+(knight|knave)\b", re.IGNORECASE)


def roles_of(answer: str) -> dict[str, str]:
    """`{name: "knight" | "knave"}` from a solution such as "(1) Noah is a knave\\n(2) Ava is a knight"."""
    return {name: role.lower() for name, role in _LINE.findall(answer)}


def read_answer(answer: str, names: Sequence[str]) -> dict[str, str] | None:
    """Parse the roles of `names` from an answer; None if it cannot be parsed.

    As in Logic-RL, the number of occurrences of "knight" and "knave" must equal the number of names, and every name must be
    followed by "is a knight" or "is a knave". The first match of a name counts. Case is ignored.
    """
    lower = answer.lower()
    if lower.count("knight") + lower.count("knave") != len(names):
        return None
    pattern = r"\b{}\b\s+is\s+a\s+(knight|knave)\b"
    found = {
        name: re.search(pattern.format(re.escape(name)), answer, re.IGNORECASE) for name in names
    }
    roles = {name: match[1].lower() for name, match in found.items() if match is not None}
    return roles if len(roles) == len(found) else None


def score_logic_rl(text: str, truth: Mapping[str, str]) -> Reward:
    """Reward of a response (prefill and completion) given each name's role, "knight" or "knave", in time linear in its length.

    The total is −3 unless each of the four tags occurs exactly once, in the order of `TAGS` (case-sensitive). It is 3 for a correct
    answer, −0.5 for a wrong one and −1 for one without a role for every name.
    """
    positions = [text.find(tag) for tag in TAGS]
    if positions != sorted(positions) or any(text.count(tag) != 1 for tag in TAGS):
        return Reward(-3.0, {"format": -1.0, "answer": -2.0}, correct=False)
    roles = read_answer(text[positions[2] + len(TAGS[2]) : positions[3]], list(truth))
    answer = -2.0 if roles is None else 2.0 if roles == dict(truth) else -1.5
    return Reward(1.0 + answer, {"format": 1.0, "answer": answer}, correct=answer == 2.0)


# -- the task

PATIENCE = 200
"""Number of draws without new content after which content may repeat with other names; puzzles of 2 people have few."""
GIVE_UP = 20_000
"""Number of draws without a new text after which the set counts as exhausted."""

LOGIC_RL_SYSTEM = (
    "You are a helpful assistant. The assistant first thinks about the reasoning process in the mind and "
    "then provides the user with the answer. The reasoning process and answer are enclosed within <think> "
    "</think> and<answer> </answer> tags, respectively, i.e., <think> reasoning process here "
    "</think><answer> answer here </answer>.  Now the user asks you to solve a logical reasoning problem. "
    "After thinking, when you finally reach a conclusion, clearly state the identity of each character "
    "within <answer> </answer> tags. i.e., <answer> (1) Zoey is a knight\n(2) ... </answer>.\n"
)


class KnightsKnaves:
    """Splits `train` and `heldout` (`spec.people`) and `unseen` (`spec.unseen_people`); the level is the number of people.

    `meta` of an example: id, level, names, solution (True = knight), statements (nested tuples), quiz, and content (the
    `statements.content_key`).
    """

    name = "knights_knaves"

    def __init__(self, spec: KnightsKnavesSpec) -> None:
        self.spec = spec

    @once
    def splits(self) -> dict[str, list[Example]]:
        """`{"train": …, "heldout": …, "unseen": …}`, without splits of size 0."""
        return splits_by_level(self.spec, self.spec.sizes, self.spec.unseen_people, self._examples)

    def score(self, example: Example, completion: str) -> Reward:
        """Logic-RL reward of prefill and completion."""
        return score_logic_rl(example.whole(completion), roles_of(example.answer))

    def _examples(self, split: str, people: int, count: int) -> list[Example]:
        """`count` puzzles with distinct texts, from a random stream for this split and number of people."""
        examples: dict[str, Example] = {}  # by text
        contents: set[str] = set()
        misses = 0
        for number, (puzzle, content) in enumerate(self._puzzles(split, people) if count else ()):
            misses += 1
            if content not in contents or misses > PATIENCE:
                example = self._example(
                    puzzle,
                    content,
                    stream_seed("wording", self.spec.seed, split, people, number),
                )
                if example.prompt not in examples:
                    contents.add(content)
                    examples[example.prompt] = example
                    misses = PATIENCE if misses > PATIENCE else 0
            if len(examples) == count:
                break
            if misses >= GIVE_UP:
                found = f"only {len(examples)} different puzzles found for {people} people"
                raise UserError(f"task.{split}_size = {count}: {found}; use fewer, or more people")
        return list(examples.values())

    def _puzzles(self, split: str, people: int) -> Iterator[tuple[Puzzle, str]]:
        """Endless stream of uniquely solvable puzzles of the split, with their content keys."""
        spec = self.spec
        rng = default_rng(stream_seed("statements", spec.seed, split, people))
        while True:
            puzzle = sample_puzzle(rng, people, depth=2)
            if len(solve(puzzle)) != 1:
                continue
            content = content_key(puzzle)
            if (held_out_share(content) < HELD_OUT) == (split != "train"):
                yield puzzle, content

    def _example(self, puzzle: Puzzle, content: str, seed: int) -> Example:
        (solution,) = solve(puzzle)
        quiz, names = word_puzzle(puzzle, default_rng(seed))
        chat = self.spec.style == "logic_rl"
        turns = f"<|im_start|>system\n{LOGIC_RL_SYSTEM}<|im_end|>\n<|im_start|>user\n{quiz}\n<|im_end|>\n"
        prompt = f"{turns}<|im_start|>assistant\n<think>" if chat else f"{quiz}\n"
        meta = {
            "id": content_id(prompt),
            "level": len(puzzle),
            "names": names,
            "solution": solution,
        }
        meta |= {"statements": puzzle, "quiz": quiz, "content": content}
        answer = "\n".join(
            f"({i}) {name} is a {'knight' if knight else 'knave'}"
            for i, (name, knight) in enumerate(zip(names, solution, strict=True), 1)
        )
        return Example(prompt, answer, meta, prefill="<think>" if chat else "", templated=chat)
