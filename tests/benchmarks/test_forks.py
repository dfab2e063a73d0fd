"""The tables of counterfactual updates equal what the kept data give."""

from __future__ import annotations

import math
import re

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from experiments.benchmarks import forks_report
from experiments.benchmarks.forks import (
    ARMS,
    FEWER,
    POLICIES,
    SHARPER,
    configured,
    run_name,
    settings,
    sharpness_settings,
    states,
)
from sharpscope.config import ForkSpec, arm_name
from sharpscope.traces import load_runs


@pytest.fixture(scope="module")
def runs():
    return forks_report.found(forks_report.ROOT / forks_report.DATA)


@pytest.mark.parametrize(("page", "made"), [(forks_report.PAGE, "tables"), (forks_report.STUDY, "study")])
def test_the_quoted_tables_are_those_of_the_data(runs, page, made):
    text = (forks_report.ROOT / page).read_text("utf-8")
    assert forks_report.placed(text, getattr(forks_report, made)(runs)) == text


@pytest.mark.parametrize("page", [forks_report.PAGE, forks_report.STUDY])
def test_intervals_quoted_in_the_text_are_cells(page):
    """An effect in a sentence has the digits of a cell; its sign is in the words."""
    before, rest = (forks_report.ROOT / page).read_text("utf-8").split(forks_report.BEGIN)
    interval = re.compile(r"[+-]?(\d+\.\d+) \[([+-]?\d+\.\d+), ([+-]?\d+\.\d+)\]")
    cells = {(mean, *sorted(end.strip("+-") for end in ends)) for mean, *ends in interval.findall(rest)}
    quoted = [(mean, *sorted(end.strip("+-") for end in ends)) for mean, *ends in interval.findall(before)]
    assert len(quoted) >= 3 and set(quoted) <= cells


def test_cells_are_intervals_over_batches_and_over_states(runs):
    rows = forks_report.forked(runs["math"], settings("math"), "heldout_failure")
    rows = rows[(rows["comparison"] == "kl") & rows["valid"]]
    change = (rows["value"] - rows["start"]).groupby([rows["arm"], rows["run"], rows["step"], rows["batch"]]).first()
    change = change.unstack(0)
    difference = 100 * (change["mass 4"] - change["mass 4 reversed"]).dropna()
    text = (forks_report.ROOT / forks_report.STUDY).read_text("utf-8")
    start = "| C10 | mass 4 − mass 4 reversed | Mathematics | "
    (line,) = [line for line in text.splitlines() if line.startswith(start)]
    counts, first, *_, every, count = line.removeprefix(start).removesuffix(" |").split(" | ")
    batches, means = difference["math", 0], difference.groupby(level=[0, 1]).mean()
    assert counts.startswith(f"{len(batches)} / ") and int(count) == len(means)
    for cell, sample in ((first, batches), (every, means)):
        ends = stats.ttest_1samp(sample, 0).confidence_interval()
        assert cell.rstrip("*") == f"{sample.mean():+.2f} [{ends.low:+.2f}, {ends.high:+.2f}]"


def test_forks_of_a_state_draw_the_same_batches(runs):
    """The reference's rows are equal in all forks of a run, so that arms of several forks can be compared."""
    compared = 0
    for own in runs.values():
        for run in own:
            rows = run.forks[(run.forks["arm"] == "grpo") & run.forks["outcome"].isin(["heldout_failure", "kl"])]
            values = rows.groupby(["step", "batch", "comparison", "outcome"])["value"].agg(["nunique", "size"])
            assert (values["nunique"] == 1).all()
            compared += int((values["size"] > 1).sum())
    assert compared > 50


def test_runs_have_the_settings_that_make_them(runs):
    for policy, own in runs.items():
        for run in own:
            config = configured(policy, {"seed": run.seed}).model_dump(mode="json")
            for part in ("steps", "seed", "task", "policy", "rollout", "update", "optimizer"):
                assert run.config[part] == config[part], (run.name, part)
            assert run.method == "grpo"


def test_runs_on_arithmetic_are_those_of_the_second_study(runs):
    kept = load_runs(forks_report.ROOT / forks_report.DATA.parent / "runs")
    for run in runs["arithmetic"]:
        for name in ("reward_mean", "grad_norm", "update_norm"):
            assert run.steps[name].tolist() == kept[f"grpo-s{run.seed}"].steps[name].tolist()


def test_only_seed_0_is_forked_at_the_start(runs):
    for policy, own in runs.items():
        for run in own:
            assert run.name == run_name(policy, run.seed)
            assert set(run.forks["step"]) <= set(states(policy, run.seed))


def test_holm_multiplies_the_smallest_p_by_the_number_of_tests():
    random = np.random.default_rng(0)
    for size in (1, 2, 7):
        p = random.uniform(0, 0.2, size)
        expected = []
        for one in p:
            smaller = [min(1.0, other * sum(p >= other)) for other in p if other <= one]
            expected.append(max(smaller))
        assert forks_report.holm(p) == pytest.approx(expected)


def test_ratios_of_an_outcome_are_paired_and_leave_out_what_is_not_positive():
    pairs = [(2.0, 1.0), (6.0, 2.0), (-1.0, 1.0)]
    rows = pd.DataFrame(
        [{"batch": batch, "arm": "ab"[k], "value": pairs[batch][k]} for batch in range(3) for k in range(2)]
    )
    rows = rows.assign(fork="f", step=0, reference="b", comparison="kl", outcome="sam_sharpness")
    rows = rows.assign(start=1.0, predicted=None, valid=True)
    row, count = forks_report._ratio(rows, "a", "b", "sam_sharpness", "kl")
    assert count == 2 and row["difference"] == pytest.approx(50 * (math.log(2) + math.log(3)))


def test_the_settings_are_forks():
    assert {*FEWER, *SHARPER} <= {arm_name(arm) for arm in ARMS}
    for policy in POLICIES:
        arms = [arm_name(arm) for chosen in settings(policy) for arm in ForkSpec(**chosen).methods]
        assert {*arms} == {arm_name(arm) for arm in ARMS} and arms[0] == "grpo"
    assert ForkSpec(**sharpness_settings()).methods[0] == "grpo"
