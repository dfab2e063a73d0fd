"""The tables of counterfactual updates equal what the kept data give."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from experiments.benchmarks import forks_report
from experiments.benchmarks.forks import ARMS, FEWER, SHARPER, settings, sharpness_settings
from sharpscope.config import ForkSpec, arm_name


@pytest.fixture(scope="module")
def runs():
    return forks_report.found(forks_report.ROOT / forks_report.DATA)


@pytest.mark.parametrize(("page", "made"), [(forks_report.PAGE, "tables"), (forks_report.STUDY, "study")])
def test_the_quoted_tables_are_those_of_the_data(runs, page, made):
    text = (forks_report.ROOT / page).read_text("utf-8")
    assert forks_report.placed(text, getattr(forks_report, made)(runs)) == text


def test_a_cell_is_the_interval_of_paired_batches(runs):
    run = runs["math"]
    rows = forks_report.forked(run, settings("math"), "heldout_failure")
    rows = rows[(rows["step"] == 0) & (rows["comparison"] == "kl") & rows["valid"]]
    change = (rows["value"] - rows["start"]).groupby([rows["arm"], rows["batch"]]).first().unstack(0)
    difference = 100 * (change["mass 4"] - change["mass 4 reversed"])
    ends = stats.ttest_1samp(difference, 0).confidence_interval()
    start = "| C10 | mass 4 − mass 4 reversed | Mathematics | "
    text = (forks_report.ROOT / forks_report.STUDY).read_text("utf-8")
    (line,) = [line for line in text.splitlines() if line.startswith(start)]
    cells = line.removeprefix(start).split(" | ")
    assert cells[0].startswith(f"{len(difference)} / ")
    assert cells[1].rstrip("*") == f"{difference.mean():+.2f} [{ends.low:+.2f}, {ends.high:+.2f}]"


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
    for chosen in (settings("math"), settings("knights_knaves"), sharpness_settings()):
        assert ForkSpec(**chosen).methods[0] == "grpo"
