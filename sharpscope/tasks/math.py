"""Task `math`: generated questions in three families with levels 1 to 4, and a scorer that compares answers with math-verify.

A family is a function from a level and a random generator to a question and its answer. Benchmarks in files are read by the task `dataset`.

The timeout of math-verify uses signals, which need the main thread and do not interrupt long operations of sympy. Here one
worker process (`math_worker.py`) serves all threads; what it forks to compare is killed where an answer exceeds the time limit.
A process pool of Python would run a user's script again in its workers, and cannot be used below another pool.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import chain
from pathlib import Path
from random import Random

from sharpscope.config.tasks import MathSpec
from sharpscope.errors import UserError
from sharpscope.tasks.answers import final_answer, score_value, stated
from sharpscope.tasks.base import (
    Example,
    Reward,
    content_id,
    once,
    splits_by_level,
    stream_seed,
    take,
)

# -- the scorer

TIME_LIMIT = 1.0
"""Time limit of one comparison [s]."""
STEP_LIMIT = 30.0
"""Time limit of all comparisons of a step [s]; answers that are left are wrong, with `parts["timed_out"]` = 1."""
GRACE = 5.0
"""How much longer than its limit the worker process may take before it is killed and started again [s]."""
LONGEST_ANSWER = 500
"""Longest answer that is parsed [characters]; longer ones are wrong, because parsing takes more than linear time."""
START_LIMIT = 120.0
"""Time limit for starting the worker process [s]; importing sympy takes one or two seconds."""

_SCIENTIFIC = re.compile(r"(?<![\w.])([0-9]+(?:\.[0-9]+)?)[eE]([-+]?[0-9]{1,4})(?![\w.])")


def as_latex(answer: str) -> str:
    """Convert an answer to LaTeX without math delimiters and line breaks; rewrites 1e-3, ** and pi."""
    text = " ".join(answer.split()).strip()
    for left, right in (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
        if text.startswith(left) and text.endswith(right) and len(text) > len(left) + len(right):
            text = text[len(left) : -len(right)].strip()
    text = text.rstrip(".").replace("**", "^").replace("−", "-")
    text = re.sub(r"(?<![\\A-Za-z])(pi|infty)(?![A-Za-z])", r"\\\1", text)
    text = _SCIENTIFIC.sub(r"\1 \\cdot 10^{\2}", text)
    return re.sub(r"(?<!\\)\$", "", text)


def score_math(text: str, truths: Sequence[str]) -> Reward:
    """1 if the final answer, extracted by `answers.final_answer` and `stated`, is mathematically equal to one of `truths`.

    `parts["timed_out"]` is 1 if a comparison exceeded TIME_LIMIT.
    """
    answer = as_latex(stated(final_answer(text)))
    outcomes = [equal(as_latex(final_answer(truth)), answer) for truth in truths]
    correct = True in outcomes
    timed_out = not correct and None in outcomes
    return Reward(
        float(correct),
        {"answer": float(correct), "timed_out": float(timed_out)},
        correct=correct,
    )


def equal(gold: str, answer: str) -> bool | None:
    """Whether two answers in LaTeX are mathematically equal; None if the comparison exceeds a time limit or the memory.

    Raises:
        UserError: math-verify is not installed.
    """
    if not answer or len(answer) > LONGEST_ANSWER:
        return False
    if gold == answer:
        return True
    step = _step.get()
    seconds = TIME_LIMIT if step is None else min(TIME_LIMIT, step.left)
    if seconds <= 0:
        return None
    worker = _workers.setdefault(os.getpid(), _Worker())
    worker.start()
    began = time.monotonic()
    line = worker.ask(json.dumps([gold, answer, seconds]), seconds + GRACE)
    if step is not None:
        step.left -= time.monotonic() - began
    return {"true\n": True, "false\n": False}.get(line)


@dataclass
class _StepTime:
    """Time that is left for the comparisons of a step [s]."""

    left: float


_step: ContextVar[_StepTime | None] = ContextVar("step", default=None)


@contextmanager
def limited_step() -> Iterator[None]:
    """Within it all comparisons together take at most STEP_LIMIT; within another one nothing changes."""
    token = _step.set(_step.get() or _StepTime(STEP_LIMIT))
    try:
        yield
    finally:
        _step.reset(token)


class _Worker:
    """Process that compares answers; started at the first comparison and again after it ended."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Start the process if none runs."""
        with self.lock:
            if self.process is not None and self.process.poll() is None:
                return
            if importlib.util.find_spec("math_verify") is None:
                raise UserError("math scorer: needs math-verify; pip install 'sharpscope[math]'")
            command = [sys.executable, "-P", str(Path(__file__).with_name("math_worker.py"))]
            pipe, null = subprocess.PIPE, subprocess.DEVNULL
            self.process = subprocess.Popen(
                command,
                stdin=pipe,
                stdout=pipe,
                stderr=null,
                text=True,
                encoding="utf-8",
            )
            if self._line(self.process, "", START_LIMIT) != "ready\n":
                why = "the worker process does not start; check `python -c 'import math_verify'`"
                raise UserError(f"math scorer: {why}")

    def ask(self, request: str, time_limit: float) -> str:
        """The line that the process answers; empty if it ended or was killed after `time_limit`."""
        with self.lock:
            return "" if self.process is None else self._line(self.process, request, time_limit)

    def _line(self, process: subprocess.Popen[str], request: str, time_limit: float) -> str:
        assert process.stdin is not None and process.stdout is not None
        timer = threading.Timer(time_limit, process.kill)
        timer.start()
        try:
            process.stdin.write(f"{request}\n" if request else "")
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:  # the process ended
            line = ""
        timer.cancel()
        if not line:
            process.kill()
            process.wait()
        return line


_workers: dict[int, _Worker] = {}
"""Worker by process. A forked process must not share the pipes and locks of its parent."""

# -- questions

LEVELS = (1, 2, 3, 4)
LARGEST = 12
"""Largest number in an arithmetic question."""


def arithmetic(level: int, rng: Random) -> tuple[str, str]:
    """`level` + 1 numbers from 0 to 12 with +, − and *, and brackets from level 2; the answer is an integer."""
    text, value, _ = _expression(level, rng)
    return f"{text} = ?", str(value)


def _expression(operators: int, rng: Random) -> tuple[str, int, int]:
    """Text, value and precedence (1 sum, 2 product, 3 number) of a random expression."""
    if operators == 0:
        number = rng.randint(0, LARGEST)
        return str(number), number, 3
    left_operators = rng.randint(0, operators - 1)
    left, left_value, left_precedence = _expression(left_operators, rng)
    right, right_value, right_precedence = _expression(operators - 1 - left_operators, rng)
    sign = rng.choice("+-*")
    precedence = 2 if sign == "*" else 1
    # only necessary brackets: a − (b + c), but not (a + b) − c
    left = f"({left})" if left_precedence < precedence else left
    right = (
        f"({right})"
        if right_precedence < precedence or (right_precedence == precedence and sign == "-")
        else right
    )
    value = {
        "+": left_value + right_value,
        "-": left_value - right_value,
        "*": left_value * right_value,
    }[sign]
    return f"{left} {sign} {right}", value, precedence


def linear(level: int, rng: Random) -> tuple[str, str]:
    """Linear equations by level: x + a = b; ax + b = c; ax + b = cx + d; a(x + b) = cx + d with a fraction as solution."""
    if level == 4:
        while True:
            a = rng.randint(2, 9)
            b = _nonzero(rng)
            c = rng.randint(1, 9)
            d = _nonzero(rng)
            if a != c:
                break
        return f"Solve for x: {a}(x {_signed(b)}) = {_times(c)} {_signed(d)}", str(
            Fraction(d - a * b, a - c)
        )
    x = rng.randint(-12, 12)
    b = _nonzero(rng)
    a = 1 if level == 1 else rng.randint(2, 9)
    c = rng.choice([number for number in range(1, 10) if number != a]) if level == 3 else 0
    right = a * x + b - c * x
    side = f"{_times(c)} {_signed(right)}" if c else str(right)
    return f"Solve for x: {_times(a)} {_signed(b)} = {side}", str(x)


def _nonzero(rng: Random) -> int:
    return rng.choice((-1, 1)) * rng.randint(1, 20)


def _signed(number: int) -> str:
    return f"{'-' if number < 0 else '+'} {abs(number)}"


def _times(number: int) -> str:
    return "x" if number == 1 else f"{number}x"


def modular(level: int, rng: Random) -> tuple[str, str]:
    """Remainders by level: a + b mod m; a * b mod m; a * b + c mod m; a^k mod m. 0 ≤ answer < m."""
    m = rng.randint(2, 13)
    a = rng.randint(2, 30)
    b = rng.randint(2, 30)
    c = rng.randint(1, 30)
    if level == 4:
        k = rng.randint(2, 9)
        return f"{a}^{k} mod {m} = ?", str(pow(a, k, m))
    text, value = {
        1: (f"({a} + {b})", a + b),
        2: (f"({a} * {b})", a * b),
        3: (f"({a} * {b} + {c})", a * b + c),
    }[level]
    return f"{text} mod {m} = ?", str(value % m)


FAMILIES: dict[str, Callable[[int, Random], tuple[str, str]]] = {
    f.__name__: f for f in (arithmetic, linear, modular)
}
ORDERLESS = ("arithmetic", "modular")
"""Families in which questions can differ only in the order of terms, such as 3 + 4 and 4 + 3."""


def unordered(family: str, question: str) -> str:
    """Normal form of a question with sorted terms and factors, equal for 3 + 4 and 4 + 3."""
    if family not in ORDERLESS:
        return question
    text = question.removesuffix(" = ?").replace(" mod ", " % ")
    return _sorted_form(ast.parse(text, mode="eval").body)  # parsed, never evaluated


def _sorted_form(node: ast.expr) -> str:
    if not isinstance(node, ast.BinOp):
        return ast.unparse(node)
    if isinstance(node.op, ast.Add | ast.Sub):
        return f"({' '.join(sorted(_terms(node, '+')))})"
    if isinstance(node.op, ast.Mult):
        return f"({' * '.join(sorted(_factors(node)))})"
    return f"({_sorted_form(node.left)} {type(node.op).__name__} {_sorted_form(node.right)})"


def _terms(node: ast.expr, sign: str) -> list[str]:
    """Signed terms of a sum without brackets: +1, -2, +3 for 1 - (2 - 3)."""
    if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub)):
        return [sign + _sorted_form(node)]
    right_sign = {"+": "-", "-": "+"}[sign] if isinstance(node.op, ast.Sub) else sign
    return [*_terms(node.left, sign), *_terms(node.right, right_sign)]


def _factors(node: ast.expr) -> list[str]:
    if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult)):
        return [_sorted_form(node)]
    return [*_factors(node.left), *_factors(node.right)]


class MathTask:
    """Splits `train` and `heldout` (`spec.levels`) and `unseen` (`spec.unseen_levels`).

    `meta` of an example: id, level, family, question, and form (the question with sorted terms and factors). No form of a
    held-out question is in the training set: if 3 + 4 is held out, 4 + 3 is not trained on.
    """

    name = "math"

    def __init__(self, spec: MathSpec) -> None:
        self.spec = spec

    @once
    def splits(self) -> dict[str, list[Example]]:
        """Questions by split, without splits of size 0.

        Raises:
            UserError: there are too few different questions.
        """
        return splits_by_level(self.spec, self.spec.levels, self.spec.unseen_levels, self._level)

    @cached_property
    def _heldout_forms(self) -> set[str]:
        spec = self.spec
        return {
            e.meta["form"]
            for level in spec.levels
            for e in self._level("heldout", level, spec.heldout_size)
        }

    def score(self, example: Example, completion: str) -> Reward:
        """1 if the final answer of prefill and completion is a number equal to the correct one, otherwise 0.

        An expression, such as the question 3 + 4 itself, is not a number.
        """
        return score_value(example.whole(completion), (example.answer,))

    def _level(self, split: str, level: int, count: int) -> Iterator[Example]:
        """`count` questions of each family; families alternate, so that the first questions cover all of them."""
        without = self._heldout_forms if split == "train" else ()
        streams = [
            self._stream(split, family, level) for family in dict.fromkeys(self.spec.families)
        ]
        taken = [take(stream, split, level, count, without) for stream in streams]
        return chain.from_iterable(zip(*taken, strict=True))

    def _stream(self, split: str, family: str, level: int) -> Iterator[Example]:
        rng = Random(stream_seed("math", self.spec.seed, split, family, level))
        while True:
            question, answer = FAMILIES[family](level, rng)
            prompt = self.spec.template.replace("{prompt}", question)
            meta = {
                "id": content_id(question),
                "level": level,
                "family": family,
                "question": question,
            }
            meta["form"] = unordered(family, question)
            yield Example(prompt, answer, meta)
