"""Equality of mathematical answers with math-verify, in a separate process with a time limit per answer.

The timeout of math-verify uses signals, which need the main thread and do not interrupt long operations of sympy. Here one
worker process serves all threads. If an answer exceeds the time limit, the worker is killed and the answer is wrong.
"""

from __future__ import annotations

import atexit
import importlib.util
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from sharpscope.errors import UserError
from sharpscope.tasks.answers import final_answer
from sharpscope.tasks.base import Reward

TIME_LIMIT = 5.0
"""Time limit of one comparison [s]."""
LONGEST_ANSWER = 500
"""Longest answer that is parsed [characters]; longer ones are wrong, because parsing takes more than linear time."""
START_LIMIT = 120.0
"""Time limit for starting the worker process [s]; importing sympy takes one or two seconds."""

_STATED = re.compile(r"answer\s{0,3}(?:is|:|=)\s{0,3}(?:is|:|=)?", re.IGNORECASE)
_INTEGER = re.compile(r"[-+]?[0-9]{1,300}")
_SCIENTIFIC = re.compile(r"(?<![\w.])([0-9]+(?:\.[0-9]+)?)[eE]([-+]?[0-9]{1,4})(?![\w.])")
_NUMBER = r"(?:[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)"
_SIGNED = rf"[-+]?\s*{_NUMBER}"
_BRACED = rf"(?:\{{\s*{_SIGNED}\s*\}}|[0-9])"
_PART = rf"(?:{_SIGNED}|\(\s*{_SIGNED}\s*\)|\{{\s*{_SIGNED}\s*\}})"
_VALUE = re.compile(
    rf"[-+]?\s*(?:{_PART}(?:\s*/\s*{_PART})?|(?:[0-9]+\s*)?\\[dt]?frac\s*{_BRACED}\s*{_BRACED}"
    rf"|{_NUMBER} \\cdot 10\^\{{[-+]?[0-9]+\}})"
)
_AROUND = re.compile(
    r"\\(?:text|mathrm|mbox)\s*\{[^{}]*\}|\^\s*(?:\{\s*\\circ\s*\}|\\circ)|\\[,!;:%$]|\\(?:left|right)\b|[%$]"
)
"""Ignored around a number: units, degrees, thin spaces, percent signs."""
_WRAPPED = re.compile(r"\\(?:boxed|mathbf)\s*\{(.*)\}|\((.*)\)")


def as_latex(answer: str) -> str:
    """Convert an answer to LaTeX without math delimiters and line breaks; rewrites 1e-3, ** and pi."""
    text = " ".join(answer.split()).strip()
    for left, right in (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
        if text.startswith(left) and text.endswith(right) and len(text) > len(left) + len(right):
            text = text[len(left) : -len(right)].strip()
    text = text.rstrip(".").replace("**", "^").replace("−", "-")
    text = re.sub(
        r"(?<![\\A-Za-z])(pi|infinity)(?![A-Za-z])", lambda m: {"pi": "\\pi", "infinity": "\\infty"}[m.group()], text
    )
    text = _SCIENTIFIC.sub(r"\1 \\cdot 10^{\2}", text)
    return re.sub(r"(?<!\\)\$", "", text)


def stated(answer: str) -> str:
    """Answer within a sentence: the line after the last "answer is", or its only $…$, or the whole text."""
    matches = list(_STATED.finditer(answer))
    if matches:
        answer = answer[matches[-1].end() :].strip().partition("\n")[0]
    closing = answer.rfind("$")
    opening = answer.rfind("$", 0, closing) if closing >= 0 else -1
    # "$5$ or $6$" has two answers and stays unchanged
    return answer[opening + 1 : closing] if opening >= 0 and answer.count("$") == 2 else answer


def score_math(text: str, truths: Sequence[str]) -> Reward:
    """1 if the final answer, extracted by `answers.final_answer` and `stated`, is mathematically equal to one of `truths`.

    `parts["timed_out"]` is 1 if a comparison exceeded TIME_LIMIT.
    """
    answer = as_latex(stated(final_answer(text)))
    outcomes = [equal(as_latex(final_answer(truth)), answer) for truth in truths]
    correct = any(outcome is True for outcome in outcomes)
    timed_out = not correct and any(outcome is None for outcome in outcomes)
    return Reward(float(correct), {"answer": float(correct), "timed_out": float(timed_out)}, correct=correct)


def score_value(text: str, truths: Sequence[str]) -> Reward:
    """Like `score_math`, but the answer must be a number; an unevaluated expression is wrong."""
    if is_value(as_latex(stated(final_answer(text)))):
        return score_math(text, truths)
    return Reward(0.0, {"answer": 0.0, "timed_out": 0.0}, correct=False)


def is_value(answer: str) -> bool:
    """Whether an answer in LaTeX is one number: integer, decimal or fraction, or an equation with a number on the right."""
    if len(answer) > LONGEST_ANSWER:
        return False
    last = _AROUND.sub("", answer.replace("{,}", "").rpartition("=")[2]).strip()
    inner = _WRAPPED.fullmatch(last)
    inside = (inner[1] or inner[2] or "").strip() if inner else ""
    return _VALUE.fullmatch(last) is not None or _VALUE.fullmatch(inside) is not None


def equal(gold: str, answer: str) -> bool | None:
    """Whether two answers in LaTeX are mathematically equal; None if the comparison exceeds TIME_LIMIT or the memory.

    Raises:
        UserError: math-verify is not installed.
    """
    if not answer or len(answer) > LONGEST_ANSWER:
        return False
    if gold == answer:
        return True
    if _INTEGER.fullmatch(gold) and _INTEGER.fullmatch(answer):
        return int(gold) == int(answer)
    try:
        return _compare(gold, answer)
    except TimeoutError:
        return None


class _Worker:
    """Process that compares answers; started at the first comparison and restarted after it ended."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.process: subprocess.Popen[str] | None = None

    def ask(self, request: str) -> str:
        """The line that the process answers; empty if it ended or was killed after TIME_LIMIT."""
        with self.lock:
            if self.process is None or self.process.poll() is not None:
                self._start()
            return self._line(f"{request}\n", TIME_LIMIT)

    def _line(self, request: str, time_limit: float) -> str:
        process = self.process
        assert process is not None and process.stdin is not None and process.stdout is not None
        timer = threading.Timer(time_limit, process.kill)
        timer.start()
        try:
            process.stdin.write(request)
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:  # the process ended
            line = ""
        timer.cancel()
        if not line:
            process.kill()
            process.wait()
        return line

    def _start(self) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise UserError("math scorer: needs math-verify; pip install 'sharpscope[math]'")
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__).with_name("math_worker.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
        )
        if self._line("", START_LIMIT) != "ready\n":
            raise UserError("math scorer: the worker process does not start; check `python -c 'import math_verify'`")


_workers: dict[int, _Worker] = {}
"""Worker by process. A forked process must not share the pipes and locks of its parent."""


@lru_cache(maxsize=10_000)
def _compare(gold: str, answer: str) -> bool:
    line = _workers.setdefault(os.getpid(), _Worker()).ask(json.dumps([gold, answer]))
    if not line:
        raise TimeoutError  # not kept by the cache
    return line == "true\n"


@atexit.register
def _stop() -> None:
    worker = _workers.pop(os.getpid(), None)
    if worker is not None and worker.process is not None:
        worker.process.kill()
