"""Sign-flip tests and rank correlations against counting and scipy, and their level."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import scipy.stats

from sharpscope.analysis.statistics import (
    sign_flip_p,
    smallest_sign_flip_p,
    weighted_ranks,
)
from sharpscope.analysis.statistics.permutation import sign_flip_interval
from tests.analysis.statistics.test_intervals import NOISE


def test_sign_flip_p_counts_every_pattern():
    values = np.random.default_rng(0).normal(0.4, 1, 7)
    sums = [np.dot(signs, values - 0.1) for signs in itertools.product([-1, 1], repeat=7)]
    seen = np.sum(values - 0.1)
    assert sign_flip_p(values, shift=0.1) == np.mean(np.abs(sums) >= abs(seen) - 1e-12)
    assert sign_flip_p(values, "greater", shift=0.1) == np.mean(np.array(sums) >= seen - 1e-12)
    assert sign_flip_p(values, "less", shift=0.1) == np.mean(np.array(sums) <= seen + 1e-12)


def test_sign_flip_p_agrees_with_scipy_where_patterns_are_drawn():
    values = np.random.default_rng(1).normal(0.3, 1, 20)
    ours = sign_flip_p(values)
    theirs = scipy.stats.permutation_test(
        (values,),
        lambda x, axis: x.mean(axis),
        permutation_type="samples",
        n_resamples=20_000,
        rng=np.random.default_rng(0),
        vectorized=True,
    ).pvalue
    assert ours == pytest.approx(theirs, abs=0.02)


@pytest.mark.parametrize("n", [1, 2, 5, 6, 14, 30])
@pytest.mark.parametrize("side", ["two-sided", "greater"])
def test_no_p_is_below_the_smallest(n, side):
    values = np.arange(1.0, n + 1)
    assert sign_flip_p(values, side) == smallest_sign_flip_p(n, side)


def test_the_sign_flip_interval_holds_what_the_test_does_not_reject():
    values = np.random.default_rng(2).standard_t(3, 8)
    low, high = sign_flip_interval(values)
    inside = [sign_flip_p(values, shift=m) > 0.05 for m in np.linspace(low + 1e-6, high - 1e-6, 41)]
    outside = [sign_flip_p(values, shift=m) <= 0.05 for m in (low - 1e-6, high + 1e-6)]
    assert all(inside) and all(outside)
    assert sign_flip_interval(values[:5]) is None
    with pytest.raises(ValueError, match="finite"):
        sign_flip_p(np.array([1.0, np.nan]))


@pytest.mark.parametrize("name", ["normal", "heavy tails (t, 3 degrees)"])
@pytest.mark.parametrize("n", [7, 10, 20])
def test_200_null_studies_are_called_effects_no_more_often_than_the_level_allows(name, n):
    rng = np.random.default_rng(n)
    draw = NOISE[name][0]
    rejected = sum(sign_flip_p(draw(rng, n)) <= 0.05 for _ in range(200))
    assert scipy.stats.binomtest(rejected, 200, 0.05, alternative="greater").pvalue > 0.01


def test_ranks_by_hand_and_against_scipy():
    x = np.random.default_rng(5).normal(size=12)
    assert weighted_ranks(x, np.ones(12)) * 12 == pytest.approx(scipy.stats.rankdata(x) - 0.5)
    assert weighted_ranks(np.array([2.0, 1.0, 2.0]), np.array([1.0, 2.0, 1.0])) == pytest.approx([0.75, 0.25, 0.75])
