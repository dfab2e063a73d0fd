"""Equality of answers: right, wrong and adversarial ones; time limits; threads and processes; nothing is evaluated."""

from __future__ import annotations

import multiprocessing
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from sharpscope.errors import UserError
from sharpscope.tasks import math_scoring
from sharpscope.tasks.math_scoring import score_math, score_value

pytest.importorskip("math_verify", reason="needs the optional library math-verify")

RIGHT = [
    # one half in a dozen formats
    *(
        ("1/2", answer)
        for answer in (
            "0.5",
            r"\frac{1}{2}",
            r"\boxed{\frac{1}{2}}",
            r"<think>0.7?</think><answer>0.5</answer>",
            r"50\%",
            r"\frac{1}{2} \text{ hours}",
            "x=1/2",
            "5e-1",
        )
    ),
    ("0.5", r"\frac{1}{2}"),
    ("1/3", "0.33333333"),
    ("1,234", "1234"),
    ("-3", "−3"),
    ("90", r"90^\circ"),
    ("5", r"\$5"),
    ("1000", "10^{3}"),
    ("1024", "2**10"),
    ("0.001", "1e-3"),
    ("6", "3!"),
    ("2.5", r"2\frac{1}{2}"),
    (r"\sqrt{8}", r"2\sqrt{2}"),
    (r"\frac{1}{\sqrt{2}}", r"\frac{\sqrt{2}}{2}"),
    (r"2\pi", "2pi"),
    (r"\infty", "infinity"),
    ("x^2+2x+1", "(x+1)^2"),
    (r"\{1,2,3\}", r"\{3,2,1\}"),
    ("1,2", "2, 1"),
    (r"\{-2,2\}", r"\pm 2"),
    (r"(1,2)\cup(3,4)", r"(3,4) \cup (1,2)"),
    ("3", "x = 3"),
    (r"\text{yes}", "yes"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
    ("5", "first 4, no:\n<answer>4</answer> wait <answer>5</answer>"),
    ("5", r"\boxed{4} no, \boxed{5}"),
    ("5", "Final answer: 5"),
    (r"work, then \boxed{18}", "18"),
]

WRONG = [
    *(
        ("1/2", answer)
        for answer in ("2", "0.51", "-1/2", "0.05", "1/2x", "1//3", "", " ", "one third", "5", "50", "2/1")
    ),
    ("1234", "1.234"),
    ("3", "-3"),
    ("2", r"\sqrt{2}"),
    (r"\sqrt{2}", "1.41"),
    (r"\pi", "22/7"),
    (r"\{1,2,3\}", r"\{1,2\}"),
    ("(3,4)", "(4,3)"),
    ("[0,1)", "(0,1]"),
    (r"\text{yes}", "no"),
    ("5", "<answer>5</answer> no, <answer>4</answer>"),
    ("5", "5 5"),
]

ADVERSARIAL = [
    # more than one answer is none
    ("5", "5 or 6"),
    ("5", r"\{5, 6\}"),
    ("5", r"\pm 5"),
    ("5", "4 < 5"),
    ("5", "[0, 10]"),
    # the format itself as an answer
    ("5", "<answer></answer>"),
    ("5", "<answer><answer></answer>5</answer>"),
    ("5", r"\boxed{}"),
    ("5", r"\boxed{4}\boxed{"),
    ("5", r"4}$ $\boxed{5} $\boxed{4"),
    ("5", "{" * 50),
    ("5", '["5", "6"]'),
    # nothing here may run
    ("5", "__import__('os').system('exit 5')"),
    ("5", "().__class__.__bases__"),
    ("5", r"\input{/etc/passwd}"),
    ("5", r"\write18{touch x}"),
    # numbers that are none
    ("5", "1/0"),
    ("5", "9" * 400),
    ("5", "\x00"),
    ("5", "\ud800"),
    # far too long
    ("5", "5" * 100_000),
    ("5", "+".join(["1"] * 50_000)),
    ("5", "\\boxed{" * 14_000),
    ("5", "answer is " * 10_000 + "6"),
    ("5", "$ " * 50_000),
]


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """On a busy machine a comparison can take longer than the limit."""
    monkeypatch.setattr(math_scoring, "TIME_LIMIT", 20.0)


@pytest.mark.parametrize(("gold", "text"), RIGHT)
def test_right_answers(gold, text):
    assert score_math(text, [gold]).correct
    assert score_math(text, [gold]) == score_math(text, ["no such thing", gold])


@pytest.mark.parametrize(("gold", "text"), WRONG + ADVERSARIAL, ids=lambda text: repr(text)[:40])
def test_wrong_and_adversarial_answers(gold, text):
    started = time.perf_counter()
    reward = score_math(text, [gold])
    assert (reward.total, reward.correct) == (0.0, False)
    assert reward.parts["answer"] == 0.0
    if len(text) > math_scoring.LONGEST_ANSWER:
        assert time.perf_counter() - started < 0.5


def test_an_answer_that_takes_too_long_is_wrong_and_the_next_is_read(monkeypatch):
    assert score_math("2/6", ["1/3"]).correct  # the worker has started
    started = time.perf_counter()
    with monkeypatch.context() as patch:
        patch.setattr(math_scoring, "TIME_LIMIT", 0.3)
        reward = score_math("<answer>9^{9^{9^{9}}}</answer>", ["5"])
    assert time.perf_counter() - started < 5
    assert reward.parts == {"answer": 0.0, "timed_out": 1.0}
    assert not reward.correct
    assert score_math("2/4", ["1/2"]).parts == {"answer": 1.0, "timed_out": 0.0}


def test_a_helper_that_dies_is_replaced():
    assert score_math("3/6", ["1/2"]).correct
    process = math_scoring._workers[os.getpid()].process
    process.kill()
    process.wait()
    assert score_math("4/8", ["1/2"]).correct


def test_threads_share_the_helper_and_get_their_own_results():
    pairs = [(f"{i}/7", f"{i * (2 + i % 2)}/{7 * (2 + i % 2) + (i % 3 == 0)}") for i in range(1, 40)]
    expected = [score_math(answer, [gold]).correct for gold, answer in pairs]
    assert expected == [i % 3 != 0 for i in range(1, 40)]
    math_scoring._compare.cache_clear()
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda pair: score_math(pair[1], [pair[0]]).correct, pairs)) == expected


def _in_child(answer: str) -> bool:
    return score_math(answer, ["1/2"]).correct


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="this system cannot fork")
def test_a_forked_process_has_a_helper_of_its_own():
    assert score_math("5/10", ["1/2"]).correct
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.map(_in_child, ["6/12", "6/13"]) == [True, False]
    assert score_math("7/14", ["1/2"]).correct


def test_without_the_library_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(math_scoring, "_workers", {})
    math_scoring._compare.cache_clear()
    monkeypatch.setattr(math_scoring.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'sharpscope\[math\]'"):
        score_math("1/2", ["2/4"])
    assert score_math("17", ["17"]).correct  # whole numbers need no library


NUMBERS = r"""12; +12; 12.0; x = 12; 3 * 4 = 12; $12$ legs; 12\text{ legs}; \boxed{12}; {12}; (12); 24/2; \frac{24}{2}; \frac{24}2;
\left(\frac{24}{2}\right); (24)/(2); \$12; 12^{\circ}; 1.2e1; - -12"""
EXPRESSIONS = r"""3 * 4; 3 \cdot 4; 3 \times 4; (3)(4); 3(4); 7 + 5; (7 + 5); 19 - 7; 12 = 3 * 4; \boxed{3 * 4}; 12^1; sqrt(144);
\frac{3 * 8}{2}; 25 mod 13; 6 6; 11;"""


@pytest.mark.parametrize("answer", re.split(r";\s+", NUMBERS))
def test_a_number_is_an_answer_however_it_is_written(answer):
    assert score_value(f"<answer>{answer}</answer>", ["12"]).correct


@pytest.mark.parametrize("answer", re.split(r";\s*", EXPRESSIONS.rstrip(";")))
def test_a_question_written_down_again_is_no_answer(answer):
    """math-verify works expressions out: the reward of generated arithmetic could be had by copying."""
    reward = score_value(f"<answer>{answer}</answer>", ["12"])
    assert not reward.correct and reward.total == 0.0 and set(reward.parts) == {"answer", "timed_out"}
