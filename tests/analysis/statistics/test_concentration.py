"""Shares of the largest values by hand."""

from __future__ import annotations

import numpy as np
import pytest

from sharpscope.analysis.statistics import (
    gini,
    lorenz,
    top_share,
)


def test_concentration_by_hand():
    assert gini(np.ones(5)) == pytest.approx(0)
    assert gini(np.array([0, 0, 0, 1.0])) == pytest.approx(0.75)
    assert np.isnan(gini(np.zeros(3)))
    assert top_share(np.arange(1.0, 11), 0.2) == pytest.approx(19 / 55)
    assert lorenz(np.array([1.0, 3.0]), points=3) == pytest.approx([0, 0.25, 1])


def test_a_weight_counts_members():
    rng = np.random.default_rng(0)
    values, weights = rng.exponential(size=40), rng.integers(1, 5, 40)
    repeated = np.repeat(values, weights)
    np.testing.assert_allclose(lorenz(values, weights=weights), lorenz(repeated), atol=1e-12)
    assert gini(values, weights) == pytest.approx(gini(repeated), abs=1e-12)
    largest = np.argsort(values)[-7:]  # a share that ends with a member
    share = weights[largest].sum() / weights.sum()
    assert top_share(values, share, weights) == pytest.approx(top_share(repeated, share), abs=1e-12)
    ones = np.ones(40)
    assert top_share(values, 0.1, ones) == pytest.approx(top_share(values, 0.1))
    assert np.isnan(top_share(np.zeros(3), 0.1, np.ones(3))) and np.isnan(gini(np.zeros(3)))
