"""Data sets and custom tasks: columns, scorers, holding out, what broken files say; and no item is shared by train and held-out."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sharpscope.errors import UserError
from sharpscope.tasks import (
    CustomSpec,
    DatasetSpec,
    Example,
    InteractiveTask,
    KnightsKnavesSpec,
    MathSpec,
    Reward,
    ToolQaSpec,
    make_task,
    task_choice,
)
from tests.loops import some

TRUTH = "(1) Ava is a knight\n(2) Liam is a knave"


def kk_row(**fields):
    row = {
        "prompt": [
            {
                "role": "user",
                "content": "<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n<think>",
            }
        ],
        "reward_model": {"style": "rule", "ground_truth": {"solution_text_format": TRUTH}},
        "data_source": "kk_logic",
    }
    return row | fields


def rows_of(count: int, **fields):
    return [
        {"prompt": f"What is {i} + 1?", "answer": str(i + 1), "data_source": "numeric"} | fields
        for i in range(count)
    ]


def write(path, rows):
    if path.suffix == ".parquet":
        pd.DataFrame(rows).to_parquet(path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def load(path, **fields):
    task = make_task(DatasetSpec(path=str(path), **fields))
    return task, task.splits()


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_a_puzzle_row_is_scored_as_logic_rl_does(tmp_path, suffix):
    path = write(tmp_path / f"a.{suffix}", [kk_row()])
    task, splits = load(path, heldout_fraction=0)
    (example,) = splits["train"]
    assert set(splits) == {"train"}
    assert example.prompt == kk_row()["prompt"][0]["content"]
    assert example.answer == TRUTH
    assert (example.meta["level"], example.prefill, example.templated) == (2, "<think>", True)
    assert task.score(example, f"hm</think><answer>{TRUTH}</answer>").total == 3.0
    assert task.score(example, f"<answer>{TRUTH}</answer>").total == -3.0


def test_chat_messages_are_kept_and_also_given_as_text(tmp_path):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}]
    row = {"prompt": messages, "answer": "2", "data_source": "exact"}
    _, splits = load(write(tmp_path / "a.parquet", [row]), heldout_fraction=0)
    assert splits["train"][0].prompt == "Be brief.\n\n1 + 1?"
    assert splits["train"][0].messages == messages
    _, splits = load(tmp_path / "a.parquet", heldout_fraction=0, template="Q: {prompt} A: ")
    assert splits["train"][0].prompt == "Q: Be brief.\n\n1 + 1? A: "
    _, splits = load(
        write(tmp_path / "b.parquet", [kk_row()]), heldout_fraction=0, template="Q: {prompt} A: "
    )
    # a template does not surround chat markup
    assert splits["train"][0].prompt == kk_row()["prompt"][0]["content"]


def test_the_data_source_chooses_the_scorer(tmp_path):
    rows = rows_of(1, data_source="openai/gsm8k", answer="so 3 + 4 = 7\n#### 1,007")
    rows += [
        {
            "prompt": "Who wrote it?",
            "answer": {"target": ["The Beatles", "Lennon"]},
            "data_source": "nq",
        }
    ]
    task, splits = load(write(tmp_path / "a.jsonl", rows), heldout_fraction=0)
    numeric, question = splits["train"]
    assert (numeric.meta["scorer"], question.meta["scorer"]) == ("numeric", "exact_match")
    assert task.score(numeric, "#### 1007").correct
    assert task.score(question, "<answer>beatles.</answer>").correct
    assert task.score(question, "<answer>lennon</answer>").total == 1.0
    assert task.score(question, "<answer>Harrison</answer>").total == 0.0


def test_contents_are_held_out_by_hash_whatever_the_file_and_order(tmp_path):
    rows = rows_of(400)
    _, all_splits = load(write(tmp_path / "a.jsonl", rows), heldout_fraction=0.2)
    held = {example.prompt for example in all_splits["heldout"]}
    assert 50 < len(held) < 110
    assert len(all_splits["train"]) + len(all_splits["heldout"]) == 400
    _, part = load(write(tmp_path / "b.parquet", rows[::-1][:300]), heldout_fraction=0.2)
    assert {example.prompt for example in part["heldout"]} == held & {
        row["prompt"] for row in rows[100:]
    }
    # the same question with other white space or another answer stays on its side
    twice = rows + [row | {"prompt": row["prompt"].replace(" ", "  ")} for row in rows]
    _, doubled = load(write(tmp_path / "c.jsonl", twice), heldout_fraction=0.2)
    assert len(doubled["heldout"]) == 2 * len(held)


def test_a_held_out_file_takes_its_contents_out_of_training(tmp_path):
    rows = rows_of(20)
    held = write(tmp_path / "held.jsonl", rows[:5])
    _, splits = load(write(tmp_path / "a.jsonl", rows), heldout_path=held)
    assert [example.prompt for example in splits["heldout"]] == [row["prompt"] for row in rows[:5]]
    assert [example.prompt for example in splits["train"]] == [row["prompt"] for row in rows[5:]]


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([kk_row(), kk_row(prompt=["hello"])], "with 'role' and 'content'"),
        ([kk_row(), kk_row(data_source="kk_logick")], "did you mean 'kk_logic'"),
        ([kk_row(), kk_row(reward_model=None)], "no column 'ground_truth'"),
        (
            [kk_row(), kk_row(reward_model={"ground_truth": {"solution": TRUTH}})],
            "the answer must be like",
        ),
        *(
            (rows_of(1, answer=answer), "the .*answer")
            for answer in (None, True, {"x": 1}, float("nan"), "", [], "seven")
        ),
        (
            [{"prompt": "p", "answer": "1", "solution": "2"}],
            "answer and solution can each .*; set task.columns.answer",
        ),
        (
            [{"text": "p", "answer": "1"}],
            "no column for the prompt .* task.columns.prompt to one of: text, answer",
        ),
    ],
)
def test_a_broken_row_is_named_with_its_line(tmp_path, rows, says):
    path = write(tmp_path / "a.jsonl", rows)
    with pytest.raises(UserError, match=says) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path} line {len(rows)}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("prompt", "answer", "value", "scorer"),
    [
        ("prompt", "label", "7", "numeric"),
        ("question", "answer", "so\n#### 72", "numeric"),
        ("problem", "solution", r"\frac{1}{2}", "math"),
        ("prompt", "ground_truth", "{1, 2}", "exact_match"),
        ("prompt", "answer", {"target": ["Lena"]}, "exact_match"),
    ],
)
def test_common_columns_are_used_and_the_answer_chooses_the_scorer(
    tmp_path, prompt, answer, value, scorer
):
    rows = [{prompt: f"{i} + 1?", answer: value, "note": "x"} for i in range(40)]
    _, splits = load(write(tmp_path / "a.jsonl", rows))
    assert len(splits["train"]) + len(splits["heldout"]) == 40
    assert (
        splits["train"][0].prompt.endswith("+ 1?") and splits["train"][0].meta["scorer"] == scorer
    )


def test_broken_files_say_where_and_what(tmp_path):
    good = json.dumps(rows_of(1)[0])
    for content in ("{not json}\n", "[1, 2]\n", "[" * 100_000 + "\n"):
        file = tmp_path / "a.jsonl"
        file.write_text(f"{good}\n\n{content}{good}\n")
        with pytest.raises(UserError, match="line 3: not readable as JSON lines"):
            load(file)
    (tmp_path / "latin.jsonl").write_bytes(good.encode() + b'\n{"prompt": "\xe9"}\n')
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 this is not one PAR1")
    write(
        tmp_path / "zero.parquet",
        pd.DataFrame({name: pd.Series([], dtype=str) for name in ("prompt", "answer")}),
    )
    (tmp_path / "folder").mkdir()
    says = {
        "latin.jsonl": "line 2 is not UTF-8",
        "broken.parquet": "not readable",
        "zero.parquet": "has no rows",
    }
    says |= {"folder": "of a known format", "absent.parquet": "no such file or folder"}
    for name, problem in some(says.items()):
        with pytest.raises(UserError, match=rf"{name}.*{problem}"):
            load(tmp_path / name)


def test_an_empty_side_is_an_error_with_a_way_out(tmp_path):
    path = write(tmp_path / "a.jsonl", rows_of(1))
    with pytest.raises(
        UserError, match=r"heldout_fraction = 0\.1: the held-out set has none of the 1 rows"
    ):
        load(path)
    with pytest.raises(UserError, match="the training set has none of the 1 rows"):
        load(path, heldout_path=path)
    with pytest.raises(UserError, match=r"task\.path: not set"):
        load("")


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
    for wrong, says in {
        "knights_knave": "did you mean 'knights_knaves'",
        "custom": "task = 'custom'",
    }.items():
        with pytest.raises(UserError, match=says):
            task_choice(wrong)


def interactive(reply="pong", stop=("?",)):
    class Task:
        name = "object"

        def splits(self):
            return {"train": [Example("p", "a", {"level": 3, "id": "x"})]}

        def score(self, example, completion):
            return Reward(0.25, {"style": 0.25}, correct=False)

        def respond(self, example, completion):
            return reply

    Task.stop = stop
    return Task()


def test_an_object_may_be_a_task_too_and_rewards_pass_through():
    task = custom(interactive())
    assert task.name == "object" and isinstance(task, InteractiveTask)
    (example,) = task.splits()["train"]
    assert example.meta == {"level": 3, "id": "x"}
    assert task.score(example, "") == Reward(0.25, {"style": 0.25}, correct=False)
    assert task.respond(example, "?") == "pong"
    assert not isinstance(custom((EXAMPLES, nought)), InteractiveTask)


@pytest.mark.parametrize("number", [0.3, 1, 2.5, True, False])
def test_numbers_become_rewards(number):
    reward = custom((EXAMPLES, lambda example, completion: number)).score(EXAMPLES["train"][0], "")
    assert (reward.total, reward.correct) == (float(number), number >= 1)


@pytest.mark.parametrize(
    ("act", "says"),
    [
        (
            lambda: make_task(CustomSpec(factory="no_such_module:f")),
            "importing 'no_such_module' failed",
        ),
        (lambda: make_task(CustomSpec(factory="json:dmups")), "did you mean 'dumps'"),
        (
            lambda: custom((EXAMPLES, nought), options={"size": 3}),
            "unexpected keyword argument 'size'",
        ),
        (lambda: custom(({"train": []}, nought)).splits(), "a list of examples under 'train'"),
        (
            lambda: custom((EXAMPLES, lambda e, c: None)).score(EXAMPLES["train"][0], ""),
            "score returned NoneType",
        ),
        (lambda: custom(interactive(stop=())), "defines respond but not stop"),
        (lambda: custom(interactive(stop=("?", 3))), "defines respond but not stop"),
        (
            lambda: custom(interactive(reply=3)).respond(EXAMPLES["train"][0], ""),
            "respond: returned int",
        ),
    ],
)
def test_a_mistake_in_a_task_is_named(act, says):
    with pytest.raises(UserError, match=says) as caught:
        act()
    assert "\n" not in str(caught.value)


def test_the_documented_task_runs_as_it_stands(tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs/guides/model-and-task.md").read_text(encoding="utf-8")
    source = page.partition("# riddles.py\n")[2].partition("```")[0]
    assert 5 < len(source.strip().splitlines()) <= 17
    (tmp_path / "riddles.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    task = make_task(CustomSpec(factory="riddles:riddles"))
    splits = task.splits()
    assert {name: len(examples) for name, examples in splits.items()} == {
        "train": 100,
        "heldout": 50,
    }
    example = splits["train"][21]
    assert task.score(example, " 42\n") == Reward(1.0, {"answer": 1.0}, correct=True)
    assert not task.score(example, "43").correct
    sys.modules.pop("riddles")


SIZES = {"train_size": 15, "heldout_size": 8}
UNSEEN = SIZES | {"unseen_size": 5}
SPECS = {
    "knights_knaves": lambda seed: KnightsKnavesSpec(
        people=2, unseen_people=(3,), **UNSEEN, seed=seed
    ),
    "math": lambda seed: MathSpec(
        families=("arithmetic", "linear", "modular"),
        levels=(1, 2),
        unseen_levels=(3,),
        **UNSEEN,
        seed=seed,
    ),
    "tool_qa": lambda seed: ToolQaSpec(hops=(1, 2), **SIZES, seed=seed),
}


@pytest.mark.parametrize("name", SPECS)
@settings(max_examples=3, deadline=None)
@given(seeds=st.tuples(st.integers(0, 2**40), st.integers(0, 2**40)))
def test_generated_splits_share_nothing_and_no_other_seed_trains_on_what_is_held_out(name, seeds):
    if name == "tool_qa":
        pytest.importorskip("bm25s", reason="needs the optional library bm25s")
    first, second = (make_task(SPECS[name](seed)).splits() for seed in seeds)
    for splits in (first, second):
        prompts = {
            split: [example.prompt for example in examples] for split, examples in splits.items()
        }
        everything = [prompt for asked in prompts.values() for prompt in asked]
        assert len(everything) == len(set(everything))
        ids = [example.meta["id"] for examples in splits.values() for example in examples]
        assert len(ids) == len(set(ids))
    # worlds with other facts may ask the same question, with another answer
    train = {(example.prompt, example.answer) for example in first["train"]}
    assert not train & {(example.prompt, example.answer) for example in second["heldout"]}
