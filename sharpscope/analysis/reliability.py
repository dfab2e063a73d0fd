"""How reliably the sharpness of a study's runs can be told apart, from the values by prompt that probes keep."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy.stats import spearmanr

from sharpscope.analysis.study import Study

TARGET = 0.9
"""Reliability for which the number of prompts is given."""
COLUMNS = [
    "functional",
    "probe_set",
    "quantity",
    "rho",
    "runs",
    "prompts",
    "half",
    "reliability",
    "prompts_needed",
    "relative_std_error",
    "seconds",
]
MISSING = "reliability of sharpness: not recorded; probes of schema version 2 keep values by prompt (probes.preset=light, the default)"


@dataclass(frozen=True)
class SplitHalf:
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


def split_half(values: np.ndarray, splits: int = 200, seed: int = 0) -> SplitHalf:
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
        return SplitHalf(math.nan, math.nan, runs, prompts)
    rng = np.random.default_rng(seed)
    correlations = []
    for _ in range(splits):
        order = rng.permutation(prompts)
        first, second = (values[:, part].mean(axis=1) for part in (order[: prompts // 2], order[prompts // 2 :]))
        if np.ptp(first) == 0 or np.ptp(second) == 0:
            return SplitHalf(math.nan, math.nan, runs, prompts)
        correlations.append(spearmanr(first, second).statistic)
    half = float(np.mean(correlations))
    return SplitHalf(half, 2 * half / (1 + half) if half > -1 else math.nan, runs, prompts)


_KEY = ["probe_set", "functional", "parameters", "quantity", "rho"]


def reliability_table(study: Study) -> pd.DataFrame:
    """COLUMNS: a row for each measure on each probe set, at each run's last probed step; empty if no run kept values by prompt.

    `half` is the mean Spearman correlation over runs between the means of two random halves of the prompts, `reliability` that
    of all prompts (2r/(1 + r), Spearman and Brown), `prompts_needed` the number of prompts for a reliability of `TARGET`, the
    relative standard error is over prompts (median over runs), `seconds` the median time of one estimate [s]. Correlations
    need at least 3 runs; runs that differ little in sharpness have a low reliability however many prompts there are.
    """
    values, facts = [], []
    for number, (_, _, run) in enumerate(study.each()):
        prompts = run.probe_prompts
        if not len(prompts):
            continue
        last = prompts["step"].max()
        own = prompts[prompts["step"] == last]
        values.append(own.assign(run=number))
        facts.append(run.probes[run.probes["step"] == last].assign(run=number))
    if not values:
        return pd.DataFrame(columns=COLUMNS)
    rows = []
    estimates = pd.concat(facts, ignore_index=True)
    for key, group in pd.concat(values, ignore_index=True).groupby(_KEY, dropna=False, sort=False):
        table = group.pivot_table(index="run", columns="prompt", values="value").dropna(axis=0)
        correlation = split_half(table.to_numpy())
        same = np.logical_and.reduce(
            [
                estimates[name].isna() if pd.isna(part) else estimates[name] == part
                for name, part in zip(_KEY, key, strict=True)
            ]
        )
        own = estimates[same]
        error = (pd.to_numeric(own["prompt_std_error"]) / pd.to_numeric(own["value"]).abs()).median()
        named = dict(zip(_KEY, key, strict=True))
        rows.append(
            [
                named["functional"],
                named["probe_set"],
                named["quantity"],
                named["rho"],
                correlation.runs,
                correlation.prompts,
                correlation.half,
                correlation.full,
                correlation.prompts_for(TARGET),
                float(error),
                float(pd.to_numeric(own["seconds"]).median()),
            ]
        )
    return pd.DataFrame(rows, columns=COLUMNS)
