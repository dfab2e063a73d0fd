"""Slopes within clusters against least squares, and the coverage of their intervals."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats

from sharpscope.analysis.statistics import (
    ClusterSlope,
    cluster_moments,
)
from tests.analysis.statistics.test_intervals import slope_clusters


def test_cluster_slope_equals_least_squares_with_a_mean_for_each_cluster():
    rng = np.random.default_rng(4)
    clusters = []
    for _ in range(9):
        x, z, w = rng.normal(size=20), rng.normal(size=20), rng.uniform(0.5, 2, 20)
        clusters.append((0.7 * x - 0.4 * z + 3 * rng.normal() + rng.normal(size=20), x, z, w))
    slope = ClusterSlope(np.array([cluster_moments(y, x, [z], w) for y, x, z, w in clusters]))
    dummies = np.kron(np.eye(9), np.ones((20, 1)))
    y, x, z = (np.concatenate([c[i] for c in clusters]) for i in range(3))
    # weights sum to the number of rows in each cluster
    w = np.sqrt(np.concatenate([c[3] * 20 / c[3].sum() for c in clusters]))
    design = np.column_stack([x, z, dummies])
    expected = np.linalg.lstsq(design * w[:, None], y * w, rcond=None)[0][0]
    assert slope.value == pytest.approx(expected, rel=1e-9)
    interval = slope.interval()
    assert interval.kind == "sign-flip" and interval.low < expected < interval.high
    assert slope.p(interval.low - 1e-6) <= 0.05 < slope.p(interval.low + 1e-6)
    many = ClusterSlope(np.concatenate([slope.moments] * 2))
    assert many.interval().kind == "bca"


def test_slope_test_keeps_its_level_and_its_interval_covers():
    rng = np.random.default_rng(7)
    studies = [slope_clusters(rng, 10) for _ in range(200)]
    rejected = sum(s.p(0.0) <= 0.05 for s in studies)
    assert scipy.stats.binomtest(rejected, 200, 0.05, alternative="greater").pvalue > 0.01
    held = sum(s.interval().low <= 0 <= s.interval().high for s in studies)
    assert held >= scipy.stats.binom.ppf(0.001, 200, 0.94)
