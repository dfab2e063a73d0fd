"""C5: the sharpness bound against a constant, and its correlation with the gap."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import scipy.stats

from sharpscope.analysis.claims import c05_bound
from sharpscope.analysis.statistics import correlation
from tests.analysis.claims.frames import study
from tests.analysis.claims.planted import bound
from tests.analysis.claims.verdicts import made, verdict


def permuted(runs, rng):
    """The same runs with the sharpness of another run each."""
    every = list(runs.by_name.values())
    order = rng.permutation(len(every))
    for run, other in zip(every, [(every[key].probes, every[key].probe_prompts) for key in order], strict=True):
        run.probes, run.probe_prompts = other
    return study(*every)


def test_sharpness_that_belongs_to_other_runs_supports_nothing():
    """The bound still holds with any run's sharpness, if only the radius is large: that must not be called support."""
    assert verdict(made("C5", "effect"), "C5").verdict == "supported"
    rng = np.random.default_rng(0)
    result = [verdict(permuted(made("C5", "effect"), rng), "C5").verdict for _ in range(8)]
    assert "supported" not in result


def test_a_gap_of_sampling_noise_is_untestable():
    runs = bound("effect", np.random.default_rng(0), 12, "normal")
    for run in runs.by_name.values():
        run.eval["n"] = 60
    result = verdict(runs, "C5")
    assert result.verdict == "untestable" and "reliability" in result.reason and "answers" in result.reason


def test_the_radius_is_the_smallest_that_holds_on_the_calibration_seeds():
    rows = [
        {"run": name, "rho": rho, "fixing": value, "heldout": 0.3 + gap, "train": 0.3}
        for name, gap, slope in (("a", 0.1, 1.0), ("b", 0.1, 0.5))
        for rho, value in ((0.05, 0.05 * slope), (0.4, 0.4 * slope))
    ]
    rho, result = c05_bound.fixed_radius(pd.DataFrame(rows))
    assert result and rho == pytest.approx(0.2, abs=0.41 / c05_bound.GRID)
    assert not c05_bound.fixed_radius(pd.DataFrame(rows).assign(heldout=0.9))[1]


def test_values_between_radii_are_linear():
    base = {"run": "a", "step": 1, "train": 0.2, "heldout": 0.3}
    rows = [
        base | {"rho": r, "sharpness": s, "fixing": s, "testing": s / 2, "first_order": 2 * s, "average": 0.0}
        for r, s in ((0.1, 0.1), (0.3, 0.2))
    ]
    frame = pd.DataFrame(rows).assign(bound=0.0)
    for rho, expected in ((0.05, 0.05), (0.1, 0.1), (0.2, 0.15)):
        (row,) = c05_bound.at_radius(frame, rho).to_dict("records")
        assert row["sharpness"] == pytest.approx(expected) and row["first_order"] == pytest.approx(2 * expected)
        assert row["bound"] == pytest.approx(0.2 + expected / 2)


def test_the_radius_is_fixed_on_other_prompts_than_it_is_tested_on():
    """Prompts with even index say 0.9 of the estimate, those with odd index 1.1 of it."""
    runs = made("C5", "effect")
    for run in runs.by_name.values():
        even = run.probe_prompts["prompt"] % 2 == 0
        run.probe_prompts["value"] *= np.where(even, 0.9, 1.1)
    frame = verdict(runs, "C5").frames["bound"]
    probed = frame[frame["rho"] == 0.1]
    assert probed["fixing"].to_numpy() == pytest.approx(0.9 * probed["sharpness"].to_numpy())
    assert probed["testing"].to_numpy() == pytest.approx(1.1 * probed["sharpness"].to_numpy())
    calibration = frame[~frame["tested"] & ~np.isclose(frame["rho"], frame["fixed_rho"])]
    assert frame["fixed_rho"].iloc[0] == c05_bound.fixed_radius(calibration)[0]
    assert (frame["bound"] - frame["train"]).to_numpy() == pytest.approx(frame["testing"].to_numpy())


def test_without_values_by_prompt_the_bound_is_untestable():
    runs = made("C5", "effect")
    runs.by_name["grpo-3"].probe_prompts = pd.DataFrame()
    result = verdict(runs, "C5")
    assert result.verdict == "untestable"
    assert (
        "1 of 12 runs, such as grpo-3, have no values by prompt" in result.reason and "probe_prompts" in result.reason
    )


def test_the_constant_is_the_largest_gap_of_the_calibration_seeds():
    result = verdict(made("C5", "effect"), "C5")
    frame = result.frames["bound"]
    calibration = frame[~frame["tested"]]
    constant = next(other.value for other in result.others if other.name == "the constant")
    assert constant == pytest.approx((calibration["heldout"] - calibration["train"]).max())


def test_correlation_equals_scipy_and_its_permutation_p_is_uniform():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, 12))
    seen = correlation(x, y)
    assert seen.value == pytest.approx(scipy.stats.pearsonr(x, y).statistic)
    assert seen.p_value == pytest.approx(scipy.stats.pearsonr(x, y).pvalue, abs=0.03)
    drawn = [correlation(*rng.normal(size=(2, 8))).p_value for _ in range(200)]
    assert scipy.stats.kstest(drawn, "uniform").pvalue > 0.01
    # at the size tested, the test of being below it keeps its level
    low = 0
    for _ in range(400):
        common = rng.normal(size=20)
        a, b = 0.3**0.5 * common + 0.7**0.5 * rng.normal(size=(2, 20))
        low += correlation(a, b).p_below(0.3) <= 0.05
    assert low <= 32  # 5 % and three standard errors
    assert np.isnan(correlation(np.ones(5), x[:5]).value) and correlation(x[:3], y[:3]).p_below(0.3) == 1.0
