"""Demonstrations for the warm start of the embedded policies, with completions in two styles.

`reason` is worked out step by step; `guess` gives an answer directly, which a small model can hardly predict. A policy trained on both
chooses the style with its first token, and reinforcement learning quickly finds the better one.

- knights_knaves: tries assignments in a fixed order, all knights first, and checks each person until the first contradiction; the last
  trial is the solution. A guess gives the solution at once.
- math: gives every operation with its result, innermost first: "3 + 4 = 7; 7 * 17 = 119".
- tool_qa: states the relation, searches for the entity and repeats the value from the passage. A guess answers with the entity. The
  responses are those of the task on generated worlds with other seeds, so facts cannot be memorized.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, cast

from sharpscope.tasks import (
    Example,
    InteractiveTask,
    KnightsKnavesSpec,
    MathSpec,
    ToolQaSpec,
    make_task,
    respond_all,
)
from sharpscope.tasks.knights_knaves import truth

OPENING = "<think>"
GUESS = "a guess."
ROLE = {True: "knight", False: "knave"}
VERDICT = {True: "yes", False: "no"}
CLAIMS_KNIGHT = {"telling-truth": True, "lying": False}
CONNECTIVES = {"and": "and", "or": "or", "->": "then", "<=>": "iff"}
EASY = 300
"""Largest number of math questions of level 1, which has few."""
FIRST_WORLD = 1_000_000
"""Seed of the first world of tool_qa, larger than typical seeds of a task."""


@dataclass(frozen=True)
class Demonstration:
    """A prompt and its continuation: turns to imitate, between them responses of the environment, which are not imitated."""

    prompt: str
    turns: tuple[str, ...]  # the end-of-text token follows the last one


def demonstrations(policy: str, spec: Mapping[str, Any]) -> Iterator[Demonstration]:
    """Endless demonstrations for a policy with the settings `spec`."""
    seed, shares, count = spec["seed"], spec["weights"], spec["questions"]
    if policy == "math":
        return math_demonstrations(
            questions(sorted(shares), sorted(spec["levels"]), count, seed), spec
        )
    if policy == "tool_qa":
        return tool_demonstrations(search_questions(spec["worlds"], count, seed), spec)
    pools = {}
    for people, share in shares.items():
        size = max(1, round(count * share / max(shares.values())))
        task = make_task(
            KnightsKnavesSpec(people=people, train_size=size, heldout_size=0, seed=seed)
        )
        # for all seeds it shares no content with held-out puzzles
        pools[people] = task.splits()["train"]
    return puzzle_demonstrations(pools, spec)


# -- knights_knaves


def evaluated(statement: Sequence[Any], names: Sequence[str], roles: Sequence[bool]) -> str:
    """A statement with the truth value of each elementary claim under `roles`: "Ava knave no or Leo knight yes".

    A negated claim is rewritten ("not a knight" as "knave"). Nested statements are in parentheses.
    """
    claim = _claim(statement)
    if claim is not None:
        person, knight = claim
        return f"{names[person]} {ROLE[knight]} {VERDICT[roles[person] == knight]}"
    operator, *parts = statement
    inner = [
        evaluated(part, names, roles) if _claim(part) else f"({evaluated(part, names, roles)})"
        for part in parts
    ]
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
        text.append(
            ", ".join(f"{name} {ROLE[role]}" for name, role in zip(names, roles, strict=True))
            + ": "
        )
        for name, role, statement in zip(names, roles, statements, strict=True):
            text.append(f"{name} says {evaluated(statement, names, roles)}, ")
            if truth(tuple(statement), roles, True) != role:
                text.append("no. ")
                break
        else:
            return "".join(text) + "yes."
    raise ValueError("the puzzle has no solution")


def renamed(text: str, names: Sequence[str], others: Sequence[str]) -> str:
    """Replace each whole word of `names` in `text` by the corresponding word of `others`, simultaneously."""
    replacements = dict(zip(names, others, strict=True))
    return re.sub(
        rf"\b({'|'.join(map(re.escape, names))})\b", lambda match: replacements[match[1]], text
    )


_CLAIM = re.compile(r"(\"|that )([A-Z][a-z]+) is a (knight|knave)(?=[\".,])")


def longer_wording(quiz: str, rng: random.Random) -> str:
    """Reword a puzzle like the published sets: capitalize "If …" and negate half of the single claims."""

    def negated(match: re.Match[str]) -> str:
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
    return (
        "".join(f"<|im_start|>{turn}<|im_end|>\n" for turn in turns)
        + f"<|im_start|>assistant\n{OPENING}"
    )


def puzzle_demonstrations(
    pools: Mapping[int, Sequence[Example]], spec: Mapping[str, Any]
) -> Iterator[Demonstration]:
    """Endless stream of demonstrations. Puzzles of a pool, by number of people, are used in turn, with new names.

    The share `guess_share` guesses, and `chat_share` has a chat prompt, whose completion starts after `<think>`; the rest has the
    compact prompt.
    """
    rng = random.Random(spec["seed"])
    sizes = sorted(pools)
    all_names = sorted(
        {name for pool in pools.values() for example in pool for name in example.meta["names"]}
    )
    next_puzzle = dict.fromkeys(sizes, 0)
    while True:
        people = rng.choices(sizes, [spec["weights"][size] for size in sizes])[0]
        example = pools[people][next_puzzle[people] % len(pools[people])]
        next_puzzle[people] += 1
        guesses = rng.random() < spec["guess_share"]
        names, others = example.meta["names"], tuple(rng.sample(all_names, people))
        quiz = renamed(example.meta["quiz"], names, others)
        reasoning = GUESS if guesses else trials(others, example.meta["statements"])
        text = (
            f"{OPENING}{reasoning}</think><answer>{renamed(example.answer, names, others)}</answer>"
        )
        if rng.random() < spec["chat_share"]:
            prompt = chat(longer_wording(quiz, rng), rng.choice(all_names), rng)
            yield Demonstration(prompt, (text.removeprefix(OPENING),))
        else:
            yield Demonstration(quiz + "\n", (text,))


# -- math


def questions(
    families: Sequence[str], levels: Sequence[int], count: int, seed: int
) -> dict[tuple[str, int], list[Example]]:
    """`count` questions (at most `EASY` of level 1) of the task's training split, by family and level."""
    pool = {}
    for family, level in product(families, levels):
        size = min(count, EASY) if level == 1 else count
        spec = MathSpec(
            families=(family,), levels=(level,), train_size=size, heldout_size=0, seed=seed
        )
        pool[family, level] = make_task(spec).splits()["train"]
    return pool


def work(family: str, question: str) -> str:
    """Operations with their results, separated by semicolons; the last result is the answer."""
    if family == "arithmetic":
        return "; ".join(_reduce(question.removesuffix(" = ?"))[0])
    return "; ".join(_linear(question) if family == "linear" else _modular(question))


def _reduce(expression: str) -> tuple[list[str], int]:
    """Lines "a + b = c" for every operation of an expression of integers, +, − and *, innermost first, and its value."""
    steps: list[str] = []

    def value(node: Any) -> int:
        if isinstance(node, ast.Constant):
            return cast(int, node.value)
        a, b = value(node.left), value(node.right)
        sign, result = {ast.Add: ("+", a + b), ast.Sub: ("-", a - b), ast.Mult: ("*", a * b)}[
            type(node.op)
        ]
        steps.append(f"{a} {sign} {b} = {result}")
        return result

    return steps, value(ast.parse(expression, mode="eval").body)


_LINEAR = re.compile(r"Solve for x: (\d*)x ([+-]) (\d+) = (?:(\d*)x ([+-]) )?(-?\d+)")


def _linear(question: str) -> list[str]:
    """Steps for ax + b = cx + d: move b to the right and cx to the left, then divide by the coefficient of x."""
    match = _LINEAR.fullmatch(question)
    assert match is not None, question
    a, b_sign, b_size, c, d_sign, d_size = match.groups()
    b = int(b_size) if b_sign == "+" else -int(b_size)
    d = -int(d_size) if d_sign == "-" else int(d_size)
    left, right = int(a or 1) - (0 if c is None else int(c or 1)), d - b
    steps = [f"{d} {'-' if b > 0 else '+'} {abs(b)} = {right}"]
    if c is not None:
        steps.append(f"{int(a or 1)} - {int(c or 1)} = {left}")
    if left != 1:
        steps.append(f"{left}x = {right}")
    return [*steps, f"x = {right // left}"]


_MODULAR = re.compile(r"\((\d+) ([+*]) (\d+)(?: \+ (\d+))?\) mod (\d+) = \?")


def _modular(question: str) -> list[str]:
    match = _MODULAR.fullmatch(question)
    assert match is not None, question
    a, sign, b, c, m = match.groups()
    steps, value = _reduce(f"{a} {sign} {b}" + (f" + {c}" if c else ""))
    times, rest = divmod(value, int(m))
    return [*steps, f"{m} * {times} = {int(m) * times}", f"{value} - {int(m) * times} = {rest}"]


def math_demonstrations(
    pool: Mapping[tuple[str, int], Sequence[Example]], spec: Mapping[str, Any]
) -> Iterator[Demonstration]:
    """Endless stream of demonstrations with random questions of `pool` by family and level, which have sampling weights."""
    rng = random.Random(spec["seed"])
    kinds = sorted(pool)
    weights = [spec["weights"][family] * spec["levels"][level] for family, level in kinds]
    while True:
        family, level = rng.choices(kinds, weights)[0]
        example = rng.choice(pool[family, level])
        reasoning = (
            GUESS if rng.random() < spec["guess_share"] else work(family, example.meta["question"])
        )
        yield Demonstration(
            example.prompt, (f"{OPENING}{reasoning}</think><answer>{example.answer}</answer>",)
        )


# -- tool_qa


def search_questions(worlds: int, count: int, seed: int) -> list[tuple[Example, str]]:
    """Questions of the task's training split with one hop, `count` of each world, and the response to the search."""
    pool: list[tuple[Example, str]] = []
    for world in range(worlds):
        spec = ToolQaSpec(train_size=count, heldout_size=0, seed=FIRST_WORLD * (1 + seed) + world)
        task = cast(InteractiveTask, make_task(spec))
        examples = task.splits()["train"]
        asked = [f"<search>{example.meta['chain'][0][0]}</search>" for example in examples]
        pool += zip(examples, map(str, respond_all(task, examples, asked)), strict=True)
    return pool


def tool_demonstrations(
    pool: Sequence[tuple[Example, str]], spec: Mapping[str, Any]
) -> Iterator[Demonstration]:
    """Endless stream of conversations with random questions of `pool`."""
    rng = random.Random(spec["seed"])
    while True:
        rng.random()  # this and `randrange(1)` keep the stream from which the shipped policy was made
        example, reply = rng.choice(pool)
        ((thing, relation, value),) = example.meta["chain"]
        if rng.random() < spec["guess_share"]:
            rng.randrange(1)
            turns: tuple[str, ...] = (f"{OPENING}{GUESS}</think><answer>{thing}</answer>",)
        else:
            search = f"{OPENING}{thing}, {relation}</think><search>{thing}</search>"
            turns = (
                search,
                reply,
                f"{OPENING} {relation}: {value}</think><answer>{value}</answer>",
            )
        yield Demonstration(example.prompt, turns)
