"""Finding the final answer and comparing it: right, wrong and adversarial texts."""

from __future__ import annotations

import time
from fractions import Fraction

import pytest

from sharpscope.tasks.answers import (
    final_answer,
    normalize_words,
    number_of,
    score_exact,
    score_exact_match,
    score_numeric,
    score_value,
)

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
    assert (reward.total, reward.correct, dict(reward.parts)) == (float(right), right, {"answer": float(right)})


# Of the question 3 * 4 = ?, whose answer cannot be had by copying.
VALUES = (
    "12; +12; 12.0; x = 12; 3 * 4 = 12; $12$; (12); {12}; 24/2; \\frac{24}{2}; \\boxed{12}; 1.2e1; The answer is 12."
)
EXPRESSIONS = "3 * 4; 3 \\cdot 4; 3(4); 7 + 5; 24 - 12; 12 = 3 * 4; \\boxed{3 * 4}; sqrt(144); 25 mod 13; 6 6; 12 12; 11; 12x; * 12; "


@pytest.mark.parametrize(("answers", "right"), [(VALUES, True), (EXPRESSIONS, False)])
def test_a_value_is_a_number_and_no_expression(answers, right):
    for answer in answers.split("; "):
        for text in (f"<answer>{answer}</answer>", answer):
            assert score_value(text, ["11", "12"] if right else ["12"]).correct is right, text


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
def test_a_hundred_kilobytes_are_scored_in_linear_time_and_not_run(score, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    started = time.perf_counter()
    assert not score(text, ["42"]).correct
    assert time.perf_counter() - started < 1.0
    assert not list(tmp_path.iterdir())
