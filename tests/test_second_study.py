"""The second study: its declaration, its kept runs, and every number of experiments/studies/2/RESULTS.md."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner

from sharpscope.cli import app
from sharpscope.sweeps import plan_sweep, read_sweep
from sharpscope.traces import load_runs

ROOT = Path(__file__).resolve().parents[1]
STUDY, DATA = ROOT / "experiments" / "studies" / "2", ROOT / "data" / "studies" / "2"
RESULTS = STUDY / "results"
_SCRIPT = importlib.util.spec_from_file_location("study_tables", STUDY / "tables.py")
tables = importlib.util.module_from_spec(_SCRIPT)
_SCRIPT.loader.exec_module(tables)


@pytest.fixture(scope="module")
def runs():
    return load_runs(DATA / "runs").by_name


def test_kept_runs_are_those_of_the_declaration_and_began_after_it(runs):
    planned = {run.name: run.config for run in plan_sweep(read_sweep(STUDY / "study.yaml"))}
    declared = json.loads((STUDY / "study.declared.json").read_text())
    primary = ("C7", "C4", "C10")
    for state in declared:  # what was changed before the analysis leaves the primary claims alone
        assert state["rules"]["order"] == list(primary) and state["rules"]["treatment"] == f"grpo-sg+{tables.CONSTANTS}"
        assert all(state["rules"]["claims"][name] == declared[0]["rules"]["claims"][name] for name in (*primary, "C14"))
    for name, run in runs.items():
        assert run.status == "finished" and run.reduced is not None
        config = planned[name].model_dump(mode="json")
        for part in ("steps", "seed", "task", "policy", "rollout", "update", "optimizer", "evaluation", "probes"):
            assert run.config[part] == config[part], (name, part)
        assert run.info["started"] > declared[0]["declared"]
    seeds = {name: {run.seed for run in runs.values() if tables.arm(run) == name} for name in tables.ARMS}
    assert len(seeds["grpo"]) >= 6 and all(own == seeds["grpo"] for own in seeds.values())  # complete blocks


def test_the_published_constants_are_plain_grpo_here(runs):
    """Same trajectory to the last bit as long as all weights are 1; later they are at most 1.4 % above."""
    published = next(run for run in runs.values() if tables.arm(run) == "published")
    plain = next(run for run in runs.values() if tables.arm(run) == "grpo" and run.seed == published.seed)
    for name in ("reward_mean", "entropy_mean", "grad_norm", "update_norm"):
        pairs = zip(published.steps[name], plain.steps[name], strict=True)
        assert next((step for step, (ours, theirs) in enumerate(pairs, 1) if ours != theirs), 999) > 78
    assert (published.steps["weight_max"].iloc[:74] == 1).all() and 1.01 < published.steps["weight_max"].max() < 1.014


def test_tables_are_remade_to_the_letter(runs):
    frame = tables.values(runs)
    made = tables.text(frame, tables.contrasts(frame), pd.read_csv(DATA / "full_runs.csv"))
    assert (RESULTS / "tables.md").read_text("utf-8") == made


def test_the_supplement_measures_the_declared_runs_more_densely(runs):
    """The same values, to the last bit, wherever both the declared runs and those of the supplement measured."""
    full = pd.read_csv(DATA / "full_runs.csv")
    compared = 0
    for run in runs.values():
        own = full[(full["arm"] == tables.arm(run)) & (full["seed"] == run.seed)]
        for quantity, place in tables.CURVES.items():
            more = own[own["quantity"] == quantity].set_index("step")["value"]
            if len(more):
                assert len(more) == 11
                kept = tables.sharpness_curve(run, *place)
                assert list(kept) == list(more[kept.index])
                compared += len(kept)
        accuracy = own[own["quantity"] == "held-out accuracy [%]"].set_index("step")["value"]
        if len(accuracy):
            assert list(accuracy.index) == [0, 40, 80, 120, 160]
            assert accuracy[160] == tables.evaluated("heldout")(run) and accuracy[0] == tables.evaluated("heldout", 0)(
                run
            )
    assert compared >= 3 * 3 * 2 * 3  # arms × quantities × seeds × steps


def test_verdicts_are_remade(tmp_path):
    done = CliRunner().invoke(
        app, ["claims", str(DATA / "runs"), "--study", str(STUDY / "study.yaml"), "--out", str(tmp_path)]
    )
    assert done.exit_code == 0, done.output
    made, kept = (json.loads((folder / "claims.json").read_text("utf-8")) for folder in (tmp_path, RESULTS))
    for mine, theirs in zip(made, kept, strict=True):
        for version in (mine, mine.get("beside")):
            other = theirs if version is mine else theirs["beside"]
            if version is not None:
                assert (version["verdict"], version["n"]) == (other["verdict"], other["n"])
                assert version["p_value"] == pytest.approx(other["p_value"], abs=1e-6)


def test_every_number_of_the_training_results_is_from_the_data():
    """Rows of tables are quoted to the letter; a number in a sentence stands in `tables.md`, or is one of the design's."""
    text = (STUDY / "RESULTS.md").read_text("utf-8")
    for name in ("tables.md", "claims.md"):
        rows = [line for line in (RESULTS / name).read_text("utf-8").splitlines() if line.startswith("|")]
        assert len(rows) > 3 and all(row in text for row in rows), name
    prose = "\n".join(re.findall(r"<!-- training: begin -->(.*?)<!-- training: end -->", text, re.DOTALL))
    assert len(prose) > 2000
    prose = "\n".join(line for line in prose.splitlines() if not line.startswith(("|", "    ")))
    prose = re.sub(r"\s+", " ", prose)
    facts = [
        line.split(": ", 1)[1]
        for line in (RESULTS / "tables.md").read_text("utf-8").splitlines()
        if line.startswith("- ")
    ]
    for fact in sorted(facts, key=len, reverse=True):
        prose = prose.replace(fact, "")
    assert not re.findall(r"[+−-]?\d+\.\d+", prose)
    assert set(re.findall(r"[+−-]?\d+(?= ?(?:%|points|nats|°))", prose)) <= DESIGN


@pytest.mark.parametrize("page", ["README.md", "docs/study.md"])
def test_pages_quote_the_results(page):
    """Each page names difference and interval without signs, as `3.7 points below plain GRPO (2.8 to 4.6)`."""
    text = re.sub(r"\s+", " ", (ROOT / page).read_text("utf-8"))
    lines = (RESULTS / "tables.md").read_text("utf-8").splitlines()
    facts = dict(line[2:].split(": ", 1) for line in lines if line.startswith("- "))
    for key in (
        "mass 4 less grpo, held-out accuracy [%]",
        "mass 4 less reversed, held-out accuracy [%]",
        "mass 4 less grpo, sharpness of expected failure (SAM)",
    ):
        mean, *ends = re.findall(r"\d+\.\d+", facts[key])
        low, high = sorted(ends, key=float)
        assert re.search(rf"\b{mean} (?:points|%) [^()]*\({low} to {high}\)", text), key
    assert facts["mass 4, entropy, last 20 steps [nats]"] in text


def test_every_decided_claim_has_a_panel_in_the_figure_of_claims():
    kept = json.loads((RESULTS / "claims.json").read_text("utf-8"))
    decided = [one for both in kept for one in (both, both["beside"]) if one and one["verdict"] != "untestable"]
    text = (STUDY / "RESULTS.md").read_text("utf-8")
    caption = text[text.index("](results/claims.png)") :].split("\n\n")[1]
    assert len(decided) > 10 and all(re.search(rf"\b{one['claim']}\b", caption) for one in decided)


def test_kinds_of_answers():
    right, wrong = "<think>3 + 4 = 7; 7 * 2 = 14</think><answer>14</answer>", "<think>3 + 4 = 8; 8 * 2 = 16</think>"
    assert tables.kind(right, True, False) == "correct"
    assert tables.kind(right, False, False) == "right steps, wrong answer"
    assert tables.kind(f"{wrong}<answer>16</answer>", False, False) == "miscalculated step"
    assert tables.kind(f"{wrong}; <answer>16</answer>", False, False) == "malformed"
    assert tables.kind(wrong, False, True) == "cut"


DESIGN = {"2", "5", "10", "95"}
"""Margins, level and least rotation, as declared."""
