"""Intervals over prompts for where the mean of a loss along a line crosses its start."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from torch import Tensor

REACH = (2.0**-12, 2.0**8)
"""Step sizes searched for an end of an interval, in units of the crossing; behind them the end is 0 or infinite."""
POINTS = 401
EVEN = 1e-300  # variance of prompts that all agree, so that their score is infinite and not 0/0


def crossing_interval(by_prompt: Mapping[float, Tensor], crossing: float) -> tuple[float, float]:
    """The 95 % interval over prompts of the η at which the mean rise L(θ − η·Δ) − L(θ) becomes positive, with Δ fixed.

    The test of a mean is inverted: the interval begins where the rise is no longer shown to be negative and ends where it is shown to
    be positive; of a quadratic loss this is Fieller's interval. It is not symmetric, and 0 and ∞ are ends where no η is too small or too
    large. Quotients (L_i(θ − η·Δ) − L_i(θ))/η of each prompt, linear in η for a quadratic loss, are interpolated between the η tried.

    Args:
        by_prompt: one value of the loss for each prompt, (k,), at 0 and the η tried.
        crossing: the η found; ends are searched within `REACH` of it.

    Returns:
        Both ends; NaN for fewer than two prompts or two η.
    """
    from scipy.stats import t

    start = by_prompt.get(0.0)
    tried = sorted(eta for eta, each in by_prompt.items() if eta and bool(each.isfinite().all()))
    if start is None or len(start) < 2 or len(tried) < 2:
        return math.nan, math.nan
    quotients = np.stack([((by_prompt[eta] - start) / eta).numpy() for eta in tried])
    etas = crossing * np.geomspace(*REACH, POINTS)
    after = np.clip(np.searchsorted(tried, etas), 1, len(tried) - 1)
    low, high = np.array(tried)[after - 1], np.array(tried)[after]
    place = ((etas - low) / (high - low))[:, None]
    score = mean_score(quotients[after - 1] * (1 - place) + quotients[after] * place)
    bound = float(t.ppf(0.975, len(start) - 1))
    return _first_positive(etas, score + bound), _first_positive(etas, score - bound)


def mean_score(values: np.ndarray) -> np.ndarray:
    """Student's t of the mean of each row of (m, k), with Hall's correction for skewness, which keeps its order; (m,).

    For S = mean/s and skewness g it is √k·(S + g·S²/3 + g²·S³/27 + g/6k) (Hall 1992, J. R. Stat. Soc. B 54:221).
    """
    count, mean = values.shape[1], values.mean(1)
    variance = np.maximum(values.var(1, ddof=1), EVEN)
    skewness = ((values - mean[:, None]) ** 3).mean(1) / variance**1.5
    size = mean / np.sqrt(variance)
    with np.errstate(over="ignore"):
        cubic = size + skewness * size**2 / 3 + skewness**2 * size**3 / 27
    return math.sqrt(count) * (cubic + skewness / (6 * count))


def _first_positive(etas: np.ndarray, values: np.ndarray) -> float:
    """Where the values (m,) become positive, between two of the η; 0 if the first is, ∞ if none is."""
    positive = np.nonzero(values > 0)[0]
    if not len(positive) or positive[0] == 0:
        return 0.0 if len(positive) else math.inf
    at = positive[0]
    share = values[at] / (values[at] - values[at - 1])
    return float(etas[at] - share * (etas[at] - etas[at - 1]))
