"""Demonstrations for the warm start on the task `math`, with completions in two styles.

`reason` gives every operation with its result, innermost first: "3 + 4 = 7; 7 * 17 = 119". `guess` gives the answer
directly, which a small model can do for one operation but hardly for three.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from sharpscope.tasks import Example, MathSpec, make_task
from sharpscope.warm_start.knights_knaves import GUESS, OPENING, Demonstration, Style

EASY = 300
"""Largest number of questions of level 1, which has few."""

Pool = Mapping[tuple[str, int], Sequence[Example]]
"""(family, level) -> questions."""


def questions(
    families: Sequence[str], levels: Sequence[int], count: int, seed: int
) -> dict[tuple[str, int], list[Example]]:
    """`count` questions (at most `EASY` of level 1) of the task's training split, by family and level."""
    pool = {}
    for family in families:
        for level in levels:
            size = min(count, EASY) if level == 1 else count
            spec = MathSpec(families=(family,), levels=(level,), train_size=size, heldout_size=0, seed=seed)
            pool[family, level] = make_task(spec).splits()["train"]
    return pool


def work(family: str, question: str) -> str:
    """Operations with their results, separated by semicolons; the last result is the answer."""
    return "; ".join({"arithmetic": _arithmetic, "linear": _linear, "modular": _modular}[family](question))


def _arithmetic(question: str) -> list[str]:
    steps: list[str] = []
    _reduce(question.removesuffix(" = ?"), steps)
    return steps


def _reduce(expression: str, steps: list[str]) -> int:
    """Evaluate an expression of integers, +, − and *; appends "a + b = c" to `steps` for every operation, innermost first."""

    def value(node: Any) -> int:
        """Value of a part of the expression."""
        if isinstance(node, ast.Constant):
            return cast(int, node.value)
        left, right = value(node.left), value(node.right)
        sign, result = {
            ast.Add: ("+", left + right),
            ast.Sub: ("-", left - right),
            ast.Mult: ("*", left * right),
        }[type(node.op)]
        steps.append(f"{left} {sign} {right} = {result}")
        return result

    return value(ast.parse(expression, mode="eval").body)


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
    steps: list[str] = []
    value = _reduce(f"{a} {sign} {b}" + (f" + {c}" if c else ""), steps)
    times, rest = divmod(value, int(m))
    return [*steps, f"{m} * {times} = {int(m) * times}", f"{value} - {int(m) * times} = {rest}"]


def phrases() -> list[str]:
    """Texts that questions and steps consist of besides digits; each is one token in the embedded policy."""
    return sorted([" + ", " - ", " * ", " = ", "; ", " = ?\n", " mod ", "Solve for x: ", "x = ", "x + ", "x - ", GUESS])


def math_demonstrations(
    pool: Pool, families: Mapping[str, float], levels: Mapping[int, float], *, guess_share: float, seed: int
) -> Iterator[Demonstration]:
    """Endless stream of demonstrations with random questions of `pool`; families and levels have sampling weights."""
    rng = random.Random(seed)
    kinds = sorted(pool)
    weights = [families.get(family, 0.0) * levels.get(level, 0.0) for family, level in kinds]
    while True:
        family, level = rng.choices(kinds, weights)[0]
        example = rng.choice(pool[family, level])
        style: Style = "guess" if rng.random() < guess_share else "reason"
        reasoning = GUESS if style == "guess" else work(family, example.meta["question"])
        yield Demonstration(
            example.prompt, f"{OPENING}{reasoning}</think><answer>{example.answer}</answer>", style, level
        )
