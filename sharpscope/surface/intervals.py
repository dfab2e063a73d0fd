"""Intervals over prompts for where the mean of a loss along a line crosses its start."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from torch import Tensor

REACH = (2.0**-12, 2.0**8)
"""Step sizes searched for an end of an interval, in units of the crossing; behind them the end is 0 or infinite."""
POINTS = 4001  # of these, 0.35 % apart
EVEN = 1e-100  # least variance, so that prompts that all agree have a large score and not 0/0


def crossing_interval(by_prompt: Mapping[float, Tensor], crossing: float) -> tuple[float, float]:
    """The 95 % interval over prompts of the η at which the mean rise L(θ − η·Δ) − L(θ) becomes positive, with Δ fixed.

    The test of a mean is inverted: the interval begins where the rise is no longer shown to be negative and ends where it is shown to
    be positive; of a quadratic loss this is Fieller's interval. It is not symmetric, and 0 and ∞ are ends where no η is too small or too
    large. Quotients (L_i(θ − η·Δ) − L_i(θ))/η of each prompt, linear in η for a quadratic loss,
    are interpolated between the η tried, and extrapolated linearly beyond.

    Args:
        by_prompt: one value of the loss for each prompt, (k,), at 0 and the η tried.
        crossing: the η found; ends are searched within `REACH` of it.

    Returns:
        Both ends; NaN for fewer than two prompts or two η.
    """
    from scipy.interpolate import interp1d
    from scipy.stats import t

    start = by_prompt.get(0.0)
    tried = sorted(eta for eta, each in by_prompt.items() if eta and bool(each.isfinite().all()))
    if start is None or len(start) < 2 or len(tried) < 2:
        return math.nan, math.nan
    quotients = [((by_prompt[eta] - start) / eta).numpy() for eta in tried]
    etas = crossing * np.geomspace(*REACH, POINTS)
    line = interp1d(tried, quotients, axis=0, fill_value="extrapolate")
    scores = np.maximum.accumulate(mean_score(line(etas)))
    bound = float(t.ppf(0.975, len(start) - 1))
    low, high = np.searchsorted(scores, [-bound, bound])
    ends = [0.0, *etas[1:].tolist(), math.inf]
    return ends[low], ends[high]


def mean_score(values: np.ndarray) -> np.ndarray:
    """Student's t of the mean of each row of (m, k), with Hall's correction for skewness, which keeps its order; (m,).

    For S = mean/s and skewness g it is √k·(S + g·S²/3 + g²·S³/27 + g/6k) (Hall 1992, J. R. Stat. Soc. B 54:221).
    """
    count, mean = values.shape[1], values.mean(1)
    variance = np.maximum(values.var(1, ddof=1), EVEN)
    skewness = ((values - mean[:, None]) ** 3).mean(1) / variance**1.5
    size = mean / np.sqrt(variance)
    cubic = size + skewness * size**2 / 3 + skewness**2 * size**3 / 27
    return math.sqrt(count) * (cubic + skewness / (6 * count))
