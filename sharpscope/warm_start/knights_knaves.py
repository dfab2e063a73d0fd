"""Demonstrations for the warm start on Knights-and-Knaves puzzles, with completions in two styles.

`reason` tries assignments in a fixed order, all knights first, and checks each person until the first contradiction; the
last trial is the solution. `guess` gives the solution directly, which a small model can hardly predict. Both end with the
same answer. A policy trained on both chooses the style with its first token, and reinforcement learning quickly finds the
better one.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

from sharpscope.tasks import Example, KnightsKnavesSpec, make_task
from sharpscope.tasks.knights_knaves import truth

Style = Literal["reason", "guess"]
OPENING = "<think>"
ROLE = {True: "knight", False: "knave"}
VERDICT = {True: "yes", False: "no"}
CLAIMS_KNIGHT = {"telling-truth": True, "lying": False}
CONNECTIVES = {"and": "and", "or": "or", "->": "then", "<=>": "iff"}
GUESS = "a guess."


@dataclass(frozen=True)
class Demonstration:
    """A prompt and the completion to imitate."""

    prompt: str
    completion: str  # the first turn, without the end-of-text token
    style: Style
    level: int
    later: tuple[
        tuple[str, str], ...
    ] = ()  # a response of the environment, which is not imitated, and the turn after it

    @property
    def text(self) -> str:
        """Prompt, all turns and all responses."""
        return "".join([self.prompt, self.completion, *(reply + turn for reply, turn in self.later)])


def evaluated(statement: Sequence[Any], names: Sequence[str], roles: Sequence[bool]) -> str:
    """A statement with the truth value of each elementary claim under `roles`: "Ava knave no or Leo knight yes".

    A negated claim is rewritten ("not a knight" as "knave"). Nested statements are in parentheses.
    """
    claim = _claim(statement)
    if claim is not None:
        person, knight = claim
        return f"{names[person]} {ROLE[knight]} {VERDICT[roles[person] == knight]}"
    operator, *parts = statement
    inner = [evaluated(part, names, roles) if _claim(part) else f"({evaluated(part, names, roles)})" for part in parts]
    return f"not {inner[0]}" if operator == "not" else f" {CONNECTIVES[operator]} ".join(inner)


def _claim(statement: Sequence[Any]) -> tuple[int, bool] | None:
    """(person, whether claimed to be a knight) of a claim about one person, negated or not; None for other statements."""
    operator, *parts = statement
    if operator in CLAIMS_KNIGHT:
        return parts[0], CLAIMS_KNIGHT[operator]
    if operator == "not" and (claim := _claim(parts[0])) is not None:
        return claim[0], not claim[1]
    return None


def trials(names: Sequence[str], statements: Sequence[Sequence[Any]]) -> str:
    """Text of the `reason` style: "Ava knight, Leo knight: Ava says Leo knave no, no. Ava knight, Leo knave: … yes.".

    A trial lists the roles and then evaluates each person's statement, up to the first false statement of a knight or true
    statement of a knave ("no."). The first consistent trial is the last one ("yes.").
    """
    text = []
    for roles in product((True, False), repeat=len(names)):
        text.append(", ".join(f"{name} {ROLE[role]}" for name, role in zip(names, roles, strict=True)) + ": ")
        for name, role, statement in zip(names, roles, statements, strict=True):
            text.append(f"{name} says {evaluated(statement, names, roles)}, ")
            if truth(tuple(statement), roles, True) != role:
                text.append("no. ")
                break
        else:
            return "".join(text) + "yes."
    raise ValueError("the puzzle has no solution")


def phrases() -> list[str]:
    """Texts that completions consist of besides names; each is one token in the embedded policies."""
    claims = [f" {role} {word}" for role in ROLE.values() for word in VERDICT.values()]
    return sorted(
        [f" {role}{mark} " for role in ROLE.values() for mark in ",:"]
        + [" says "]
        + [f"{claim}, " for claim in claims]
        + [f"{claim} {connective} " for claim in claims for connective in CONNECTIVES.values()]
        + ["no. ", "yes.", GUESS, "(1) "]
        + [f"\n({number}) " for number in range(2, 8)]
    )


def puzzles(people: int, count: int, seed: int) -> list[Example]:
    """`count` puzzles of the task's training split; for all seeds they share no content with the held-out ones."""
    return make_task(KnightsKnavesSpec(people=people, train_size=count, heldout_size=0, seed=seed)).splits()["train"]


def renamed(text: str, names: Sequence[str], others: Sequence[str]) -> str:
    """Replace each whole word of `names` in `text` by the corresponding word of `others`, simultaneously."""
    replacements = dict(zip(names, others, strict=True))
    return re.sub(rf"\b({'|'.join(map(re.escape, names))})\b", lambda match: replacements[match[1]], text)


_CLAIM = re.compile(r"(\"|that )([A-Z][a-z]+) is a (knight|knave)(?=[\".,])")


def longer_wording(quiz: str, rng: random.Random) -> str:
    """Reword a puzzle like the published sets: capitalize "If …" and negate half of the single claims."""

    def negated(match: re.Match[str]) -> str:
        """Rewrite "Ava is a knave" as the equivalent "Ava is not a knight"."""
        return f"{match[1]}{match[2]} is not a {'knave' if match[3] == 'knight' else 'knight'}"

    quiz = re.sub(r"(\"|that )if ", r"\1If ", quiz)
    return _CLAIM.sub(lambda match: match[0] if rng.random() < 0.5 else negated(match), quiz)


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
    """Chat prompt with a random system message and the puzzle, which ends in `<think>`.

    `name` is used in the example of the answer format.
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
    """Endless stream of demonstrations. Puzzles of a pool are used in turn, with new names.

    `pools` and sampling `weights` are by number of people. The share `guess_share` has the style `guess`, and `chat_share` a
    chat prompt, whose completion starts after `<think>`; the rest has the compact prompt.
    """
    rng = random.Random(seed)
    sizes = [people for people in sorted(pools) if weights.get(people, 0) > 0]
    all_names = sorted({name for pool in pools.values() for example in pool for name in example.meta["names"]})
    next_puzzle = dict.fromkeys(sizes, 0)
    while True:
        people = rng.choices(sizes, [weights[size] for size in sizes])[0]
        example = pools[people][next_puzzle[people] % len(pools[people])]
        next_puzzle[people] += 1
        style: Style = "guess" if rng.random() < guess_share else "reason"
        names, others = example.meta["names"], tuple(rng.sample(all_names, people))
        quiz = renamed(example.meta["quiz"], names, others)
        reasoning = trials(others, example.meta["statements"]) if style == "reason" else GUESS
        text = f"{OPENING}{reasoning}</think><answer>{renamed(example.answer, names, others)}</answer>"
        if rng.random() < chat_share:
            prompt = chat(longer_wording(quiz, rng), rng.choice(all_names), rng)
            yield Demonstration(prompt, text.removeprefix(OPENING), style, people)
        else:
            yield Demonstration(quiz + "\n", text, style, people)
