"""Reading data sets: column mapping, the choice of scorer, holding out, and what broken files say."""

from __future__ import annotations

import json

import pandas as pd
import pytest

from sharpscope.errors import UserError
from sharpscope.tasks import DatasetSpec, make_task

TRUTH = "(1) Ava is a knight\n(2) Liam is a knave"


def kk_row(**fields):
    row = {
        "prompt": [{"role": "user", "content": "<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n<think>"}],
        "reward_model": {"style": "rule", "ground_truth": {"solution_text_format": TRUTH}},
        "data_source": "kk_logic",
    }
    return row | fields


def rows_of(count: int, **fields):
    return [
        {"prompt": f"What is {i} + 1?", "answer": str(i + 1), "data_source": "numeric"} | fields for i in range(count)
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


def test_columns_are_mapped_and_a_whole_name_wins_over_a_nested_one(tmp_path):
    rows = [{"q": {"text": "How many?"}, "a.b": 3}]
    mapping = {"prompt": "q.text", "answer": "a.b"}
    task, splits = load(write(tmp_path / "a.jsonl", rows), columns=mapping, scorer="numeric", heldout_fraction=0)
    (example,) = splits["train"]
    assert (example.prompt, example.answer, example.meta["level"]) == ("How many?", "3", "all")
    assert task.score(example, "It is 3.").correct
    assert not task.score(example, "It is 4.").correct


def test_chat_messages_are_kept_and_also_given_as_text(tmp_path):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}]
    row = {"prompt": messages, "answer": "2", "data_source": "exact"}
    _, splits = load(write(tmp_path / "a.parquet", [row]), heldout_fraction=0)
    assert splits["train"][0].prompt == "Be brief.\n\n1 + 1?"
    assert splits["train"][0].messages == messages
    _, splits = load(tmp_path / "a.parquet", heldout_fraction=0, template="Q: {prompt} A: ")
    assert splits["train"][0].prompt == "Q: Be brief.\n\n1 + 1? A: "
    _, splits = load(write(tmp_path / "b.parquet", [kk_row()]), heldout_fraction=0, template="Q: {prompt} A: ")
    assert splits["train"][0].prompt == kk_row()["prompt"][0]["content"]  # a template does not surround chat markup


def test_the_data_source_chooses_the_scorer(tmp_path):
    rows = rows_of(1, data_source="openai/gsm8k", answer="so 3 + 4 = 7\n#### 1,007")
    rows += [{"prompt": "Who wrote it?", "answer": {"target": ["The Beatles", "Lennon"]}, "data_source": "nq"}]
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
    assert {example.prompt for example in part["heldout"]} == held & {row["prompt"] for row in rows[100:]}
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
    ("change", "says"),
    [
        ({"prompt": None}, "the prompt must be text"),
        ({"prompt": ["hello"]}, "with 'role' and 'content'"),
        ({"data_source": "kk_logick"}, "did you mean 'kk_logic'"),
        ({"data_source": None}, "data_source None has no scorer"),
        ({"reward_model": None}, "no column 'ground_truth'"),
        ({"reward_model": {"ground_truth": {"solution": TRUTH}}}, "the answer must be like"),
        ({"reward_model": {"ground_truth": "{broken"}}, "the answer must be like"),
    ],
)
def test_a_broken_row_is_named_with_its_line(tmp_path, change, says):
    path = write(tmp_path / "a.jsonl", [kk_row(), kk_row(**change)])
    with pytest.raises(UserError) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path} line 2: ")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
@pytest.mark.parametrize("names", [("prompt", "label"), ("question", "answer"), ("problem", "solution")])
def test_common_column_names_are_used_as_they_are(tmp_path, names, suffix):
    """README: --task dataset --set task.path=puzzles.parquet."""
    rows = [dict(zip((*names, "note"), (f"{i} + 1?", str(i + 1), "x"), strict=True)) for i in range(40)]
    task, splits = load(write(tmp_path / f"a.{suffix}", rows))
    assert len(splits["train"]) + len(splits["heldout"]) == 40
    example = splits["train"][0]
    assert example.prompt.endswith("+ 1?") and example.meta["scorer"] == "numeric"
    assert task.score(example, f"It is {example.answer}.").correct


@pytest.mark.parametrize(
    ("answer", "scorer"),
    [
        ("7", "numeric"),
        (-2.5, "numeric"),
        (["1,234", "$3"], "numeric"),
        ("so\n#### 72", "numeric"),
        ("7 or 8", "exact_match"),
        (r"\frac{1}{2}", "math"),
        ("{1, 2}", "exact_match"),
        ({"target": ["Lena"]}, "exact_match"),
    ],
)
def test_the_answer_chooses_the_scorer_where_nothing_else_does(tmp_path, answer, scorer):
    _, splits = load(write(tmp_path / "a.jsonl", [{"prompt": "p", "answer": answer}]), heldout_fraction=0)
    assert splits["train"][0].meta["scorer"] == scorer


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (
            {"prompt": "p", "answer": "1", "solution": "2"},
            "answer and solution can each be the answer; set task.columns.answer",
        ),
        ({"text": "p", "answer": "1"}, "no column for the prompt .*; set task.columns.prompt to one of: text, answer"),
    ],
)
def test_unclear_columns_are_named(tmp_path, row, says):
    with pytest.raises(UserError, match=says):
        load(write(tmp_path / "a.jsonl", [row]))


@pytest.mark.parametrize("answer", [None, True, {"x": 1}, float("nan"), "", [], "seven"])
def test_a_broken_answer_is_named(tmp_path, answer):
    path = write(tmp_path / "a.jsonl", rows_of(1, answer=answer))
    with pytest.raises(UserError, match=r"line 1: the .*answer"):
        load(path)


def test_broken_files_say_where_and_what(tmp_path):
    good = json.dumps(rows_of(1)[0])
    for content in ("{not json}\n", "[1, 2]\n", "[" * 100_000 + "\n"):
        file = tmp_path / "a.jsonl"
        file.write_text(f"{good}\n\n{content}{good}\n")
        with pytest.raises(UserError, match="line 3: not readable as JSON lines"):
            load(file)
    (tmp_path / "latin.jsonl").write_bytes(good.encode() + b'\n{"prompt": "\xe9"}\n')
    (tmp_path / "empty.jsonl").write_text("\n\n")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 this is not one PAR1")
    write(tmp_path / "zero.parquet", pd.DataFrame({name: pd.Series([], dtype=str) for name in ("prompt", "answer")}))
    (tmp_path / "table.csv").write_text("prompt,answer\n")
    (tmp_path / "folder").mkdir()
    for name, says in [
        ("latin.jsonl", "not readable"),
        ("empty.jsonl", "has no rows"),
        ("broken.parquet", "not readable"),
        ("zero.parquet", "has no rows"),
        ("table.csv", "of a known format"),
        ("folder", "of a known format"),
        ("absent.parquet", "no such file or folder"),
    ]:
        with pytest.raises(UserError, match=says) as caught:
            load(tmp_path / name)
        assert name in str(caught.value)
        assert "\n" not in str(caught.value)


def test_an_empty_side_is_an_error_with_a_way_out(tmp_path):
    path = write(tmp_path / "a.jsonl", rows_of(1))
    with pytest.raises(UserError, match=r"heldout_fraction = 0\.1: the held-out set has none of the 1 rows"):
        load(path)
    with pytest.raises(UserError, match="the training set has none of the 1 rows"):
        load(path, heldout_path=path)
    with pytest.raises(UserError, match=r"task\.path: not set"):
        load("")
