"""Mean and 95 % t-interval over seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd
from scipy.special import stdtrit

LEVEL = 0.95
FEWEST = 4
"""Seeds from which a figure draws an interval; of fewer (t = 12.7 with two) every seed is drawn instead."""


def mean_interval(values: Sequence[float] | np.ndarray) -> tuple[float, float]:
    """Mean and half-width of its 95 % t-interval, t_{0.975, n-1}·s/√n; the half-width is NaN for n = 1.

    A value that is not a number makes both so: nothing is left out in silence.
    """
    array = np.asarray(values, dtype=float)
    if array.size == 0:
        return math.nan, math.nan
    mean = float(array.mean())
    if array.size == 1:
        return mean, math.nan
    error = float(array.std(ddof=1)) / math.sqrt(array.size)
    return mean, float(stdtrit(array.size - 1, (1 + LEVEL) / 2)) * error


def band(frame: pd.DataFrame, by: Sequence[str], value: str = "value", *, log: bool = False) -> pd.DataFrame:
    """Rows of `frame` (one a seed) -> one row for each `by`: mean, low, high, n. low and high are NaN where n = 1.

    `log`: mean and interval of ln(value), carried back (a geometric mean); values ≤ 0 count as not a number.
    """
    rows = []
    for key, group in frame.groupby(list(by), sort=True, dropna=False):
        values = group[value].to_numpy(dtype=float)
        if log:
            with np.errstate(divide="ignore", invalid="ignore"):
                values = np.where(values > 0, np.log(values), np.nan)
        mean, half = mean_interval(values)
        ends = (mean, mean - half, mean + half)
        mean, low, high = (math.exp(end) for end in ends) if log else ends
        rows.append((*key, mean, low, high, len(values)))
    return pd.DataFrame(rows, columns=[*by, "mean", "low", "high", "n"])
