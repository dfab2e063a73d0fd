"""Equality of mathematical answers by math-verify, in a process of its own with a time limit for each answer.

math-verify limits its time with signals, which exist only in a main thread, and may still be stuck inside one long
operation of sympy. Here one helper process serves this whole process, from any thread; an answer that takes too long
costs that helper its life and counts as wrong.
"""

from __future__ import annotations

import atexit
import importlib.util
import json
import os
import queue
import re
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from sharpscope.errors import UserError
from sharpscope.tasks.answers import final_answer
from sharpscope.tasks.base import Reward

TIME_LIMIT = 5.0
"""Most seconds for one comparison unless the task says otherwise."""
LONGEST_ANSWER = 500
"""Characters beyond which an answer is wrong unread: real ones are far shorter, and the grammar is slower than linear.
"""
START_LIMIT = 120.0
"""Most seconds for the helper process to start [s]; importing sympy takes one or two on a free machine."""

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
"""What may stand around a number and is none: units, degrees, thin spaces, percent."""
_WRAPPED = re.compile(r"\\(?:boxed|mathbf)\s*\{(.*)\}|\((.*)\)")


def as_latex(answer: str) -> str:
    """An answer as LaTeX without delimiters: math marks and line ends are dropped, plain forms (1e-3, **, pi, sqrt(2))
    rewritten.
    """
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
    """What a sentence gives as the answer: the line after its last "answer is", else its last $…$, else all of it."""
    marks = list(_STATED.finditer(answer))
    if marks:
        answer = answer[marks[-1].end() :].strip().partition("\n")[0]
    closing = answer.rfind("$")
    opening = answer.rfind("$", 0, closing) if closing >= 0 else -1
    # "$5$ or $6$" names two answers and must not be read as its last
    return answer[opening + 1 : closing] if opening >= 0 and answer.count("$") == 2 else answer


def score_math(text: str, truths: Sequence[str], time_limit: float = TIME_LIMIT) -> Reward:
    """1 if the final answer is mathematically equal to one of the truths; `parts["timed_out"]` is 1 where that took
    too long.

    The final answer is that of `answers.final_answer`, then of `stated`: earlier answers and what stands around it
    count for nothing.
    """
    answer = as_latex(stated(final_answer(text)))
    outcomes = [equal(as_latex(final_answer(truth)), answer, time_limit) for truth in truths]
    correct = any(outcome is True for outcome in outcomes)
    timed_out = not correct and any(outcome is None for outcome in outcomes)
    return Reward(float(correct), {"answer": float(correct), "timed_out": float(timed_out)}, correct=correct)


def score_value(text: str, truths: Sequence[str], time_limit: float = TIME_LIMIT) -> Reward:
    """As `score_math`, of an answer that is a number; an expression still to be worked out is wrong, whatever its value."""
    if is_value(as_latex(stated(final_answer(text)))):
        return score_math(text, truths, time_limit)
    return Reward(0.0, {"answer": 0.0, "timed_out": 0.0}, correct=False)


def is_value(answer: str) -> bool:
    """Whether an answer in LaTeX is one number: whole, decimal or a fraction; of equations what stands last."""
    if len(answer) > LONGEST_ANSWER:
        return False
    last = _AROUND.sub("", answer.replace("{,}", "").rpartition("=")[2]).strip()
    inner = _WRAPPED.fullmatch(last)
    inside = (inner[1] or inner[2] or "").strip() if inner else ""
    return _VALUE.fullmatch(last) is not None or _VALUE.fullmatch(inside) is not None


def equal(gold: str, answer: str, time_limit: float = TIME_LIMIT) -> bool | None:
    """Whether two answers in LaTeX are mathematically equal; None where the helper needed longer than `time_limit` [s].

    Raises:
        UserError: math-verify is not installed.
    """
    if not answer or len(answer) > LONGEST_ANSWER:
        return False
    if gold == answer:
        return True
    if _INTEGER.fullmatch(gold) and _INTEGER.fullmatch(answer):
        return int(gold) == int(answer)
    return _helper().ask(gold, answer, time_limit)


class _Helper:
    """The process that compares, started at the first question and again after each that it did not survive."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._known: OrderedDict[tuple[str, str], bool] = OrderedDict()

    def ask(self, gold: str, answer: str, time_limit: float) -> bool | None:
        with self._lock:
            if (gold, answer) in self._known:
                return self._known[gold, answer]
            if self._process is None or self._process.poll() is not None:
                self._start()
            assert self._process is not None and self._process.stdin is not None
            try:
                self._process.stdin.write(json.dumps([gold, answer]) + "\n")
                self._process.stdin.flush()
                line = self._lines.get(timeout=time_limit)
            except queue.Empty:
                self.stop()
                return None
            except OSError:
                line = ""
            if line not in ("true\n", "false\n"):  # the process died of this answer: out of memory
                self.stop()
                return False
            self._known[gold, answer] = line == "true\n"
            if len(self._known) > 10_000:
                self._known.popitem(last=False)
            return line == "true\n"

    def _start(self) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise UserError("the math scorer needs the library 'math-verify'; pip install 'sharpscope[math]'")
        process = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__).with_name("math_worker.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
        )
        lines: queue.SimpleQueue[str] = queue.SimpleQueue()

        def read() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                lines.put(line)
            lines.put("")

        threading.Thread(target=read, daemon=True, name="math answers").start()
        self._process, self._lines = process, lines
        try:
            started = lines.get(timeout=START_LIMIT) == "ready\n"
        except queue.Empty:
            started = False
        if not started:
            self.stop()
            raise UserError(
                "the math scorer's helper process does not start; does `python -c 'import math_verify'` work?"
            )

    def stop(self) -> None:
        """End the process; the next question starts another."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()


_helpers: dict[int, _Helper] = {}


def _helper() -> _Helper:
    """This process's helper: a fork must not share its parent's pipes or a lock that a thread of the parent held."""
    helper = _helpers.get(os.getpid())
    if helper is None:
        helper = _helpers.setdefault(os.getpid(), _Helper())
    return helper


@atexit.register
def _stop() -> None:
    helper = _helpers.pop(os.getpid(), None)
    if helper is not None:
        helper.stop()
