"""`sharpscope power` and `sharpscope study declare`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sharpscope.cli import app
from sharpscope.errors import UserError

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
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_a_planned_study_is_judged_before_any_run(study: Path):
    text = invoke("power", "--study", study, "--claim", "C7", "--claim", "C14")
    assert "C7  (between runs) untestable: 5 pairs of runs with one seed; the rule needs 6: 1 more" in text
    assert "C14 untestable: needs grpo at learning rates below" in text and "C4" not in text


def test_declare_change_and_refuse(study: Path):
    assert "declared; SHA-256" in invoke("study", "declare", study)
    states = json.loads(study.with_suffix(".declared.json").read_text())
    assert states[0]["rules"]["claims"]["C7"]["margin"] == 0.03
    assert "unchanged" in invoke("study", "declare", study)
    study.write_text(study.read_text().replace("0.03", "0.01"))
    with pytest.raises(UserError, match="--why"):
        invoke("study", "declare", study)
    assert "C7.margin: 0.03 → 0.01" in invoke("study", "declare", study, "--why", "a larger study")


def test_what_is_wrong_is_named(study: Path):
    with pytest.raises(UserError, match="pilot runs, or a planned study"):
        invoke("power")
    study.write_text(study.read_text().replace("C7", "C77"))
    with pytest.raises(UserError, match=r"claims.margins: C77 is no claim"):
        invoke("study", "declare", study)
