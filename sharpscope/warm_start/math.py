"""Demonstrations for the warm start of `math`: generated questions, worked operation by operation or answered at once.

`reason` writes every operation with its result, the innermost first: "3 + 4 = 7; 7 * 17 = 119". `guess` writes the
answer down at once, which a small model can do for one operation and hardly for three.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from sharpscope.tasks import Example, MathSpec, make_task
from sharpscope.warm_start.knights_knaves import GUESS, OPENING, Demonstration, Style

EASY = 300
"""Most questions of level 1, of which few exist."""
BINDING = {"+": 1, "-": 1, "*": 2}

Pool = Mapping[tuple[str, int], Sequence[Example]]
"""Questions by family and level."""


def questions(
    families: Sequence[str], levels: Sequence[int], count: int, seed: int, split: Literal["train", "heldout"] = "train"
) -> dict[tuple[str, int], list[Example]]:
    """`count` questions (of level 1 at most 300) of the task's training or held-out side, by family and level."""
    pool = {}
    for family in families:
        for level in levels:
            size = min(count, EASY) if level == 1 else count
            sizes = {"train_size": 1, "heldout_size": 0} | {f"{split}_size": size}
            spec = MathSpec(families=(family,), levels=(level,), **sizes, seed=seed)
            pool[family, level] = make_task(spec).splits()[split]
    return pool


def work(family: str, question: str) -> str:
    """The steps to the answer: operations with their results, separated by semicolons; the last result is the answer."""
    return "; ".join({"arithmetic": _arithmetic, "linear": _linear, "modular": _modular}[family](question))


def _arithmetic(question: str) -> list[str]:
    steps: list[str] = []
    _reduce(question.removesuffix(" = ?"), steps)
    return steps


def _reduce(expression: str, steps: list[str]) -> int:
    """Value of an expression of whole numbers, +, −, * and brackets; appends "a + b = c" for every operation."""
    operators: list[str] = []
    values: list[int] = []

    def apply() -> None:
        sign, right, left = operators.pop(), values.pop(), values.pop()
        value = {"+": left + right, "-": left - right, "*": left * right}[sign]
        steps.append(f"{left} {sign} {right} = {value}")
        values.append(value)

    for token in re.findall(r"\d+|[-+*()]", expression):
        if token.isdigit():
            values.append(int(token))
        elif token == "(":
            operators.append(token)
        elif token == ")":
            while operators[-1] != "(":
                apply()
            operators.pop()
        else:
            while operators and operators[-1] != "(" and BINDING[operators[-1]] >= BINDING[token]:
                apply()
            operators.append(token)
    while operators:
        apply()
    return values[0]


_LINEAR = re.compile(r"Solve for x: (\d*)x ([+-]) (\d+) = (?:(\d*)x ([+-]) )?(-?\d+)")


def _linear(question: str) -> list[str]:
    """ax + b = cx + d: "ax = …" gathers what belongs together, then x is divided out."""
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
    steps: list[str] = []
    value = _reduce(f"{a} {sign} {b}" + (f" + {c}" if c else ""), steps)
    times, rest = divmod(value, int(m))
    return [*steps, f"{m} * {times} = {int(m) * times}", f"{value} - {int(m) * times} = {rest}"]


def phrases() -> list[str]:
    """What questions and steps are put together from, besides digits: one token each in the embedded policy."""
    return sorted([" + ", " - ", " * ", " = ", "; ", " = ?\n", " mod ", "Solve for x: ", "x = ", "x + ", "x - ", GUESS])


def math_demonstrations(
    pool: Pool, families: Mapping[str, float], levels: Mapping[int, float], *, guess_share: float, seed: int
) -> Iterator[Demonstration]:
    """Endless stream of demonstrations: families and levels by their shares, questions of `pool` drawn at random."""
    rng = random.Random(seed)
    kinds = sorted(pool)
    shares = [families.get(family, 0.0) * levels.get(level, 0.0) for family, level in kinds]
    while True:
        family, level = rng.choices(kinds, shares)[0]
        example = rng.choice(pool[family, level])
        style: Style = "guess" if rng.random() < guess_share else "reason"
        thought = GUESS if style == "guess" else work(family, example.meta["question"])
        yield Demonstration(
            example.prompt, f"{OPENING}{thought}</think><answer>{example.answer}</answer>", style, level
        )
