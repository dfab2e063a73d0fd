"""`sharpscope eval`: what is given is measured or refused, and no result is lost to a file that cannot be written."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner

from sharpscope.cli import app
from sharpscope.errors import UserError
from sharpscope.training.evaluate import evaluate_model

evaluation = importlib.import_module("sharpscope.training.evaluate")  # the package has a function of that name
CHANGES = ["task.kind=custom", "task.factory=tests.toy_task:vowels", "rollout.max_new_tokens=8", "threads=1"]


@pytest.fixture
def place(tiny_policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command with a small model and task, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    sets = [part for change in CHANGES for part in ("--set", change)]
    return ["eval", str(tiny_policy), *sets, "--prompts", "2", "--temperature", "0"]


def invoke(*arguments: str):
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})


@pytest.fixture
def draws(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One number for each time that completions are drawn."""
    real, calls = evaluation.draw_scored, []

    def counting(*arguments):
        calls.append(len(calls))
        return real(*arguments)

    monkeypatch.setattr(evaluation, "draw_scored", counting)
    return calls


def test_the_folder_of_out_is_made(place, tmp_path: Path):
    result = invoke(*place, "--out", "new/folder/rows.csv")
    assert result.exit_code == 0, result.output
    assert set(pd.read_csv(tmp_path / "new" / "folder" / "rows.csv")["split"]) == {"heldout"}
    assert not (tmp_path / "evaluations").exists()


def test_an_out_that_cannot_be_is_said_before_anything_is_drawn(place, draws, tmp_path: Path):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder.csv").mkdir()
    for out, says in (("file/rows.csv", "is not a writable folder"), ("folder.csv", "is a folder")):
        error = invoke(*place, "--out", out).exception
        assert isinstance(error, UserError) and says in str(error)
    assert not draws


def test_rows_that_cannot_be_written_keep_what_was_measured(place, draws, tmp_path: Path, monkeypatch):
    def refuses(*arguments, **options):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(pd.DataFrame, "to_csv", refuses)
        error = invoke(*place, "--out", "rows.csv").exception
    assert isinstance(error, UserError) and "No space left on device" in str(error)
    drawn = len(draws)
    assert drawn and list((tmp_path / "evaluations").iterdir())
    assert invoke(*place, "--out", "rows.csv").exit_code == 0
    assert len(draws) == drawn and (tmp_path / "rows.csv").exists()


def test_a_split_that_the_task_lacks_is_refused(place, draws):
    error = invoke(*place, "--split", "heldout", "--split", "unseem").exception
    assert isinstance(error, UserError) and str(error).startswith("--split unseem: the task has ")
    assert not draws
    assert invoke(*place).exit_code == 0  # of the default ones the task has heldout alone


@pytest.mark.parametrize("option", ["--prompts", "--samples"])
@pytest.mark.parametrize("value", ["0", "-1"])
def test_fewer_than_one_is_refused(place, option, value, tiny_policy: Path):
    result = invoke(*place, option, value)
    assert result.exit_code == 2, result.output  # refused as an option, before anything is loaded
    with pytest.raises(UserError, match=f"{option} {value}: must be at least 1"):
        evaluate_model(str(tiny_policy), overrides=CHANGES, **{option.strip("-"): int(value)})


def test_every_row_of_a_file_is_evaluated_on_request(tiny_policy: Path, tmp_path: Path, monkeypatch):
    """40 rows, some of which the content hash holds out; the number of rows used is printed either way."""
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"What is {i} + 1?", "answer": str(i + 1), "data_source": "numeric"} for i in range(40)]
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    sets = ["task.path=test.jsonl", "task.columns.answer=answer", "rollout.max_new_tokens=2", "threads=1"]
    command = ["eval", str(tiny_policy), "--task", "dataset", "--temperature", "0", "--out", "rows.csv"]
    command += [part for change in sets for part in ("--set", change)]
    some = invoke(*command)
    assert some.exit_code == 0, some.output
    count = int(pd.read_csv("rows.csv")["n"].sum())
    assert 0 < count < 40
    assert (
        f"split heldout: {count} of the 40 rows of task.path = test.jsonl; --split all takes every row" in some.stderr
    )
    every = invoke(*command, "--split", "all")
    assert every.exit_code == 0, every.output
    (row,) = pd.read_csv("rows.csv").to_dict("records")
    assert (row["split"], row["n"]) == ("all", 40)
    assert "split all: 40 of the 40 rows of task.path = test.jsonl\n" in every.stderr
    # a file of which the hash holds nothing out, or all, can be evaluated too
    one = invoke(*command, "--split", "all", "--set", "task.limit=1")
    assert one.exit_code == 0, one.output
    assert pd.read_csv("rows.csv")["n"].tolist() == [1]


def test_all_rows_are_a_data_sets_alone(place):
    error = invoke(*place, "--split", "all").exception
    assert (
        isinstance(error, UserError)
        and str(error) == "--split all: the task has train, heldout; name one of them, or repeat --split for several"
    )


def test_the_table_has_an_interval_at_zero(place, tmp_path: Path):
    """The toy policy gets none of the 2 greedy puzzles of a level right: 0 % with an upper end of z²/(2 + z²) = 65.76 %."""
    result = invoke(*place, "--out", "rows.csv", "-k", "1")
    assert result.exit_code == 0, result.output
    row = pd.read_csv("rows.csv").iloc[0]
    assert row["accuracy"] == 0.0 and "0.00% [0.00, 65.76]" in result.stdout and "pass@1 [95 %]" in result.stdout
    assert (row["accuracy_low"], row["accuracy_high"]) == (0.0, pytest.approx(0.6576, abs=1e-4))
    assert (row["pass_at_1_low"], row["pass_at_1_high"]) == (row["accuracy_low"], row["accuracy_high"])
