"""Reliability of a measure over runs: do two halves of its prompts rank the runs alike?"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy import stats


@dataclass(frozen=True)
class Reliability:
    """Split-half reliability of a mean over prompts.

    Attributes:
        half: mean Spearman correlation over runs between the means of two random halves of the prompts.
        full: reliability with all prompts, 2r/(1 + r) by Spearman and Brown; NaN unless half > −1.
        runs: number of runs.
        prompts: number of prompts.
    """

    half: float
    full: float
    runs: int
    prompts: int

    def prompts_for(self, target: float) -> float:
        """Number of prompts at which the reliability is `target`, by Spearman and Brown; infinite if `full` ≤ 0."""
        if not self.full > 0:
            return math.inf
        return self.prompts * target * (1 - self.full) / (self.full * (1 - target))


def split_half(values: np.ndarray, splits: int = 200, seed: int = 0) -> Reliability:
    """Split-half reliability of the mean over prompts as a measure of runs.

    Ranks are compared, so a monotone transformation such as the logarithm changes nothing.

    Args:
        values: (runs, prompts) one value for each prompt; the same prompts in every run.
        splits: number of random halves.
        seed: of the halves.

    Returns:
        The reliability; NaN for fewer than 3 runs, fewer than 4 prompts, or halves that do not vary over runs.
    """
    runs, prompts = values.shape
    if runs < 3 or prompts < 4 or not np.isfinite(values).all():
        return Reliability(math.nan, math.nan, runs, prompts)
    rng = np.random.default_rng(seed)
    correlations = []
    for _ in range(splits):
        order = rng.permutation(prompts)
        first, second = (values[:, part].mean(axis=1) for part in (order[: prompts // 2], order[prompts // 2 :]))
        if np.ptp(first) == 0 or np.ptp(second) == 0:
            return Reliability(math.nan, math.nan, runs, prompts)
        correlations.append(stats.spearmanr(first, second).statistic)
    half = float(np.mean(correlations))
    return Reliability(half, 2 * half / (1 + half) if half > -1 else math.nan, runs, prompts)
