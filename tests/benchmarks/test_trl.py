"""The bench of the recorder: the two trainings are the same, and the share is what the times say."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("trl", reason="TRL is not installed (test extra)")

from experiments.benchmarks.__main__ import app
from experiments.benchmarks.trl import RecorderCost, measure

SMALL = [
    "rollout.prompts_per_step=2",
    "rollout.group_size=2",
    "rollout.max_new_tokens=6",
    "task.train_size=4",
    "task.heldout_size=0",
]


def test_measure_and_command(tmp_path: Path, monkeypatch):
    kept: list[RecorderCost] = []
    monkeypatch.setattr("experiments.benchmarks.trl.measure", lambda *a: kept.append(measure(*a)) or kept[0])
    arguments = ["trl", "--steps", "2", "--threads", "1", "--out", str(tmp_path)]
    for value in SMALL:
        arguments += ["--set", value]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "trl.md").read_text("utf-8") == kept[0].markdown()
    found = kept[0]
    assert len(found.plain) == len(found.recorded) == len(found.recording) == 2 and found.completions == 4
    assert found.share == pytest.approx(sum(found.recorded) / sum(found.plain) - 1)
    assert found.share_recorded == pytest.approx(sum(found.recording) / (sum(found.recorded) - sum(found.recording)))
    assert found.cpu_plain > 0 and found.share_cpu == pytest.approx(found.cpu_recorded / found.cpu_plain - 1)
    assert 4 <= found.tokens <= 24 and found.probed == [False, True]  # the last step always has token gradients


def test_the_table_says_what_was_measured():
    cost = RecorderCost(
        plain=[2.0, 4.0],
        recorded=[2.2, 4.4],
        recording=[0.1, 0.5],
        probed=[False, True],
        cpu_plain=8.0,
        cpu_recorded=9.0,
        tokens=100.0,
        completions=8,
        threads=2,
        device="a machine",
        versions={"trl": "1.16.0"},
    )
    text = cost.markdown()
    assert (
        "Cost of recording: 10.0% of TRL's time by the wall clock, 12.5% by processor time, 10.0% by the recorder's own clock"
        in text
    )
    assert "at 1 of them" in text and "a machine" in text and "trl 1.16.0" in text
