"""`sharpscope study plan`, `declare` and `claims`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sharpscope.analysis import claims
from sharpscope.cli import app
from sharpscope.errors import UserError
from tests.cli.invoking import EXAMPLE, GRPO
from tests.cli.invoking import invoke as run

STUDY = """
base: {steps: 10}
methods: [grpo, grpo-sg]
seeds: [0, 1, 2, 3, 4]
claims: {margins: {C7: 0.03}}
"""


@pytest.fixture
def study(tmp_path: Path) -> Path:
    file = tmp_path / "study.yaml"
    file.write_text(f"out: {tmp_path / 'runs'}{STUDY}")
    return file


def invoke(*arguments: object) -> str:
    return run(*map(str, arguments))


def test_a_plan_needs_two_pairs_of_runs():
    text = invoke("study", "plan", EXAMPLE)
    assert "runs: grpo (1), grpo-sg (1); compared: grpo-sg against grpo" in text and "n for 80 %" in text
    assert "two pairs or more" in invoke("study", "plan", EXAMPLE, "--claim", "C7")


def test_declare_change_and_refuse(study: Path):
    assert "declared; SHA-256" in invoke("study", "declare", study)
    states = json.loads(study.with_suffix(".declared.json").read_text())
    assert states[0]["rules"]["claims"]["C7"]["margin"] == 0.03
    assert "unchanged" in invoke("study", "declare", study)
    study.write_text(study.read_text().replace("0.03", "0.01"))
    with pytest.raises(UserError, match="--why"):
        invoke("study", "declare", study)
    assert "C7.margin: 0.03 → 0.01" in invoke("study", "declare", study, "--why", "a larger study")


def test_a_study_declares_one_radius(study: Path):
    text = study.read_text()
    study.write_text(text.replace("{steps: 10}", "{steps: 10, probes: {functionals: [expected_failure], rho: auto}}"))
    with pytest.raises(UserError, match=r"probes\.rho: auto; all runs need one radius"):
        invoke("study", "declare", study)
    study.write_text(study.read_text().replace("auto", "0.25"))
    invoke("study", "declare", study)
    assert json.loads(study.with_suffix(".declared.json").read_text())[0]["rules"]["radius"] == 0.25


def test_claims_prints_every_verdict_and_the_checks_and_writes_them(tmp_path: Path):
    output = invoke("study", "claims", EXAMPLE, "--out", tmp_path / "claims")
    names = [line.split()[0] for line in output.splitlines() if line.startswith("C")]
    assert list(dict.fromkeys(names)) == [*claims.CLAIMS, "C1"]
    assert "grpo-sg generalizes better" in output and f"{tmp_path / 'claims'}/claims.md" in output
    stored = json.loads((tmp_path / "claims" / "claims.json").read_text())
    assert len(stored) == len(claims.CLAIMS) and {entry["treatment"] for entry in stored} == {"grpo-sg"}
    printed = CliRunner().invoke(app, ["study", "claims", str(EXAMPLE), "--json"]).stdout
    assert json.loads(printed)["verdicts"] == stored
    output = invoke("study", "claims", EXAMPLE, "--claim", "C7", "--details")
    assert "rule: supported: greedy held-out accuracy" in output


def test_what_is_wrong_is_named(study: Path, tmp_path: Path):
    with pytest.raises(
        UserError, match=r"treatment mine: no finished run of it; there are runs of grpo \(1\), grpo-sg \(1\)"
    ):
        invoke("study", "claims", EXAMPLE, "--treatment", "mine")
    with pytest.raises(UserError, match="no run below"):
        invoke("study", "claims", tmp_path)
    assert "nan" not in invoke("study", "claims", GRPO)
    study.write_text(study.read_text().replace("C7", "C77"))
    with pytest.raises(UserError, match=r"claims.margins: C77 is no claim"):
        invoke("study", "declare", study)
