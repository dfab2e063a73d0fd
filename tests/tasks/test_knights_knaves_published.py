"""The 4,500 real puzzles that the published results train on, where they lie beside the repository."""

from __future__ import annotations

from pathlib import Path

import pytest

from sharpscope.tasks import DatasetSpec, make_task
from sharpscope.tasks.knights_knaves import logic_rl_prompt
from sharpscope.tasks.statements import solve

FOLDER = Path(__file__).parents[3] / "shared" / "data" / "knights_knaves"
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason=f"the real puzzles are not there: {FOLDER} is absent")


@pytest.fixture(scope="module")
def task():
    return make_task(DatasetSpec(path=str(FOLDER)))


@pytest.fixture(scope="module")
def examples(task):
    return [example for examples in task.splits().values() for example in examples]


def test_all_load_with_their_sizes(examples):
    levels = [example.meta["level"] for example in examples]
    assert {level: levels.count(level) for level in set(levels)} == {3: 900, 4: 900, 5: 900, 6: 900, 7: 900}


def test_each_has_the_one_solution_that_the_file_says(examples):
    import pandas as pd

    frames = [
        pd.read_parquet(FOLDER / f"{people}people.parquet", columns=["quiz", "solution", "names"])
        for people in range(3, 8)
    ]
    known = {
        logic_rl_prompt(row.quiz): (tuple(row.names), tuple(row.solution)) for row in pd.concat(frames).itertuples()
    }
    for example in examples:
        names, solution = known[example.prompt]  # and our wording of the chat prompt is theirs, to the letter
        assert solve(example.meta["statements"]) == [solution]
        assert example.meta["names"] == names


def test_the_scorer_gives_three_to_each_true_answer_after_the_prefill(task, examples):
    for example in examples:
        assert example.prefill == "<think>"
        assert example.templated is True
        completion = f"reasoning</think>\n<answer>{example.answer}</answer>"
        assert task.score(example, completion).total == 3.0
        first = example.meta["names"][0]
        role, other = ("knight", "knave") if example.meta["solution"][0] else ("knave", "knight")
        wrong = completion.replace(f"{first} is a {role}", f"{first} is a {other}")
        assert task.score(example, wrong).total == -0.5
        assert task.score(example, "<think>" + completion).total == -3.0


def test_no_content_stands_on_both_sides(task):
    splits = task.splits()
    sides = {name: {example.meta["content"] for example in splits[name]} for name in splits}
    assert not sides["train"] & sides["heldout"]
    assert 0.07 < len(splits["heldout"]) / 4500 < 0.13


def test_the_bare_quiz_can_be_asked_instead():
    path = str(FOLDER / "3people.parquet")
    columns = {"prompt": "quiz"}
    example = make_task(DatasetSpec(path=path, columns=columns, template="{prompt}\n", limit=50)).splits()["train"][0]
    assert example.prompt.startswith("A very special island")
    assert example.prompt.endswith("who is a knave?\n")
    assert example.prefill == ""
    assert not example.templated
