"""Reliability of two measurements against simulated measures of known reliability."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest

from experiments.benchmarks.reliability import halves, lengthened


@pytest.mark.parametrize("noise", [0.3, 1.0, 2.0])
def test_arms_that_differ_make_no_measure_reliable_within_arms(noise):
    """Of policies with true values N(0, 1) in an arm, measured with noise, the two halves correlate by 1/(1 + noise²)."""
    rng = np.random.default_rng(0)
    arms = pd.Series(np.repeat(np.arange(60), 12))
    truth = rng.normal(size=720) + 3.0 * arms
    first, second = (pd.Series(np.exp(0.1 * (truth + noise * rng.normal(size=720)))) for _ in range(2))
    everywhere, inside = halves(first, second, arms)
    assert inside == pytest.approx(1 / (1 + noise**2), abs=0.07) and everywhere > 0.99
    full, times = lengthened(inside)
    assert full == pytest.approx(1 / (1 + noise**2 / 2), abs=0.07)
    assert times * full / (1 + (times - 1) * full) == pytest.approx(0.9)  # Spearman and Brown give the target back
    assert math.isnan(lengthened(-0.1)[0]) and lengthened(-0.1)[1] == math.inf
