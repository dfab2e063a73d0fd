"""The study's declaration, its kept runs, and what is said of them in experiments/: each remade from the repository alone."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sharpscope.cli import app
from sharpscope.sweeps import plan_sweep, read_sweep
from sharpscope.traces import load_runs

ROOT = Path(__file__).resolve().parents[1]
REFERENCE, TUNING = ROOT / "data" / "reference", ROOT / "data" / "tuning"
FIRST = ROOT / "experiments" / "studies" / "1"
RESULTS = FIRST / "results"


def invoke(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return result.output


def test_every_verdict_and_table_is_remade_to_the_letter(tmp_path: Path):
    invoke("claims", str(REFERENCE), "--out", str(tmp_path))
    made_texts = {path.name for path in tmp_path.iterdir() if path.suffix in (".json", ".md")}
    assert made_texts == {path.name for path in RESULTS.iterdir()}  # tables as CSV and LaTeX are not kept
    made, kept = (json.loads((folder / "claims.json").read_text()) for folder in (tmp_path, RESULTS))
    for mine, theirs in zip(made, kept, strict=True):
        assert (mine["claim"], mine["verdict"], mine["n"]) == (theirs["claim"], theirs["verdict"], theirs["n"])
        for name in ("p_value", "p_adjusted"):
            assert mine[name] == pytest.approx(theirs[name], abs=1e-6)
        for ours, said in zip(_numbers(mine), _numbers(theirs), strict=True):
            assert ours == pytest.approx(said, rel=1e-4, abs=1e-9)


def _numbers(verdict: dict) -> list[float]:
    effect, interval = verdict["effect"] or {}, verdict["interval"] or {}
    return [value for value in (effect.get("value"), interval.get("low"), interval.get("high")) if value is not None]


def test_the_repository_stays_small():
    """At most 900 files and 60 MB, of which the kept runs are a few files."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    files = [path for name in listed.stdout.decode().split("\0") if name and (path := ROOT / name).is_file()]
    assert len(files) <= 900
    assert sum(path.stat().st_size for path in files) <= 60e6
    assert sum(path.is_file() for folder in (REFERENCE, TUNING) for path in folder.rglob("*")) <= 20


def test_kept_runs_are_those_of_the_declared_study():
    planned = {run.name: run.config for run in plan_sweep(read_sweep(FIRST / "study.yaml"))}
    kept = [*load_runs(REFERENCE), *load_runs(TUNING)]
    assert len(kept) >= 18
    for run in kept:
        assert run.status == "finished" and run.reduced is not None
        declared = planned[run.path.name].model_dump(mode="json")
        for part in ("steps", "seed", "task", "policy", "rollout", "update", "optimizer", "evaluation"):
            assert run.config[part] == declared[part], (run.path.name, part)
    assert sum(file.stat().st_size for file in REFERENCE.rglob("*") if file.is_file()) < 30e6


def test_the_stated_rule_chose_the_learning_rate():
    """Of four rates the one with the highest mean held-out accuracy over both methods and both seeds."""
    by_rate: dict[float, list[float]] = {}
    for run in load_runs(TUNING):
        rows = run.eval[(run.eval["split"] == "heldout") & (run.eval["step"] == 50) & (run.eval["temperature"] == 1)]
        by_rate.setdefault(run.config["optimizer"]["lr"], []).append(float(rows["accuracy"].iloc[0]))
    assert {rate: len(values) for rate, values in by_rate.items()} == {5e-5: 4, 1e-4: 4, 2e-4: 4, 4e-4: 4}
    chosen = max(by_rate, key=lambda rate: sum(by_rate[rate]))
    assert {run.config["optimizer"]["lr"] for run in load_runs(REFERENCE) if run.method == "grpo-sg"} == {chosen}


def test_what_results_say_of_each_claim_is_its_verdict():
    """`claims.json` is what the reference runs give: `test_every_verdict_and_table_is_remade_to_the_letter`."""
    text = (FIRST / "RESULTS.md").read_text()
    verdicts = json.loads((RESULTS / "claims.json").read_text())
    assert len(verdicts) >= 14
    for verdict in verdicts:
        assert f"| {verdict['claim']} | {verdict['verdict']} |" in text, verdict["claim"]


def test_results_quote_the_tables_to_the_letter():
    text = (FIRST / "RESULTS.md").read_text()
    tables = sorted(RESULTS.glob("table_*.md"))
    assert {"table_pair", "table_controls", "table_settings", "table_neighbours"} <= {table.stem for table in tables}
    for table in tables:
        rows = [line for line in table.read_text().splitlines() if line.startswith("|")]
        assert len(rows) > 3 and all(row in text for row in rows), table.name
