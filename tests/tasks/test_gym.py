"""Any reasoning-gym data set: its own scores, disjoint splits, no eval of what a model wrote unless asked for."""

from __future__ import annotations

import inspect
import re
import sys

import pytest

from sharpscope.errors import UserError
from sharpscope.tasks import GymSpec, make_task
from sharpscope.tasks.gym import EVALUATING, gym_answer

pytest.importorskip("reasoning_gym", reason="needs the optional library reasoning-gym")
SMALL = {"train_size": 12, "heldout_size": 6}


def load(name: str, **fields):
    task = make_task(GymSpec(**SMALL | {"name": name} | fields))
    return task, task.splits()


@pytest.mark.parametrize("name", ["leg_counting", "caesar_cipher", "maze"])
def test_the_true_answer_is_worth_one_by_the_own_scorer(name):
    task, splits = load(name)
    assert task.name == f"gym:{name}"
    assert {split: len(examples) for split, examples in splits.items()} == {"train": 12, "heldout": 6}
    for example in splits["train"] + splits["heldout"]:
        assert example.prompt == example.meta["entry"]["question"] + "\n"
        assert task.score(example, f"<think>hm</think><answer>{example.answer}</answer>").total == 1.0
        assert task.score(example, "<answer></answer>").total < 0.5


def test_splits_are_disjoint_over_seeds_and_repeatable():
    _, splits = load("leg_counting")
    assert splits == load("leg_counting")[1]
    held = {example.prompt for example in splits["heldout"]}
    for seed in range(3):
        assert not held & {example.prompt for example in load("leg_counting", seed=seed)[1]["train"]}
    assert load("leg_counting", heldout_size=0)[1] == {"train": splits["train"]}


@pytest.mark.parametrize(
    ("name", "fields", "says"),
    [
        ("leg_countin", {}, "did you mean 'leg_counting'"),
        ("leg_counting", {"options": {"max_animal": 3}}, r"rejected by leg_counting .*max_animal"),
        ("leg_counting", {"options": {"min_animals": 5, "max_animals": 2}}, "rejected by leg_counting"),
        ("countdown", {}, "passes model output to Python's eval"),
        (
            "coin_flip",
            {"options": {"min_trials": 1, "max_trials": 1}, "train_size": 3000},
            "only .* different questions",
        ),
    ],
)
def test_mistakes_are_named(name, fields, says):
    with pytest.raises(UserError, match=says):
        load(name, **fields)


def test_every_scorer_that_evaluates_text_is_known():
    from reasoning_gym.factory import DATASETS

    evaluating = set()
    for name, (made, _) in DATASETS.items():
        module = inspect.getsource(inspect.getmodule(made))
        scorer = inspect.getsource(made.score_answer)
        helpers = re.findall(r"self\.(_?[a-z_]+)\(", scorer)
        called = scorer + "".join(
            inspect.getsource(getattr(made, h)) for h in helpers if inspect.isfunction(getattr(made, h, None))
        )
        own_parser = "def parse_expr" in module  # propositional_logic brings a parser that only goes by this name
        if re.search(r"\b(eval|exec|sympify|S)\(", called) or ("parse_expr(" in called and not own_parser):
            evaluating.add(name)
    assert evaluating - {"number_sorting"} <= EVALUATING  # number_sorting evaluates its own answer, never the model's
    assert set(EVALUATING) <= set(DATASETS)


@pytest.mark.parametrize(
    "text",
    ["", "<answer>", "\x00", "é" * 1000, "[" * 5000, "<answer>" * 12_500, "9" * 100_000, "nan", "inf", "nan+nanj"],
)
@pytest.mark.parametrize("name", ["leg_counting", "sudoku", "complex_arithmetic"])
def test_no_text_breaks_a_scorer(name, text):
    task, splits = load(name, train_size=1, heldout_size=0)
    reward = task.score(splits["train"][0], text)
    assert 0.0 <= reward.total < 1.0
    assert not reward.correct


def test_the_answer_is_found():
    assert gym_answer("<think>a</think><answer>1</answer><answer> 2\n3 </answer> b") == "2\n3"
    assert gym_answer("<think>a</think> b ") == "b"
    assert gym_answer(" b ") == "b"
    assert gym_answer("</answer><answer>") == "</answer><answer>"


def test_without_the_library_one_line_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(UserError, match=r"task gym:chain_sum: needs reasoning-gym; pip install 'sharpscope\[gym\]'"):
        make_task(GymSpec(name="chain_sum"))
