"""Correlation of two numbers per cluster: a permutation test of none, and a test of being below a given size."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

PERMUTATIONS = 9_999


@dataclass(frozen=True)
class Correlation:
    """Pearson's correlation r of n pairs.

    Attributes:
        value: r; NaN where one side does not vary or n < 3.
        p_value: two-sided, the share of permutations of one side with |r| at least as large, the one seen counted in.
        n: number of pairs.
    """

    value: float
    p_value: float
    n: int

    def p_below(self, size: float) -> float:
        """p-value of "r ≥ size" against less (Fisher's z, standard error 1/√(n − 3)); 1 where it cannot be tested."""
        if self.n <= 3 or not math.isfinite(self.value):
            return 1.0
        z = math.atanh(min(max(self.value, -0.999999), 0.999999)) - math.atanh(size)
        return float(ndtr(z * math.sqrt(self.n - 3)))


def correlation(x: NDArray[np.floating], y: NDArray[np.floating], seed: int = 0) -> Correlation:
    """Correlation of x (n,) and y (n,), one value of each per cluster."""
    a, b = (np.asarray(values, dtype=np.float64) - np.mean(values) for values in (x, y))
    n, scale = len(a), float(np.linalg.norm(a) * np.linalg.norm(b))
    if n < 3 or not scale > 0:
        return Correlation(math.nan, 1.0, n)
    orders = np.argsort(np.random.default_rng([seed, n]).random((PERMUTATIONS, n)), axis=1)
    drawn, seen = a[orders] @ b / scale, float(a @ b / scale)
    hits = int(np.sum(np.abs(drawn) >= abs(seen) - 1e-12))
    return Correlation(seen, (1 + hits) / (1 + PERMUTATIONS), n)
