"""Generated mathematics: the answers are right, the splits disjoint, the sets the same every time."""

from __future__ import annotations

import ast
import operator
import re
from fractions import Fraction
from random import Random

import pytest

from sharpscope.errors import UserError
from sharpscope.tasks import MathSpec, make_task
from sharpscope.tasks.math_task import FAMILIES, LEVELS, unordered


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


def test_more_questions_than_exist_is_an_error():
    with pytest.raises(UserError, match=r"task.train_size = 900000: only \d+ different questions"):
        make_task(MathSpec(families=["linear"], levels=[1], train_size=900_000)).splits()


def test_who_copies_the_question_has_not_answered_it():
    task = make_task(MathSpec(train_size=20))
    for example in task.splits()["train"]:
        question = example.meta["question"].removesuffix(" = ?")
        assert not task.score(example, f"<answer>{question}</answer>").correct
        assert task.score(example, f"<answer>{question} = {example.answer}</answer>").correct


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
