"""Demonstrations for the warm start of `tool_qa`: whole conversations with a retriever, in the task's protocol.

`reason` looks every hop up: it names what it wants to know, searches for the thing, repeats what the passage says of it and
goes on with that. `guess` answers before the last hop was looked up, with the thing that it got to. The replies are those of
the task itself on invented worlds of other seeds, so there is nothing to learn by heart.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast

from sharpscope.tasks import Example, InteractiveTask, ToolQaSpec, make_task, respond_all
from sharpscope.tasks.tool_world import SYLLABLES
from sharpscope.warm_start.knights_knaves import GUESS, OPENING, Demonstration

FIRST_WORLD = 1_000_000
"""Seed of the first world: far from those that a person gives to a task."""


@dataclass(frozen=True)
class Asked:
    """A question, and what the environment replies to each search on its way."""

    example: Example
    replies: tuple[str, ...]


def asked(
    hops: Sequence[int], worlds: int, count: int, seed: int, split: Literal["train", "heldout"] = "train"
) -> dict[int, list[Asked]]:
    """`count` questions of every world and number of hops, by hops, on the task's training or held-out side."""
    pool: dict[int, list[Asked]] = {number: [] for number in hops}
    for world in range(worlds):
        sizes = {"train_size": 1, "heldout_size": 0} | {f"{split}_size": count}
        task = make_task(ToolQaSpec(hops=tuple(hops), **sizes, seed=FIRST_WORLD * (1 + seed) + world))
        examples = task.splits()[split]
        for example, replies in zip(examples, _replies(cast(InteractiveTask, task), examples), strict=True):
            pool[int(example.meta["level"])].append(Asked(example, replies))
    return pool


def _replies(task: InteractiveTask, examples: Sequence[Example]) -> list[tuple[str, ...]]:
    """What the environment says to a search for each thing on the way, all conversations at once."""
    rows = [(i, thing) for i, example in enumerate(examples) for thing, _, _ in example.meta["chain"]]
    texts = respond_all(task, [examples[i] for i, _ in rows], [f"<search>{thing}</search>" for _, thing in rows])
    replies: list[list[str]] = [[] for _ in examples]
    for (i, _), text in zip(rows, texts, strict=True):
        assert text is not None
        replies[i].append(text)
    return [tuple(texts) for texts in replies]


def conversation(question: Asked, searches: int) -> tuple[str, tuple[tuple[str, str], ...]]:
    """The first turn and the later ones, each after the environment's reply; right where `searches` is the number of hops.

    With fewer searches the answer is a guess: the thing that the next search would have been for.
    """
    turns, read = [], ""
    chain = question.example.meta["chain"]
    for thing, relation, value in chain[:searches]:
        turns.append(f"{OPENING}{read or thing}, {relation}</think><search>{thing}</search>")
        read = f" {relation}: {value}"  # as in the passage
    thought, answer = (read, chain[-1][2]) if searches == len(chain) else (GUESS, chain[searches][0])
    turns.append(f"{OPENING}{thought}</think><answer>{answer}</answer>")
    return turns[0], tuple(zip(question.replies, turns[1:], strict=False))


def phrases(seen: Sequence[Asked]) -> list[str]:
    """What questions, replies and turns are put together from: one token each in the embedded policy.

    Names are made of syllables, each one token with a capital and one without.
    """
    found = {syllable for small in SYLLABLES for syllable in (small, small.capitalize())}
    found |= {GUESS, "What is the ", " of the ", " of ", "?\n", "Doc 1(Title: ", "\n\n"}
    found |= {f"\nDoc {i}(Title: " for i in (2, 3)}
    for question in seen:
        for thing, relation, value in question.example.meta["chain"]:
            found |= {relation, f", {relation}", f" {relation}: "}
            assert thing != value
        for reply in question.replies:
            found |= _between(reply)
    return sorted(found)


def _between(reply: str) -> set[str]:
    """The fixed texts of passages: ") kind: person.", " birthplace: "."""
    found = set()
    for line in reply.partition("<information>")[2].partition("</information>")[0].split("\n"):
        kind, *fields = line.partition(") ")[2].removesuffix(".").split(". ")
        found |= {f") {kind}.", *(f" {field.partition(': ')[0]}: " for field in fields)}
    return found


def tool_demonstrations(
    pool: Mapping[int, Sequence[Asked]], weights: Mapping[int, float], *, guess_share: float, seed: int
) -> Iterator[Demonstration]:
    """Endless stream of conversations: numbers of hops by `weights`, questions of `pool` drawn at random."""
    rng = random.Random(seed)
    numbers = sorted(pool)
    while True:
        hops = rng.choices(numbers, [weights.get(number, 0.0) for number in numbers])[0]
        question = rng.choice(pool[hops])
        guesses = rng.random() < guess_share
        first, later = conversation(question, rng.randrange(hops) if guesses else hops)
        yield Demonstration(question.example.prompt, first, "guess" if guesses else "reason", hops, later)
