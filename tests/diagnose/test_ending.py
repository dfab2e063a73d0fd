"""What is said of a log that ends before its training was to end, and of files that cannot be read as they are."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable

import pytest

from sharpscope.diagnose import diagnose, read_log
from sharpscope.errors import UserError

ROWS = [
    {
        "step": step,
        "loss": 0.01,
        "grad_norm": 0.3 + (step % 7) / 100,
        "reward": 0.2 + step / 200 + (step % 5) / 100,
        "entropy": 0.5 + (step % 3) / 100,
    }
    for step in range(1, 61)
]


def _without_step(row: dict[str, float]) -> dict[str, float]:
    return {key: value for key, value in row.items() if key != "step"}


def _state(planned: int) -> str:
    return json.dumps({"global_step": 60, "max_steps": planned, "log_history": ROWS})


def _lines(make: Callable[[dict[str, float]], dict[str, object]]) -> str:
    return "\n".join(json.dumps(make(row)) for row in ROWS)


def _swift(planned: int) -> str:
    return _lines(lambda r: {"global_step/max_steps": f"{r['step']}/{planned}", **_without_step(r)})


def _llamafactory(planned: int) -> str:
    return _lines(
        lambda r: {"current_steps": r["step"], "total_steps": planned, **_without_step(r)}
    )


def _bars(planned: int) -> str:
    return "\n".join(
        f"{_without_step(row)}\n 5%|#  | {row['step']}/{planned} [00:10<00:30, 2.0s/it]"
        for row in ROWS
    )


def _verl(planned: int) -> str:
    return "\n".join(
        f"(T pid=7) step:{row['step']} - critic/score/mean:{row['reward']} - actor/entropy:{row['entropy']}"
        f" - actor/grad_norm:{row['grad_norm']} - response_length/mean:200.0\n"
        f"Training Progress: 5%|# | {row['step']}/{planned} [10:00<1:00, 60s/it]"
        for row in ROWS
    )


def _blocks(planned: int) -> str:
    return "\n".join(
        f"==== Step {row['step']}/{planned} ====\n"
        + "\n".join(f"  - {key}: {value}" for key, value in _without_step(row).items())
        for row in ROWS
    )


KINDS = {f.__name__: f for f in (_state, _swift, _llamafactory, _bars, _verl, _blocks)}
PRINTED = {name: KINDS[name] for name in ("_bars", "_verl", "_blocks")}


@pytest.mark.parametrize("name", KINDS)
def test_a_log_that_ends_early_says_so_and_where_the_reason_stands(name, tmp_path):
    (tmp_path / "log").write_text(KINDS[name](900))
    found = diagnose(tmp_path / "log")
    assert found.log.announced == 900
    assert found.ending.startswith("The log ends at step 60 of 900. ")
    for where in ("exit code", "out of memory", "stderr", "disk"):
        assert where in found.ending, where
    assert found.text().split("\n")[2] == found.ending == found.as_dict()["ending"]


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("planned", [60, 61])
def test_a_log_that_reached_its_end_says_nothing(name, planned, tmp_path):
    (tmp_path / "log").write_text(KINDS[name](planned))
    assert diagnose(tmp_path / "log").ending == ""


def test_a_training_with_a_summary_ended_as_it_should(tmp_path):
    history = [*ROWS, {"step": 60, "train_runtime": 12.0, "train_loss": 0.1}]
    (tmp_path / "log").write_text(json.dumps({"max_steps": 900, "log_history": history}))
    assert diagnose(tmp_path / "log").ending == ""


@pytest.mark.parametrize("name", PRINTED)
@pytest.mark.parametrize(
    "error",
    [
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        "\x1b[31mRuntimeError: NCCL communicator was aborted\x1b[0m",
        "Killed",
        "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-01-01 DUE TO TIME LIMIT ***",
    ],
)
def test_the_error_that_a_terminal_ends_with_is_shown(name, error, tmp_path):
    trace = f'Traceback (most recent call last):\n  File "a.py", line 3, in f\n{error}\n'
    (tmp_path / "log").write_text(f"{PRINTED[name](900)}\n{trace}")
    found = diagnose(tmp_path / "log")
    plain = error.removeprefix("\x1b[31m").removesuffix("\x1b[0m")
    assert found.ending == f"The log ends at step 60 of 900; the last error after it: {plain}"


@pytest.mark.parametrize("name", PRINTED)
def test_an_error_after_which_the_training_went_on_is_not_why_it_ended(name, tmp_path):
    lines = PRINTED[name](60).split("\n")
    lines.insert(len(lines) // 2, "requests.exceptions.ConnectionError: retrying")
    (tmp_path / "log").write_text("\n".join(lines))
    assert diagnose(tmp_path / "log").ending == ""


def test_a_critical_finding_may_be_why_a_log_ends(tmp_path):
    history = [row if row["step"] < 50 else {**row, "loss": float("nan")} for row in ROWS]
    (tmp_path / "log").write_text(json.dumps({"max_steps": 900, "log_history": history}))
    assert diagnose(tmp_path / "log").ending == "The log ends at step 60 of 900."


def test_a_zip_of_one_log_is_read_and_one_of_several_is_refused(tmp_path):
    content = _lines(lambda row: dict(row))
    with zipfile.ZipFile(tmp_path / "one", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("__MACOSX/._log.jsonl", "x")
        archive.writestr("run/log.jsonl", content)
    assert diagnose(tmp_path / "one").log.frame["reward"].iloc[-1] == ROWS[-1]["reward"]
    with zipfile.ZipFile(tmp_path / "two", "w") as archive:
        archive.writestr("a.jsonl", content)
        archive.writestr("b.jsonl", content)
    with pytest.raises(UserError, match="is a zip of 2 files; unpack it and give the folder"):
        diagnose(tmp_path / "two")
    (tmp_path / "cut").write_bytes((tmp_path / "one").read_bytes()[:200])
    with pytest.raises(UserError, match="cannot be read"):
        diagnose(tmp_path / "cut")


@pytest.mark.parametrize("delimiter", [",", ";", "\t", " "])
def test_a_table_without_names_asks_for_them(delimiter, tmp_path):
    (tmp_path / "log.csv").write_text(
        "\n".join(delimiter.join(f"{value:g}" for value in row.values()) for row in ROWS)
    )
    with pytest.raises(UserError, match="5 columns without names; write a line of names above"):
        diagnose(tmp_path / "log.csv")


def test_an_error_before_a_summary_of_the_tracker_is_kept(tmp_path):
    error = "torch.OutOfMemoryError: CUDA out of memory."
    summary = "wandb: Run summary:\nwandb: train/global_step 60"
    for name, text in (("alone", error), ("before", f"{error}\n{summary}")):
        (tmp_path / f"{name}.log").write_text(_bars(900) + "\n" + text)
        assert error in diagnose(tmp_path / f"{name}.log").ending


def test_a_column_that_counts_something_else_is_no_announced_end(tmp_path):
    rows = [row | {"total_steps": 1024 * row["step"]} for row in ROWS]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert diagnose(tmp_path / "a.jsonl").ending == ""


def test_a_step_that_was_begun_does_not_hide_the_end(tmp_path):
    lines = [
        f"Step {row['step']}/100 loss: {row['loss']} reward: {row['reward']} grad_norm: {row['grad_norm']}"
        for row in ROWS
    ]
    (tmp_path / "a.log").write_text("\n".join([*lines, "Step 61/100 generating rollouts"]))
    assert "60 of 100" in diagnose(tmp_path / "a.log").ending


def test_a_delimiter_at_the_end_of_lines_shifts_no_column(tmp_path):
    names = list(ROWS[0])
    lines = [",".join(str(row[name]) for name in names) + "," for row in ROWS]
    (tmp_path / "a.csv").write_text("\n".join([",".join(names), *lines]))
    frame = read_log(tmp_path / "a.csv").frame
    assert frame["grad_norm"].tolist() == [row["grad_norm"] for row in ROWS]
    assert frame["reward"].tolist() == [row["reward"] for row in ROWS]
