"""Demonstrations for the warm start: Knights-and-Knaves puzzles with completions in two styles.

`reason` tries the assignments in a fixed order, all knights first, and checks each person in turn until one
contradicts; the last trial is the solution. `guess` writes the solution down at once, which a small model can hardly do
better than guess. Both end in the same answer. A policy that has learnt both chooses at its first token, and
reinforcement learning finds the better choice quickly.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

from sharpscope.tasks import Example, KnightsKnavesSpec, make_task

Style = Literal["reason", "guess"]
OPENING = "<think>"
ROLE = {True: "knight", False: "knave"}
JUDGED = {True: "yes", False: "no"}
CLAIMED = {"telling-truth": True, "lying": False}
CONNECTIVES = {"and": "and", "or": "or", "->": "then", "<=>": "iff"}
GUESS = "a guess."


@dataclass(frozen=True)
class Demonstration:
    """A prompt and the completion to imitate, end of text not included; `level` is the task's.

    Where an environment speaks in between, `completion` is the first turn and `later` holds its replies, which are not
    imitated, each with the turn that follows.
    """

    prompt: str
    completion: str
    style: Style
    level: int
    later: tuple[tuple[str, str], ...] = ()

    @property
    def text(self) -> str:
        """Prompt, all turns and replies."""
        return "".join([self.prompt, self.completion, *(reply + turn for reply, turn in self.later)])


def holds(statement: Sequence[Any], roles: Sequence[bool]) -> bool:
    """Whether a statement (the tuples of `sharpscope.tasks.statements`) is true when roles[i] says "i is a knight"."""
    operator, *parts = statement
    if operator == "telling-truth":
        return roles[parts[0]]
    if operator == "lying":
        return not roles[parts[0]]
    values = [holds(part, roles) for part in parts]
    if operator == "not":
        return not values[0]
    if operator == "and":
        return all(values)
    if operator == "or":
        return any(values)
    if operator == "->":
        return values[1] or not values[0]
    if operator == "<=>":
        return values[0] == values[1]
    raise ValueError(f"unknown operator {operator!r}")


def evaluated(statement: Sequence[Any], names: Sequence[str], roles: Sequence[bool]) -> str:
    """A statement with each elementary claim judged under `roles`: "Ava knave no or Leo knight yes".

    A negated claim is turned round ("not a knight" is "knave"). Deeper nesting stands in parentheses.
    """
    claim = _claim(statement)
    if claim is not None:
        person, knight = claim
        return f"{names[person]} {ROLE[knight]} {JUDGED[roles[person] == knight]}"
    operator, *parts = statement
    inner = [evaluated(part, names, roles) if _claim(part) else f"({evaluated(part, names, roles)})" for part in parts]
    return f"not {inner[0]}" if operator == "not" else f" {CONNECTIVES[operator]} ".join(inner)


def _claim(statement: Sequence[Any]) -> tuple[int, bool] | None:
    """(person, claimed to be a knight) of an elementary claim, negated or not; None for what is put together."""
    operator, *parts = statement
    if operator in CLAIMED:
        return parts[0], CLAIMED[operator]
    if operator == "not" and (claim := _claim(parts[0])) is not None:
        return claim[0], not claim[1]
    return None


def trials(names: Sequence[str], statements: Sequence[Sequence[Any]]) -> str:
    """The `reason` style: "Ava knight, Leo knight: Ava says Leo knave no, no. Ava knight, Leo knave: … yes."

    For each trial the roles, then what each person says with every claim judged under them, up to the first person who
    as a knight says something false or as a knave something true ("no."); the first trial without one ends it ("yes.").

    Raises:
        ValueError: no assignment fits.
    """
    text = []
    for roles in product((True, False), repeat=len(names)):
        text.append(", ".join(f"{name} {ROLE[role]}" for name, role in zip(names, roles, strict=True)) + ": ")
        for name, role, statement in zip(names, roles, statements, strict=True):
            text.append(f"{name} says {evaluated(statement, names, roles)}, ")
            if holds(statement, roles) != role:
                text.append("no. ")
                break
        else:
            return "".join(text) + "yes."
    raise ValueError("the puzzle has no solution")


def phrases() -> list[str]:
    """What `completion` is put together from, besides names: one token each in the embedded policies."""
    judged = [f" {role} {word}" for role in ROLE.values() for word in JUDGED.values()]
    return sorted(
        [f" {role}{mark} " for role in ROLE.values() for mark in ",:"]
        + [" says "]
        + [f"{claim}, " for claim in judged]
        + [f"{claim} {connective} " for claim in judged for connective in CONNECTIVES.values()]
        + ["no. ", "yes.", GUESS, "(1) "]
        + [f"\n({number}) " for number in range(2, 8)]
    )


def completion(meta: Mapping[str, Any], answer: str, style: Style) -> str:
    """`<think>…</think><answer>…</answer>` for a puzzle's `meta` (names, statements) and solution text."""
    thought = trials(meta["names"], meta["statements"]) if style == "reason" else GUESS
    return f"{OPENING}{thought}</think><answer>{answer}</answer>"


def puzzles(people: int, count: int, seed: int, split: Literal["train", "heldout"] = "train") -> list[Example]:
    """`count` puzzles of the task's training or held-out side: whatever the seeds, the two sides share no content."""
    sizes = {"train_size": 1, "heldout_size": 0} | {f"{split}_size": count}
    return make_task(KnightsKnavesSpec(people=people, **sizes, seed=seed)).splits()[split]


def renamed(text: str, names: Sequence[str], others: Sequence[str]) -> str:
    """`text` with each whole word of `names` replaced by its partner in `others`, all at once."""
    partner = dict(zip(names, others, strict=True))
    return re.sub(rf"\b({'|'.join(map(re.escape, names))})\b", lambda match: partner[match[1]], text)


_CLAIM = re.compile(r"(\"|that )([A-Z][a-z]+) is a (knight|knave)(?=[\".,])")


def longer_wording(quiz: str, rng: random.Random) -> str:
    """The puzzle worded as the published sets word theirs: "If …" with a capital, half of the bare claims negated.

    "Ava is a knave" becomes "Ava is not a knight", which says the same.
    """
    quiz = re.sub(r"(\"|that )if ", r"\1If ", quiz)

    def negate(match: re.Match[str]) -> str:
        if rng.random() < 0.5:
            return match[0]
        return f"{match[1]}{match[2]} is not a {'knave' if match[3] == 'knight' else 'knight'}"

    return _CLAIM.sub(negate, quiz)


_ROLES = (
    "You are a helpful assistant.",
    "You are a careful assistant who solves puzzles.",
    "You are an assistant.",
    "You are a helpful assistant that reasons before it answers.",
)
_THINKS = (
    "The assistant first thinks about the reasoning process in the mind and then gives the user the answer.",
    "First think about the problem, then provide the user with the answer.",
    "The assistant thinks about the reasoning process first and then provides the answer.",
    "Reason in your mind before you answer the user.",
)
_TAGGED = (
    "The reasoning and the answer are enclosed within <think> </think> and <answer> </answer> tags, i.e.,"
    " <think> reasoning here </think><answer> answer here </answer>.",
    "Put the reasoning process within <think> </think> and the answer within<answer> </answer> tags, respectively.",
    "Use <think> </think> for the reasoning process and <answer> </answer> for the answer, respectively, i.e.,"
    " <think> reasoning process here </think><answer> answer here </answer>.",
)
_ASKS = (
    " Now the user asks you to solve a logic puzzle.",
    "Now the user asks you to solve a logical reasoning problem.",
    "The user has a logical reasoning problem for you.",
)
_ENDS = (
    "After thinking, when you reach a conclusion, state the identity of each character within <answer> </answer> tags.",
    "When you finally reach a conclusion, clearly state who each character is within <answer> </answer> tags. i.e.,"
    " <answer> (1) {} is a knight\n(2) ... </answer>.",
    "After thinking, clearly state the identity of each person within <answer> </answer> tags. i.e.,"
    " <answer> (1) {} is a knave\n(2) ... </answer>.",
)


def chat(quiz: str, name: str, rng: random.Random) -> str:
    """A chat prompt around a puzzle, ending in an opened `<think>`: a system text of varied sentences, then the puzzle.

    `name` stands in the example of the answer's form.
    """
    sentences = [rng.choice(_ROLES)]
    sentences += [rng.choice(_THINKS)] * (rng.random() < 0.9)
    sentences += [rng.choice(_TAGGED)] * (rng.random() < 0.9)
    sentences += [rng.choice(_ASKS)] * (rng.random() < 0.8)
    sentences += [rng.choice(_ENDS).format(name)] * (rng.random() < 0.9)
    system = " ".join(sentences) + "\n" * (rng.random() < 0.7)
    turns = (f"system\n{system}", f"user\n{quiz}\n")
    return "".join(f"<|im_start|>{turn}<|im_end|>\n" for turn in turns) + f"<|im_start|>assistant\n{OPENING}"


def demonstrations(
    pools: Mapping[int, Sequence[Example]],
    weights: Mapping[int, float],
    *,
    guess_share: float,
    chat_share: float,
    seed: int,
) -> Iterator[Demonstration]:
    """Endless stream of demonstrations: sizes by `weights`, puzzles of `pools` (by size) in turn, under new names.

    A share `guess_share` has the style `guess`; a share `chat_share` the chat prompt (`chat`, `longer_wording`), whose
    completion continues after the opened `<think>`. The rest has the task's compact prompt.
    """
    rng = random.Random(seed)
    sizes = [people for people in sorted(pools) if weights.get(people, 0) > 0]
    everyone = sorted({name for pool in pools.values() for example in pool for name in example.meta["names"]})
    next_puzzle = dict.fromkeys(sizes, 0)
    while True:
        people = rng.choices(sizes, [weights[size] for size in sizes])[0]
        example = pools[people][next_puzzle[people] % len(pools[people])]
        next_puzzle[people] += 1
        style: Style = "guess" if rng.random() < guess_share else "reason"
        names, others = example.meta["names"], tuple(rng.sample(everyone, people))
        quiz = renamed(example.meta["quiz"], names, others)
        done = completion(
            {"names": others, "statements": example.meta["statements"]}, renamed(example.answer, names, others), style
        )
        if rng.random() < chat_share:
            prompt = chat(longer_wording(quiz, rng), rng.choice(everyone), rng)
            yield Demonstration(prompt, done.removeprefix(OPENING), style, people)
        else:
            yield Demonstration(quiz + "\n", done, style, people)
