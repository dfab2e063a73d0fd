"""Finding the final answer and comparing it: right, wrong and adversarial texts; math-verify's worker; generated mathematics."""

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
from sharpscope.tasks.answers import (
    final_answer,
    normalize_words,
    number_of,
    score_exact,
    score_exact_match,
    score_numeric,
    score_value,
)
from sharpscope.tasks.math import FAMILIES, LEVELS, score_math, unordered
from sharpscope.training.rollouts import timed_out_events
from tests.loops import some

FINAL = [
    ("42", "42"),
    ("<answer>42</answer>", "42"),
    ("<answer>41</answer> no <answer>42</answer>", "42"),
    ("<answer>41</answer> \\boxed{42}", "41"),  # the tag goes first
    ("<answer></answer>", ""),
    ("</answer>42<answer>", "</answer>42<answer>"),
    ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
    ("\\boxed{41} or \\boxed{42}", "42"),
    ("\\boxed{41} \\boxed{42", ""),
    ("#### 41\n#### 42\nmore", "42"),
    ("<think>hm</think> 42", "42"),
    ("", ""),
]


@pytest.mark.parametrize(("text", "answer"), FINAL)
def test_the_final_answer_is_found(text, answer):
    assert final_answer(text) == answer


NUMBERS = [
    ("42", 42),
    ("-42", -42),
    ("1,234,567.5", Fraction(2469135, 2)),
    (".5", Fraction(1, 2)),
    ("25%", 25),
    ("2 / 3", Fraction(2, 3)),
    ("1.5e-3", Fraction(3, 2000)),
    ("0.30000000000000004", Fraction("0.30000000000000004")),
    ("1/0", None),
    ("", None),
    ("٣", None),
    ("9" * 401, None),
    ("1e9999999", None),
]
WRITTEN = [  # ways in which people and models write numbers
    ("10{,}000", 10_000),
    ("10\\,000", 10_000),
    ("12\u00a0345.5 km", Fraction(24691, 2)),
    ("12 34", 34),  # no groups of three
    ("- 5", -5),
    ("–5", -5),
    ("$- 5$", -5),
    ("3 - 5", 5),
    ("well—5", 5),
    ("- 5 apples\n- 7 pears", 7),  # a list
    ("\\frac{1}{2}", Fraction(1, 2)),
    ("\\frac12", Fraction(1, 2)),
    ("2\\frac{1}{2}", Fraction(5, 2)),
    ("\\frac{1}{0}", None),
    ("1 1/2", Fraction(3, 2)),
    ("1 3/2", Fraction(3, 2)),  # no mixed number has a quotient above one
    ("x^2 \\frac{1}{2}", Fraction(1, 2)),
]


@pytest.mark.parametrize(("text", "number"), NUMBERS + WRITTEN, ids=lambda value: repr(value)[:30])
def test_numbers_are_read_exactly(text, number):
    assert number_of(text) == number


NUMERIC = [
    ("42", "42.0", True),
    ("reason #### 1,042", "1042", True),
    ("0.5", "1/2", True),
    ("0.3", "0.30000000000000004", False),
    ("42", "", False),
    ("42", "42 or 43", False),
    ("42", "9" * 100_000, False),
    ("-5", "\\boxed{–5}", True),
]


@pytest.mark.parametrize(("truth", "text", "right"), NUMERIC, ids=lambda value: repr(value)[:30])
def test_numeric(truth, text, right):
    reward = score_numeric(text, [truth])
    assert (reward.total, reward.correct, dict(reward.parts)) == (
        float(right),
        right,
        {"answer": float(right)},
    )


# Of the question 3 * 4 = ?, whose answer cannot be had by copying.
VALUES = "12; +12; 12.0; x = 12; 3 * 4 = 12; $12$; (12); {12}; 24/2; \\frac{24}{2}; \\boxed{12}; \\(12\\); \\[12\\]; 12\\%; 1.2e1; The answer is 12."
EXPRESSIONS = "3 * 4; 3 \\cdot 4; 3(4); 7 + 5; 24 - 12; 12 = 3 * 4; \\boxed{3 * 4}; sqrt(144); 25 mod 13; 6 6; 12 12; 11; 12x; * 12; "


@pytest.mark.parametrize(("answers", "right"), [(VALUES, True), (EXPRESSIONS, False)])
def test_a_value_is_a_number_and_no_expression(answers, right):
    for answer in some(answers.split("; ")):
        for text in (f"<answer>{answer}</answer>", answer):
            assert score_value(text, ["11", "12"] if right else ["12"]).correct is right, text


@pytest.mark.parametrize(
    "text", ["<think>3 + 9 = 12", "3 + 4 = 7; 7 + 5 = 12", "3 * 4 = 12\nx = 12"]
)
def test_the_last_step_of_reasoning_that_was_cut_is_no_answer(text):
    assert not score_value(text, ["12"]).correct


EXACT = [
    ("Paris", "Paris", True),
    ("New York", "New\n York", True),
    ("Paris", "<think>Rome?</think><answer>Paris</answer>", True),
    ("Paris", "paris", False),
    ("Paris", "<answer>Paris</answer><answer>Rome</answer>", False),
]


@pytest.mark.parametrize(("truth", "text", "right"), EXACT)
def test_exact(truth, text, right):
    assert score_exact(text, ["no", truth]).correct == right


MATCH = [
    ("The Beatles", "<answer>the  Beatles!</answer>", True),
    ("J.K. Rowling", "jk rowling", True),
    ("Theodore", "odore", False),
    ("Beatles", "Beatles and Stones", False),
    ("Beatles", "?!", False),
    ("Zürich", "zürich", True),
    ("A", "<answer> a. </answer>", True),  # the normal form leaves nothing of these truths
    ("A", "", False),
    ("?", "<answer>?</answer>", True),
    ("A", "the", False),
    ("A+", "a+", True),
    ("The The", "the  the", True),
]


@pytest.mark.parametrize(("truth", "text", "right"), MATCH)
def test_exact_match(truth, text, right):
    assert score_exact_match(text, [truth]).correct == right
    assert score_exact_match(text, ["something else"]).correct is False
    assert normalize_words(normalize_words(text)) == normalize_words(text)


HOSTILE = [
    "<answer>" * 12_500,
    "\\boxed{" * 14_000,
    "####" * 25_000,
    "1," * 50_000,
    "$" * 100_000,
    "1 " * 50_000,
    "100 " * 25_000 + "1",
    "1 1/" * 25_000,
    "1\\," * 25_000,
    "\\frac" + " " * 100_000,
    "- " * 50_000,
    "= " * 50_000,
    ". " * 50_000,
    "\ud800",
    "__import__('pathlib').Path('pwned').touch()",
    "(" * 10_000,
]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
@pytest.mark.parametrize("score", [score_exact, score_exact_match, score_numeric, score_value])
def test_a_hundred_kilobytes_are_scored_in_linear_time_and_not_run(
    score, text, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    started = time.perf_counter()
    assert not score(text, ["42"]).correct
    assert time.perf_counter() - started < 1.0
    assert not list(tmp_path.iterdir())


# -- Generated mathematics, and math-verify's equality


def value(text: str, x: Fraction = Fraction(0)) -> Fraction:
    """Value of a generated expression, by Python's own grammar; `3x` and `4(` are products, ^ is a power."""
    text = re.sub(r"(\d)\s*([x(])", r"\1*\2", text.replace("^", "**"))
    operations = {
        ast.Add: operator.add,
        ast.Sub: operator.sub,
        ast.Mult: operator.mul,
        ast.Pow: operator.pow,
    }

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
        # the only solution
        assert value(left, Fraction(answer) + 1) != value(right, Fraction(answer) + 1)
        assert question.count("x") == (2 if level < 3 else 3)
        question, answer = FAMILIES["modular"](level, rng)
        expression, modulus = re.fullmatch(r"(.+) mod (\d+) = \?", question).groups()
        assert value(expression) % int(modulus) == int(answer) < int(modulus)


SMALL = {"train_size": 30, "heldout_size": 10, "unseen_size": 10}


def test_splits_are_finite_and_repeatable():
    fields = SMALL | {
        "families": ["arithmetic", "linear", "modular"],
        "levels": [1, 3],
        "unseen_levels": [4],
    }
    splits = make_task(MathSpec(**fields)).splits()
    assert {name: len(examples) for name, examples in splits.items()} == {
        "train": 180,
        "heldout": 60,
        "unseen": 30,
    }
    assert splits == make_task(MathSpec(**fields)).splits()
    alone = make_task(
        MathSpec(**SMALL | {"families": ["linear"], "levels": [3], "heldout_size": 0})
    ).splits()
    assert alone == {
        "train": [
            e for e in splits["train"] if (e.meta["family"], e.meta["level"]) == ("linear", 3)
        ]
    }


def test_no_order_of_a_held_out_question_is_trained_on():
    splits = make_task(MathSpec(families=["arithmetic", "modular"], heldout_size=100)).splits()
    forms = {split: {e.meta["form"] for e in examples} for split, examples in splits.items()}
    assert not forms["train"] & forms["heldout"]
    alone = make_task(MathSpec(families=["arithmetic", "modular"], heldout_size=0)).splits()[
        "train"
    ]
    # they would have been, and that set is what it was
    assert {e.meta["form"] for e in alone} & forms["heldout"]


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


HOSTILE = ["9^{9^{9^{9}}}", "\\sum_{n=1}^{10^{9}} n^{-1}", "(x+1)^{99999}", "10^{10^{8}}!"]


@needs_math_verify
def test_a_step_of_hostile_answers_ends_in_time_and_the_rest_is_wrong(monkeypatch):
    assert score_math("2/6", ["1/3"]).correct  # the worker has started
    monkeypatch.setattr(math_module, "TIME_LIMIT", 0.2)
    monkeypatch.setattr(math_module, "STEP_LIMIT", 1.0)
    began = time.monotonic()
    with math_module.limited_step():
        hostile = [score_math(f"\\boxed{{{HOSTILE[n % 4]}}}", ["5"]) for n in range(40)]
        after = score_math("\\boxed{2/4}", ["1/2"])
        assert score_math("\\boxed{1/2}", ["1/2"]).correct  # equal texts take no time
    took = time.monotonic() - began
    assert took < 4.0, took
    assert all(not reward.correct for reward in hostile)
    assert sum(reward.parts["timed_out"] for reward in hostile) > 20
    assert after.parts == {"answer": 0.0, "timed_out": 1.0}
    assert score_math("2/4", ["1/2"]).correct  # the next step
    (event,) = timed_out_events(3, [*hostile[:3], score_math("2/4", ["1/2"])])
    assert (event.rule, event.step, event.value) == ("timed_out", 3, 0.75)
    assert timed_out_events(3, [score_math("2/4", ["1/2"])]) == []


def _in_child(answer: str) -> bool:
    return score_math(answer, ["1/2"]).correct


@needs_math_verify
@pytest.mark.skipif(
    "fork" not in multiprocessing.get_all_start_methods(), reason="this system cannot fork"
)
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
