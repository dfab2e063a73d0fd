"""Generated mathematics, and math-verify's equality of answers: right, wrong and adversarial ones; time limits, processes."""

from __future__ import annotations

import ast
import multiprocessing
import operator
import os
import re
import time
from fractions import Fraction
from importlib.util import find_spec
from random import Random

import pytest

from sharpscope.errors import UserError
from sharpscope.tasks import MathSpec, make_task
from sharpscope.tasks import math as math_module
from sharpscope.tasks.math import FAMILIES, LEVELS, score_math, unordered


def value(text: str, x: Fraction = Fraction(0)) -> Fraction:
    """Value of a generated expression, by Python's own grammar; `3x` and `4(` are products, ^ is a power."""
    text = re.sub(r"(\d)\s*([x(])", r"\1*\2", text.replace("^", "**"))
    operations = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Pow: operator.pow}

    def walk(node):
        if isinstance(node, ast.BinOp):
            return operations[type(node.op)](walk(node.left), walk(node.right))
        if isinstance(node, ast.UnaryOp):
            return -walk(node.operand)
        return x if isinstance(node, ast.Name) else Fraction(node.value)

    return walk(ast.parse(text, mode="eval").body)


@pytest.mark.parametrize("level", LEVELS)
def test_answers_solve_their_questions(level):
    rng = Random(level)
    for _ in range(200):
        question, answer = FAMILIES["arithmetic"](level, rng)
        expression = question.removesuffix(" = ?")
        assert value(expression) == int(answer)
        assert len(re.findall(r"\d+", expression)) == level + 1
        question, answer = FAMILIES["linear"](level, rng)
        left, right = question.removeprefix("Solve for x: ").split(" = ")
        assert value(left, Fraction(answer)) == value(right, Fraction(answer))
        assert value(left, Fraction(answer) + 1) != value(right, Fraction(answer) + 1)  # the only solution
        assert question.count("x") == (2 if level < 3 else 3)
        question, answer = FAMILIES["modular"](level, rng)
        expression, modulus = re.fullmatch(r"(.+) mod (\d+) = \?", question).groups()
        assert value(expression) % int(modulus) == int(answer) < int(modulus)


SMALL = {"train_size": 30, "heldout_size": 10, "unseen_size": 10}


def test_splits_are_finite_and_repeatable():
    fields = SMALL | {"families": ["arithmetic", "linear", "modular"], "levels": [1, 3], "unseen_levels": [4]}
    splits = make_task(MathSpec(**fields)).splits()
    assert {name: len(examples) for name, examples in splits.items()} == {"train": 180, "heldout": 60, "unseen": 30}
    assert splits == make_task(MathSpec(**fields)).splits()
    alone = make_task(MathSpec(**SMALL | {"families": ["linear"], "levels": [3], "heldout_size": 0})).splits()
    assert alone == {"train": [e for e in splits["train"] if (e.meta["family"], e.meta["level"]) == ("linear", 3)]}


def test_no_order_of_a_held_out_question_is_trained_on():
    splits = make_task(MathSpec(families=["arithmetic", "modular"], heldout_size=100)).splits()
    forms = {split: {e.meta["form"] for e in examples} for split, examples in splits.items()}
    assert not forms["train"] & forms["heldout"]
    alone = make_task(MathSpec(families=["arithmetic", "modular"], heldout_size=0)).splits()["train"]
    assert {e.meta["form"] for e in alone} & forms["heldout"]  # they would have been, and that set is what it was


@pytest.mark.parametrize(
    ("family", "one", "other", "same"),
    [
        ("arithmetic", "3 + 4 = ?", "4 + 3 = ?", True),
        ("arithmetic", "1 - (2 - 3) = ?", "3 + 1 - 2 = ?", True),
        ("arithmetic", "(1 + 2) * 3 = ?", "3 * (2 + 1) = ?", True),
        ("arithmetic", "(1 + 2) * 3 = ?", "1 + 2 * 3 = ?", False),
        ("arithmetic", "2 - 3 * 4 = ?", "2 - 4 * 3 = ?", True),
        ("modular", "(3 * 4 + 5) mod 7 = ?", "(5 + 4 * 3) mod 7 = ?", True),
        ("modular", "(3 + 4) mod 7 = ?", "(3 + 7) mod 4 = ?", False),
        ("modular", "3^4 mod 5 = ?", "4^3 mod 5 = ?", False),
    ],
)
def test_orders_of_one_question(family, one, other, same):
    assert (unordered(family, one) == unordered(family, other)) is same


needs_math_verify = pytest.mark.skipif(
    find_spec("math_verify") is None, reason="needs the optional library math-verify"
)
RIGHT = [
    ("1/2", r"\boxed{\frac{1}{2}}"),
    ("1/2", "<think>0.7?</think><answer>0.5</answer>"),
    ("1/2", "x=1/2"),
    ("1/2", "5e-1"),
    ("1,234", "1234"),
    ("5", r"\$5"),
    ("1024", "2**10"),
    (r"\sqrt{8}", r"$2\sqrt{2}$"),
    (r"2\pi", "2pi"),
    ("x^2+2x+1", r"\((x+1)^2\)"),
    (r"\{1,2,3\}", r"\{3,2,1\}"),
    ("5", "first 4, no:\n<answer>4</answer> wait <answer>5</answer>"),
    ("5", "Final answer: 5"),
]
WRONG = [
    *(("1/2", answer) for answer in ("2", "0.51", "-1/2", "1//3", "", " ", "one third")),
    ("(3,4)", "(4,3)"),
    (r"\text{yes}", "no"),
    # more than one answer is none
    ("5", "5 or 6"),
    ("5", r"\{5, 6\}"),
    ("5", r"\boxed{4}\boxed{"),
    # nothing here may run
    ("5", "__import__('os').system('exit 5')"),
    ("5", r"\write18{touch x}"),
    # numbers that are none, and far too long texts
    ("5", "1/0"),
    ("5", "\ud800"),
    ("5", "5" * 100_000),
    ("5", "\\boxed{" * 14_000),
    ("5", "answer is " * 10_000 + "6"),
]


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """On a busy machine a comparison can take longer than the limit."""
    monkeypatch.setattr(math_module, "TIME_LIMIT", 20.0)


@needs_math_verify
@pytest.mark.parametrize(("gold", "text"), RIGHT)
def test_right_answers(gold, text):
    assert score_math(text, [gold]).correct
    assert score_math(text, [gold]) == score_math(text, ["no such thing", gold])


@needs_math_verify
@pytest.mark.parametrize(("gold", "text"), WRONG, ids=lambda text: repr(text)[:40])
def test_wrong_and_adversarial_answers(gold, text):
    started = time.perf_counter()
    reward = score_math(text, [gold])
    assert (reward.total, reward.correct) == (0.0, False)
    assert reward.parts["answer"] == 0.0
    if len(text) > math_module.LONGEST_ANSWER:
        assert time.perf_counter() - started < 0.5


@needs_math_verify
def test_an_answer_that_takes_too_long_is_wrong_and_the_next_is_read(monkeypatch):
    assert score_math("2/6", ["1/3"]).correct  # the worker has started
    with monkeypatch.context() as patch:
        patch.setattr(math_module, "TIME_LIMIT", 0.3)
        reward = score_math("<answer>9^{9^{9^{9}}}</answer>", ["5"])
    assert reward.parts == {"answer": 0.0, "timed_out": 1.0} and not reward.correct
    assert score_math("2/4", ["1/2"]).parts == {"answer": 1.0, "timed_out": 0.0}
    process = math_module._workers[os.getpid()].process
    process.kill()
    process.wait()
    assert score_math("4/8", ["1/2"]).correct


def _in_child(answer: str) -> bool:
    return score_math(answer, ["1/2"]).correct


@needs_math_verify
@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="this system cannot fork")
def test_a_forked_process_has_a_helper_of_its_own():
    assert score_math("5/10", ["1/2"]).correct
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.map(_in_child, ["6/12", "6/13"]) == [True, False]


def test_without_the_library_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(math_module, "_workers", {})
    monkeypatch.setattr(math_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'sharpscope\[math\]'"):
        score_math("1/2", ["2/4"])
    assert score_math("17", ["17"]).correct  # equal texts need no library
