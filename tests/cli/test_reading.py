"""The reading commands and `study` on the example traces: what they print and write is what the traces hold."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import sharpscope
from sharpscope.analysis import claims, compare_runs
from sharpscope.analysis.headline import moved_tokens
from sharpscope.cli import app
from sharpscope.errors import UserError
from tests.conftest import pair
from tests.loops import some

EXAMPLE = pair()
GRPO, GRPO_SG = str(EXAMPLE / "grpo-s0"), str(EXAMPLE / "grpo-sg-s0")


def invoke(*arguments: object) -> str:
    result = CliRunner().invoke(app, list(map(str, arguments)), env={"COLUMNS": "220"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_tokens_lists_the_largest_with_their_numbers():
    output = invoke("tokens", GRPO_SG, "--step", "8", "--top", "5")
    run = sharpscope.load_run(GRPO_SG)
    for one in some(moved_tokens(run, 8, top=5)):
        assert (
            f"{100 * one.share:+.1f} %".replace("-", "−") in output
            and f"{one.probability:.3g}" in output
        )
    with pytest.raises(UserError, match="recorded at steps 1, 4, 8, 12"):
        invoke("tokens", GRPO_SG, "--step", "3")
    exact = run.tokens(steps=[8]).dropna(subset=["score_norm"]).nlargest(1, "score_norm").iloc[0]
    assert f"{exact.score_norm:.3g}" in invoke(
        "tokens", GRPO_SG, "--step", "8", "--by", "score_norm", "--top", "1"
    )
    assert CliRunner().invoke(app, ["tokens", GRPO_SG, "--step", "8", "--top", "0"]).exit_code == 2
    with pytest.raises(UserError, match="--spikes: finds the steps itself"):
        invoke("tokens", GRPO_SG, "--spikes", "--step", "8")


def test_spikes_says_the_true_reason():
    output = " ".join(invoke("tokens", GRPO, "--spikes").split())
    assert "No step reaches z = 4: the highest is z = 1.1 at step 11" in output
    assert (
        "Tokens' shares were not recorded at step 5; the nearest step that has them is 4." in output
    )
    assert "Ranges of probability" in output and "ten earlier steps" not in output


def test_json_has_the_numbers_of_the_tables():
    found = json.loads(invoke("tokens", GRPO_SG, "--step", "8", "--top", "5", "--json"))["sections"]
    run = sharpscope.load_run(GRPO_SG)
    wanted = moved_tokens(run, 8, top=5)
    assert [row["share"] for row in found[0]["rows"]] == pytest.approx(
        [one.share for one in wanted]
    )
    for row, one in zip(found[0]["rows"], wanted, strict=True):
        assert all(
            row[name] == getattr(one.sentence, name)
            for name in ("token", "run", "step", "rollout", "position")
        )
    ranges = next(
        section["rows"] for section in found if section["title"] == "Ranges of probability"
    )
    assert sum(row["share"] for row in ranges) == pytest.approx(1) and ranges[-1]["high"] == 1
    shown = json.loads(invoke("show", GRPO, GRPO_SG, "--json"))["sections"]
    (found,) = [section for section in shown if section["title"].startswith("Did grpo-sg")]
    table = compare_runs(sharpscope.load_runs(EXAMPLE))
    for row in some(found["rows"]):
        same = table[table["quantity"] == row["quantity"]].iloc[0]
        assert row["difference"] == pytest.approx(same["difference"], nan_ok=True)


def test_show_of_one_run_and_of_two():
    assert "finished" in invoke(
        "show", GRPO_SG
    ) and "Which tokens the gradient is made of" in invoke("show", GRPO_SG)
    assert "turned by" not in invoke("show", GRPO)  # a rotation by rounding
    assert "Did grpo-sg change anything, compared with grpo?" in invoke("show", GRPO, GRPO_SG)
    with pytest.raises(UserError, match="--watch: takes one run"):
        invoke("show", GRPO, GRPO_SG, "--watch")
    assert "grpo-s0: finished after 12 steps" in invoke("show", GRPO, "--watch")


def test_analyze_writes_a_folder_and_opens_the_page(tmp_path: Path, quick, monkeypatch):
    opened = []
    monkeypatch.setattr("typer.launch", opened.append)
    output = invoke("analyze", str(EXAMPLE), "--out", str(tmp_path / "out"), "--open")
    page = tmp_path / "out" / "report.html"
    assert str(page) in output.replace("\n", "") and opened == [page.as_uri()]
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")


# -- study

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


def test_a_plan_needs_two_pairs_of_runs():
    text = invoke("study", "plan", EXAMPLE)
    assert (
        "runs: grpo (1), grpo-sg (1); compared: grpo-sg against grpo" in text
        and "n for 80 %" in text
    )
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
    study.write_text(
        text.replace(
            "{steps: 10}", "{steps: 10, probes: {functionals: [expected_failure], rho: auto}}"
        )
    )
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
    assert len(stored) == len(claims.CLAIMS) and {entry["treatment"] for entry in stored} == {
        "grpo-sg"
    }
    printed = CliRunner().invoke(app, ["study", "claims", str(EXAMPLE), "--json"]).stdout
    assert json.loads(printed)["verdicts"] == stored
    output = invoke("study", "claims", EXAMPLE, "--claim", "C7", "--details")
    assert "rule: supported: greedy held-out accuracy" in output


def test_what_is_wrong_is_named(study: Path, tmp_path: Path):
    with pytest.raises(
        UserError,
        match=r"treatment mine: no finished run of it; there are runs of grpo \(1\), grpo-sg \(1\)",
    ):
        invoke("study", "claims", EXAMPLE, "--treatment", "mine")
    with pytest.raises(UserError, match="no run below"):
        invoke("study", "claims", tmp_path)
    assert "nan" not in invoke("study", "claims", GRPO)
    study.write_text(study.read_text().replace("C7", "C77"))
    with pytest.raises(UserError, match=r"claims.margins: C77 is no claim"):
        invoke("study", "declare", study)
