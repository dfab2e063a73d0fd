"""Tests by permutation: sign flips of a mean over clusters, correlation, and Kendall's τ over a grid of settings.

The sign-flip test asks whether values that are symmetric about `shift` would have a mean as far from it as the one seen. Paired
differences of two methods with the same distribution are symmetric about 0 whatever that distribution is, so the test is
exact for them at any number of pairs, with heavy tails too (Fisher 1935; Pitman 1937). It is not exact where a method rarely
collapses: then the differences are not symmetric, and the median and the worst pair say more.
"""

from __future__ import annotations

import functools
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Alternative = Literal["two-sided", "greater", "less"]

EXACT_UP_TO = 14
"""Clusters up to which all 2^n sign patterns are counted; beyond, DRAWS random ones and the pattern seen."""
DRAWS = 9_999


def sign_flip_p(values: NDArray[np.floating], alternative: Alternative = "two-sided", shift: float = 0.0) -> float:
    """p-value of "the values are symmetric about `shift`" against a mean above, below or away from it.

    Args:
        values: (n,) one number per cluster, n ≥ 1, finite.
        alternative: `greater`: the mean is above `shift`.
        shift: center under the null hypothesis.

    Returns:
        Share of sign patterns at least as extreme, the one seen counted in: in (0, 1], never below
        `smallest_sign_flip_p`.

    Raises:
        ValueError: no values, or not finite.
    """
    centered = _checked(values) - shift
    n = len(centered)
    signs = _patterns(n) if n <= EXACT_UP_TO else _draws(n)
    sums = signs @ centered
    seen = centered.sum()
    # a sum that differs from the one seen by rounding alone is the same
    slack = 1e-12 * np.abs(centered).sum()
    if alternative == "greater":
        extreme = sums >= seen - slack
    elif alternative == "less":
        extreme = sums <= seen + slack
    else:
        extreme = np.abs(sums) >= abs(seen) - slack
    return float(np.mean(extreme)) if n <= EXACT_UP_TO else float((1 + np.sum(extreme)) / (1 + len(signs)))


def smallest_sign_flip_p(n: int, alternative: Alternative = "two-sided") -> float:
    """The smallest p that `sign_flip_p` can give with n clusters; 1 with none."""
    if n < 1:
        return 1.0
    sides = 2 if alternative == "two-sided" else 1
    return min(1.0, sides * 0.5**n) if n <= EXACT_UP_TO else max(sides * 0.5**n, 1 / (1 + DRAWS))


def sign_flip_interval(
    values: NDArray[np.floating], weight: NDArray[np.floating] | None = None
) -> tuple[float, float] | None:
    """The means that a two-sided sign-flip test at 5 % does not reject; None if it can reject none.

    For n ≤ EXACT_UP_TO values: the means of all non-empty subsets cut the line into 2^n pieces that a symmetric
    distribution's center falls into with equal chance (Hartigan 1969). With `weight` (n,) ≥ 0: the ratios Σ values/Σ weight.
    """
    data = _checked(values)
    n = len(data)
    if n > EXACT_UP_TO:
        raise ValueError(f"{n} values: sign_flip_interval counts all subsets of at most {EXACT_UP_TO}")
    outside = int(0.025 * 2**n + 1e-9)  # pieces left out on each side
    if outside < 1:
        return None
    chosen = (_patterns(n)[1:] + 1) / 2  # (2^n − 1, n) members of each non-empty subset
    means = np.sort(chosen @ data / np.maximum(chosen @ (np.ones(n) if weight is None else weight), 1e-300))
    return float(means[outside - 1]), float(means[-outside])


def _checked(values: NDArray[np.floating]) -> NDArray[np.float64]:
    data = np.asarray(values, dtype=np.float64)
    if data.ndim != 1 or not len(data) or not np.isfinite(data).all():
        raise ValueError(f"sign flips need at least one value, all finite; got shape {data.shape}")
    return data


@functools.lru_cache(maxsize=32)
def _patterns(n: int) -> NDArray[np.float64]:
    """(2^n, n) all sign patterns, ±1; the first is all −1."""
    return np.asarray(((np.arange(2**n)[:, None] >> np.arange(n)) & 1) * 2.0 - 1.0, dtype=np.float64)


@functools.lru_cache(maxsize=8)
def _draws(n: int) -> NDArray[np.float64]:
    """(DRAWS, n) random sign patterns."""
    return np.asarray(np.random.default_rng([0, n]).integers(0, 2, (DRAWS, n)) * 2.0 - 1.0, dtype=np.float64)
