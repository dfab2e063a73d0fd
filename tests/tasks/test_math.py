"""Generated mathematics and the equality of answers: right, wrong and adversarial ones; time limits, threads, processes."""

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
from sharpscope.tasks.math import FAMILIES, LEVELS, score_math, score_value, unordered


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


def test_splits_are_disjoint_finite_and_repeatable():
    fields = SMALL | {"families": ["arithmetic", "linear", "modular"], "levels": [1, 3], "unseen_levels": [4]}
    splits = make_task(MathSpec(**fields)).splits()
    assert {name: len(examples) for name, examples in splits.items()} == {"train": 180, "heldout": 60, "unseen": 30}
    assert splits == make_task(MathSpec(**fields)).splits()
    assert {example.meta["level"] for example in splits["unseen"]} == {4}
    alone = make_task(MathSpec(**SMALL | {"families": ["linear"], "levels": [3], "heldout_size": 0})).splits()
    assert set(alone) == {"train"}
    assert alone["train"] == [e for e in splits["train"] if (e.meta["family"], e.meta["level"]) == ("linear", 3)]


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
        ("arithmetic", "3 - 4 = ?", "4 - 3 = ?", False),
        ("arithmetic", "1 + 2 * 3 - 4 = ?", "3 * 2 - 4 + 1 = ?", True),
        ("arithmetic", "1 - (2 - 3) = ?", "3 + 1 - 2 = ?", True),
        ("arithmetic", "(1 + 2) * 3 = ?", "3 * (2 + 1) = ?", True),
        ("arithmetic", "(1 + 2) * 3 = ?", "1 + 2 * 3 = ?", False),
        ("arithmetic", "2 - 3 * 4 = ?", "2 - 4 * 3 = ?", True),
        ("arithmetic", "2 - 3 * 4 = ?", "3 * 4 - 2 = ?", False),
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
    ("90", r"90^\circ"),
    ("5", r"\$5"),
    ("1024", "2**10"),
    ("0.001", "1e-3"),
    ("6", "3!"),
    ("2.5", r"2\frac{1}{2}"),
    (r"\sqrt{8}", r"2\sqrt{2}"),
    (r"2\pi", "2pi"),
    ("x^2+2x+1", "(x+1)^2"),
    (r"\{1,2,3\}", r"\{3,2,1\}"),
    ("1,2", "2, 1"),
    (r"\{-2,2\}", r"\pm 2"),
    (r"(1,2)\cup(3,4)", r"(3,4) \cup (1,2)"),
    (r"\text{yes}", "yes"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
    ("5", "first 4, no:\n<answer>4</answer> wait <answer>5</answer>"),
    ("5", "Final answer: 5"),
]
WRONG = [
    *(
        ("1/2", answer)
        for answer in ("2", "0.51", "-1/2", "0.05", "1/2x", "1//3", "", " ", "one third", "5", "50", "2/1")
    ),
    ("3", "-3"),
    ("2", r"\sqrt{2}"),
    (r"\sqrt{2}", "1.41"),
    ("(3,4)", "(4,3)"),
    ("[0,1)", "(0,1]"),
    (r"\text{yes}", "no"),
    ("5", "5 5"),
]
ADVERSARIAL = [
    # more than one answer is none
    ("5", "5 or 6"),
    ("5", r"\{5, 6\}"),
    # the format itself as an answer
    ("5", "<answer></answer>"),
    ("5", r"\boxed{}"),
    ("5", r"\boxed{4}\boxed{"),
    # nothing here may run
    ("5", "__import__('os').system('exit 5')"),
    ("5", "().__class__.__bases__"),
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
@pytest.mark.parametrize(("gold", "text"), WRONG + ADVERSARIAL, ids=lambda text: repr(text)[:40])
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
    started = time.perf_counter()
    with monkeypatch.context() as patch:
        patch.setattr(math_module, "TIME_LIMIT", 0.3)
        reward = score_math("<answer>9^{9^{9^{9}}}</answer>", ["5"])
    assert time.perf_counter() - started < 5
    assert reward.parts == {"answer": 0.0, "timed_out": 1.0}
    assert not reward.correct
    assert score_math("2/4", ["1/2"]).parts == {"answer": 1.0, "timed_out": 0.0}


@needs_math_verify
def test_a_helper_that_dies_is_replaced():
    assert score_math("3/6", ["1/2"]).correct
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
    assert score_math("7/14", ["1/2"]).correct


def test_without_the_library_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(math_module, "_workers", {})
    math_module._compare.cache_clear()
    monkeypatch.setattr(math_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'sharpscope\[math\]'"):
        score_math("1/2", ["2/4"])
    assert score_math("17", ["17"]).correct  # whole numbers need no library


NUMBERS = r"""12; +12; 12.0; x = 12; 3 * 4 = 12; $12$ legs; 12\text{ legs}; \boxed{12}; {12}; (12); 24/2; \frac{24}{2}; \frac{24}2;
\left(\frac{24}{2}\right); (24)/(2); \$12; 12^{\circ}; 1.2e1; - -12"""
EXPRESSIONS = r"""3 * 4; 3 \cdot 4; 3 \times 4; (3)(4); 3(4); 7 + 5; (7 + 5); 19 - 7; 12 = 3 * 4; \boxed{3 * 4}; 12^1; sqrt(144);
\frac{3 * 8}{2}; 25 mod 13; 6 6; 11;"""


@needs_math_verify
@pytest.mark.parametrize("answer", re.split(r";\s+", NUMBERS))
def test_a_number_is_an_answer_however_it_is_written(answer):
    assert score_value(f"<answer>{answer}</answer>", ["12"]).correct


@needs_math_verify
@pytest.mark.parametrize("answer", re.split(r";\s*", EXPRESSIONS.rstrip(";")))
def test_a_question_written_down_again_is_no_answer(answer):
    """math-verify works expressions out: the reward of generated arithmetic could be had by copying."""
    reward = score_value(f"<answer>{answer}</answer>", ["12"])
    assert not reward.correct and reward.total == 0.0 and set(reward.parts) == {"answer", "timed_out"}
