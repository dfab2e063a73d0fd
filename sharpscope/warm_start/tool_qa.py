"""Demonstrations for the warm start on the task `tool_qa`: conversations with a retriever in the task's protocol.

`reason` searches for every hop: it states the relation, searches for the entity, repeats the value from the passage and
continues with that value. `guess` answers before the last hop, with the entity it has reached. The responses are those of
the task on generated worlds with other seeds, so facts cannot be memorized.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from sharpscope.tasks import Example, InteractiveTask, ToolQaSpec, make_task, respond_all
from sharpscope.tasks.tool_qa import SYLLABLES
from sharpscope.warm_start.knights_knaves import GUESS, OPENING, Demonstration

FIRST_WORLD = 1_000_000
"""Seed of the first world, larger than typical seeds of a task."""


@dataclass(frozen=True)
class SearchQuestion:
    """A question and the environment's response to the search of each hop."""

    example: Example
    replies: tuple[str, ...]


def search_questions(hops: Sequence[int], worlds: int, count: int, seed: int) -> dict[int, list[SearchQuestion]]:
    """Generate questions of the task's training split, by number of hops: `count` per world and number of hops."""
    pool: dict[int, list[SearchQuestion]] = {number: [] for number in hops}
    for world in range(worlds):
        seed_of_world = FIRST_WORLD * (1 + seed) + world
        task = make_task(ToolQaSpec(hops=tuple(hops), train_size=count, heldout_size=0, seed=seed_of_world))
        examples = task.splits()["train"]
        for example, replies in zip(examples, _replies(cast(InteractiveTask, task), examples), strict=True):
            pool[int(example.meta["level"])].append(SearchQuestion(example, replies))
    return pool


def _replies(task: InteractiveTask, examples: Sequence[Example]) -> list[tuple[str, ...]]:
    """Responses to the search of each hop, for all examples in one batch."""
    rows = [(i, thing) for i, example in enumerate(examples) for thing, _, _ in example.meta["chain"]]
    texts = respond_all(task, [examples[i] for i, _ in rows], [f"<search>{thing}</search>" for _, thing in rows])
    replies: list[list[str]] = [[] for _ in examples]
    for (i, _), text in zip(rows, texts, strict=True):
        assert text is not None
        replies[i].append(text)
    return [tuple(texts) for texts in replies]


def conversation(question: SearchQuestion, searches: int) -> tuple[str, tuple[tuple[str, str], ...]]:
    """First turn, and pairs of a response and the next turn.

    The answer is correct if `searches` is the number of hops. With fewer searches it is a guess: the entity of the next
    search.
    """
    turns, fact = [], ""
    chain = question.example.meta["chain"]
    for thing, relation, value in chain[:searches]:
        turns.append(f"{OPENING}{fact or thing}, {relation}</think><search>{thing}</search>")
        fact = f" {relation}: {value}"  # as in the passage
    reasoning, answer = (fact, chain[-1][2]) if searches == len(chain) else (GUESS, chain[searches][0])
    turns.append(f"{OPENING}{reasoning}</think><answer>{answer}</answer>")
    return turns[0], tuple(zip(question.replies, turns[1:], strict=False))


def phrases(questions: Sequence[SearchQuestion]) -> list[str]:
    """Texts that questions, responses and turns consist of; each is one token in the embedded policy.

    Names consist of syllables, each of which is one token, capitalized or not.
    """
    texts = {text for syllable in SYLLABLES for text in (syllable, syllable.capitalize())}
    texts |= {GUESS, "What is the ", " of the ", " of ", "?\n", "Doc 1(Title: ", "\n\n"}
    texts |= {f"\nDoc {i}(Title: " for i in (2, 3)}
    for question in questions:
        for _, relation, _ in question.example.meta["chain"]:
            texts |= {relation, f", {relation}", f" {relation}: "}
        for reply in question.replies:
            texts |= _fixed_texts(reply)
    return sorted(texts)


def _fixed_texts(reply: str) -> set[str]:
    """Fixed texts of passages: ") kind: person.", " birthplace: "."""
    texts = set()
    for line in reply.partition("<information>")[2].partition("</information>")[0].split("\n"):
        kind, *fields = line.partition(") ")[2].removesuffix(".").split(". ")
        texts |= {f") {kind}.", *(f" {field.partition(': ')[0]}: " for field in fields)}
    return texts


def tool_demonstrations(
    pool: Mapping[int, Sequence[SearchQuestion]], weights: Mapping[int, float], *, guess_share: float, seed: int
) -> Iterator[Demonstration]:
    """Endless stream of conversations with random questions of `pool`; numbers of hops have sampling weights.

    The share `guess_share` has the style `guess`.
    """
    rng = random.Random(seed)
    numbers = sorted(pool)
    while True:
        hops = rng.choices(numbers, [weights.get(number, 0.0) for number in numbers])[0]
        question = rng.choice(pool[hops])
        guesses = rng.random() < guess_share
        first, later = conversation(question, rng.randrange(hops) if guesses else hops)
        yield Demonstration(question.example.prompt, first, "guess" if guesses else "reason", hops, later)
