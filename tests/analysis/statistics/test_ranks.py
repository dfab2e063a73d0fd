"""Ranks and Kendall coefficients by hand and against scipy."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import scipy.stats

from sharpscope.analysis.statistics import (
    granulated_kendall,
    kendall,
    weighted_ranks,
)


def test_ranks_by_hand_and_against_scipy():
    x, y = np.random.default_rng(5).normal(size=(2, 12))
    assert kendall(x, y) == pytest.approx(scipy.stats.kendalltau(x, y).statistic)
    assert weighted_ranks(x, np.ones(12)) * 12 == pytest.approx(scipy.stats.rankdata(x) - 0.5)
    assert weighted_ranks(np.array([2.0, 1.0, 2.0]), np.array([1.0, 2.0, 1.0])) == pytest.approx([0.75, 0.25, 0.75])


def test_granulated_kendall_equals_its_definition():
    rng = np.random.default_rng(6)
    cells = list(itertools.product([0, 1, 2], [0, 1], [7, 8]))  # a, b, stratum
    x, y = rng.normal(size=(2, len(cells)))
    a, b, s = (list(column) for column in zip(*cells, strict=True))

    def psi(axis, other):
        taus = []
        for key in sorted(set(zip(other, s, strict=True))):
            rows = [i for i in range(len(cells)) if (other[i], s[i]) == key]
            pairs = [np.sign(x[i] - x[j]) * np.sign(y[i] - y[j]) for i, j in itertools.combinations(rows, 2)]
            taus.append(np.mean(pairs))
        return np.mean(taus)

    result = granulated_kendall(x, y, {"a": a, "b": b}, s)
    assert result.axes == pytest.approx({"a": psi(a, b), "b": psi(b, a)})
    assert result.value == pytest.approx(np.mean([psi(a, b), psi(b, a)]))
    assert granulated_kendall(x, x, {"a": a, "b": b}, s).p_value == pytest.approx(result.smallest_p, abs=1e-3)
    # a monotone effect of the stratum on both is no association
    shifted = granulated_kendall(x + 100 * np.array(s), y + 100 * np.array(s), {"a": a, "b": b}, s)
    assert shifted.value == pytest.approx(result.value)
    assert granulated_kendall(x[:2], y[:2], {"a": [1, 1]}, [1, 1]) is None
