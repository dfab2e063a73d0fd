"""Split-half reliability against simulated measures of known reliability."""

from __future__ import annotations

import math

import numpy as np
import pytest

from experiments.benchmarks.reliability import split_half


@pytest.mark.parametrize("noise", [0.5, 3.0, 12.0])
def test_split_half_is_the_correlation_of_independent_halves(noise):
    """Runs with true values N(0, 1) and prompts with noise: the correlation of means over n/2 prompts is 1/(1 + 2 noise²/n)."""
    rng = np.random.default_rng(0)
    runs, prompts = 400, 32
    values = rng.normal(size=(runs, 1)) + noise * rng.normal(size=(runs, prompts))
    found = split_half(values, splits=40)
    pearson = 1 / (1 + noise**2 / (prompts / 2))
    spearman = 6 / math.pi * math.asin(pearson / 2)  # of a normal pair
    assert found.half == pytest.approx(spearman, abs=0.03)
    assert found.full == pytest.approx(2 * found.half / (1 + found.half)) and (found.runs, found.prompts) == (400, 32)
    # Spearman and Brown at the prompts needed give the target back.
    n = found.prompts_for(0.9) / found.prompts
    assert n * found.full / (1 + (n - 1) * found.full) == pytest.approx(0.9)


def test_nothing_is_said_where_it_cannot_be():
    assert math.isnan(split_half(np.ones((2, 8))).half) and math.isnan(split_half(np.ones((5, 8))).half)
    assert math.isnan(split_half(np.random.default_rng(0).normal(size=(5, 3))).half)
    assert math.isnan(split_half(np.full((5, 8), np.nan)).full)
    assert split_half(-np.eye(6)).prompts_for(0.9) > 0
