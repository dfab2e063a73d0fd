"""Ten steps of TRL on a tiny model, read by every command that reads traces."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from sharpscope.cli import app

pytest.importorskip("trl", reason="TRL is not installed (test extra)")

from sharpscope.integrations.trl import record
from tests.integrations.trainers import trainer


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trl_runs")
    for name, weights in (("plain", None), ("weighted", "grpo-sg")):
        one = trainer(folder / "trainer" / name, max_steps=10)
        record(
            one,
            folder / "runs" / name,
            weights=weights,
            shaping=weights and "calibrated",
            recording={"token_gradients_every": 5},
        )
        one.train()
    return folder / "runs"


def said(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output


def test_show(runs: Path):
    text = said("show", str(runs / "weighted"))
    assert "weighted · finished" in text and "10 of 10" in text and "token weight, mean" in text


def test_analyze(runs: Path, tmp_path: Path, quick):
    said("analyze", str(runs / "weighted"), "--out", str(tmp_path / "report"))
    assert any((tmp_path / "report" / "figures").glob("*.png"))
    text = (tmp_path / "report" / "report.html").read_text("utf-8")
    assert "grpo-sg (preset calibrated)" in text
    assert "again-weighted" not in text  # sharpscope run could not do it


def test_claims(runs: Path):
    text = said("claims", str(runs), "--treatment", "grpo-sg+weight.preset=calibrated")
    for claim in ("C1 ", "C2 ", "C3 ", "C7 ", "C13 "):
        assert claim in text
    assert "no finished run" not in text  # both methods are there; what is missing are seeds


def test_tokens_and_differences(runs: Path):
    assert "step 5" in said("tokens", str(runs / "plain"), "--step", "5")
    said("tokens", str(runs / "plain"), "--spikes")
    assert "change anything" in said("show", str(runs / "plain"), str(runs / "weighted"))
