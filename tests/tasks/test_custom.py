"""A user's own task: fifteen lines, and clear words where they are wrong."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from sharpscope.errors import UserError
from sharpscope.tasks import (
    CustomSpec,
    Example,
    InteractiveTask,
    Reward,
    make_task,
    task_choice,
)

room = sys.modules[__name__]


def custom(made, **fields):
    """The task made by a factory that returns `made`."""
    room.mine = lambda: made
    return make_task(CustomSpec(factory=f"{__name__}:mine", **fields))


def nought(example, completion):
    return 0.0


EXAMPLES = {"train": [Example("1 + 1 = ", "2")]}


def test_short_forms_of_the_command_line():
    assert task_choice("knights_knaves") == {"kind": "knights_knaves"}
    assert task_choice("dataset") == {"kind": "dataset"}
    assert task_choice("a.b:c") == {"kind": "custom", "factory": "a.b:c"}
    for wrong, says in [
        ("knights_knave", "did you mean 'knights_knaves'"),
        ("custom", "task = 'custom'"),
        ("", "task = ''"),
    ]:
        with pytest.raises(UserError, match=says):
            task_choice(wrong)


def test_an_object_may_be_a_task_too_and_rewards_pass_through():
    class Task:
        name = "object"

        def splits(self):
            return {"train": [Example("p", "a", {"level": 3, "id": "x"})]}

        def score(self, example, completion):
            return Reward(0.25, {"style": 0.25}, correct=False)

    task = custom(Task())
    assert task.name == "object"
    assert task.splits()["train"][0].meta == {"level": 3, "id": "x"}
    assert task.score(task.splits()["train"][0], "") == Reward(0.25, {"style": 0.25}, correct=False)
    assert not isinstance(task, InteractiveTask)


def interactive(reply="pong", stop=("?",)):
    class Task:
        def splits(self):
            return EXAMPLES

        def score(self, example, completion):
            return 1

        def respond(self, example, completion):
            return reply

    Task.stop = stop
    return Task()


def test_an_interactive_task_answers_in_between():
    task = custom(interactive())
    assert isinstance(task, InteractiveTask)
    assert task.stop == ("?",)
    assert task.respond(EXAMPLES["train"][0], "ping?") == "pong"


@pytest.mark.parametrize("number", [0.3, 1, 2.5, True, False])
def test_numbers_become_rewards(number):
    reward = custom((EXAMPLES, lambda example, completion: number)).score(EXAMPLES["train"][0], "")
    assert (reward.total, reward.correct) == (float(number), number >= 1)


@pytest.mark.parametrize(
    ("act", "says"),
    [
        (lambda: make_task(CustomSpec(factory="no_such_module:f")), "importing 'no_such_module' failed"),
        (lambda: make_task(CustomSpec(factory="json:dmups")), "did you mean 'dumps'"),
        (lambda: custom((EXAMPLES, nought), options={"size": 3}), "unexpected keyword argument 'size'"),
        (lambda: custom((EXAMPLES, 3)), "returned tuple without splits and score"),
        (lambda: custom(({"train": []}, nought)).splits(), "a list of examples under 'train'"),
        (lambda: custom(({"train": [Example("p", 3)]}, nought)).splits(), r"train\[0\] must be Example"),
        (lambda: custom((EXAMPLES, lambda e, c: None)).score(EXAMPLES["train"][0], ""), "score returned NoneType"),
        (lambda: custom(interactive(stop=())), "defines respond but not stop"),
        (lambda: custom(interactive(stop=("?", 3))), "defines respond but not stop"),
        (lambda: custom(interactive(reply=3)).respond(EXAMPLES["train"][0], ""), "respond returned int"),
    ],
)
def test_a_mistake_in_a_task_is_named(act, says):
    with pytest.raises(UserError, match=says) as caught:
        act()
    assert "\n" not in str(caught.value)


def test_an_error_inside_a_factory_is_not_blamed_on_its_options():
    def broken(size=3):
        return size + "s"

    room.broken = broken
    with pytest.raises(UserError, match=r"task\.factory = '.*:broken'.*: raised TypeError: unsupported") as caught:
        make_task(CustomSpec(factory=f"{__name__}:broken", options={"size": 3}))
    assert isinstance(caught.value.__cause__, TypeError)  # what --debug shows


def documented_task() -> str:
    """The first task in the documentation, as it stands there."""
    text = (Path(__file__).parents[2] / "docs/guides/model-and-task.md").read_text(encoding="utf-8")
    return text.partition("# riddles.py\n")[2].partition("```")[0]


def test_the_documented_task_runs_as_it_stands(tmp_path, monkeypatch):
    source = documented_task()
    assert 5 < len(source.strip().splitlines()) <= 15
    (tmp_path / "riddles.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    by_path = make_task(CustomSpec(**{k: v for k, v in task_choice("riddles:riddles").items() if k != "kind"}))
    assert {name: len(examples) for name, examples in by_path.splits().items()} == {"train": 100, "heldout": 50}
    assert not {e.prompt for e in by_path.splits()["train"]} & {e.prompt for e in by_path.splits()["heldout"]}
    example = by_path.splits()["train"][21]
    assert by_path.score(example, " 42\n") == Reward(1.0, {"answer": 1.0}, correct=True)
    assert not by_path.score(example, "43").correct
    sys.modules.pop("riddles")
