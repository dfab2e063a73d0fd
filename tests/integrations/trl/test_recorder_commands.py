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
    assert "weighted · finished" in text and "10 of 10" in text and "weights (sigmoid)" in text


def test_analyze_and_report(runs: Path, tmp_path: Path, quick):
    said("analyze", str(runs / "weighted"), "--out", str(tmp_path / "report"))
    names = {path.name for path in (tmp_path / "report").iterdir()}
    assert "report.md" in names and any(name.endswith(".png") for name in names)
    text = (tmp_path / "report" / "report.md").read_text("utf-8")
    assert "| weighted | grpo-sg+weight.preset=calibrated | 3 | trl | finished | 10 |" in text
    assert "again-weighted" not in text  # sharpscope run could not do it
    said("report", str(runs / "weighted"), "--out", str(tmp_path / "one.html"))
    assert "grpo-sg" in (tmp_path / "one.html").read_text("utf-8")


def test_claims(runs: Path):
    text = said("claims", str(runs), "--treatment", "grpo-sg+weight.preset=calibrated")
    for claim in ("C1 ", "C2 ", "C3 ", "C7 ", "C13 "):
        assert claim in text
    assert "no finished run" not in text  # both methods are there; what is missing are seeds


def test_tokens_spikes_compare_shapings(runs: Path, tmp_path: Path):
    text = said("tokens", str(runs / "plain"), "--step", "5")
    assert "w" in text and "step 5" in text.lower()
    said("spikes", str(runs / "plain"))
    text = said("compare", str(runs / "plain"), str(runs / "weighted"))
    assert "method" in text
    said("shapings", "--run", str(runs / "weighted"), "--out", str(tmp_path / "curve.png"))
    assert (tmp_path / "curve.png").stat().st_size > 0


@pytest.mark.slow
def test_figures(runs: Path, tmp_path: Path):
    said("figures", "--from", str(runs), "--out", str(tmp_path / "figures"))
    assert any((tmp_path / "figures").iterdir())
