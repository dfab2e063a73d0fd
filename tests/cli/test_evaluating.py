"""`sharpscope eval`: what is given is measured or refused, and nothing is measured before a mistake is found."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner

from sharpscope.cli import app
from sharpscope.errors import UserError
from sharpscope.training.evaluate import evaluate_model

CHANGES = ["task.kind=custom", "task.factory=tests.toy_task:vowels", "rollout.max_new_tokens=8", "threads=1"]


@pytest.fixture
def place(tiny_policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command with a small model and task, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    sets = [part for change in CHANGES for part in ("--set", change)]
    return ["eval", str(tiny_policy), *sets, "--prompts", "2", "--temperature", "0"]


def invoke(*arguments: str):
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})


def test_mistakes_are_found_before_anything_is_drawn(place, tiny_policy, tmp_path: Path):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("")
    for arguments, says in (
        (["--out", "taken"], "taken is not empty and is not overwritten; use --out taken-2"),
        (["--split", "heldout", "--split", "unseem"], "--split unseem: the task has "),
        (["--split", "all"], "--split all: the task has train, heldout; name one of them"),
    ):
        result = invoke(*place, *arguments)
        assert isinstance(result.exception, UserError) and says in str(result.exception)
        assert result.stdout == ""
    for option in ("--prompts", "--samples"):
        assert invoke(*place, option, "0").exit_code == 2  # refused as an option, before anything is loaded
        with pytest.raises(UserError, match=f"evaluation.{option.strip('-')}"):
            evaluate_model(str(tiny_policy), overrides=CHANGES, **{option.strip("-"): 0})


def test_the_table_has_an_interval_at_zero_and_the_folder_of_out_is_made(place):
    """The toy policy gets none of the 2 greedy puzzles of a level right: 0 % with an upper end of z²/(2 + z²) = 65.76 %."""
    result = invoke(*place, "--out", "new/results", "-k", "1")
    assert result.exit_code == 0, result.output
    frame = pd.read_csv("new/results/eval.csv")
    row = frame.iloc[0]
    assert set(frame["split"]) == {"heldout"}  # of the default splits the task has this one
    assert row["accuracy"] == 0.0 and "0.00% [0.00, 65.76]" in result.stdout and "pass@1 [95 %]" in result.stdout
    assert (row["accuracy_low"], row["accuracy_high"]) == (0.0, pytest.approx(0.6576, abs=1e-4))
    assert (row["pass_at_1_low"], row["pass_at_1_high"]) == (row["accuracy_low"], row["accuracy_high"])


def test_every_row_of_a_file_is_evaluated_on_request(tiny_policy: Path, tmp_path: Path, monkeypatch):
    """40 rows, some of which the content hash holds out; the number of rows used is printed either way."""
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"What is {i} + 1?", "answer": str(i + 1), "data_source": "numeric"} for i in range(40)]
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    sets = ["task.path=test.jsonl", "rollout.max_new_tokens=2", "threads=1"]
    command = ["eval", str(tiny_policy), "--task", "dataset", "--temperature", "0"]
    command += [part for change in sets for part in ("--set", change)]
    some = invoke(*command, "--out", "some")
    assert some.exit_code == 0, some.output
    count = int(pd.read_csv("some/eval.csv")["n"].sum())
    assert 0 < count < 40
    assert (
        f"split heldout: {count} of the 40 rows of task.path = test.jsonl; --split all takes every row" in some.stderr
    )
    every = invoke(*command, "--split", "all", "--out", "every")
    assert every.exit_code == 0, every.output
    (row,) = pd.read_csv("every/eval.csv").to_dict("records")
    assert (row["split"], row["n"]) == ("all", 40)
