"""Slow, plain versions of what analysis computes: loops over rows, no pandas."""

from __future__ import annotations

import math
import statistics

# Student's t, 97.5 % quantile, from printed tables: degrees of freedom -> t
T_975 = {1: 12.706205, 2: 4.302653, 3: 3.182446, 4: 2.776445, 5: 2.570582, 9: 2.262157}


def mean_and_half(values):
    mean = sum(values) / len(values)
    if len(values) == 1:
        return mean, math.nan
    return mean, T_975[len(values) - 1] * statistics.stdev(values) / math.sqrt(len(values))


def by_step(runs, column):
    """{step: values over seeds} of the steps that all runs have."""
    tables = [dict(zip(run.steps["step"].tolist(), run.steps[column].tolist(), strict=True)) for run in runs]
    common = set.intersection(*map(set, tables))
    return {step: [table[step] for table in tables] for step in sorted(common)}


def lorenz_share(masses, share):
    """Part of the whole that the largest `share` of the masses holds; share·n must be whole."""
    count = round(share * len(masses))
    return sum(sorted(map(abs, masses), reverse=True)[:count]) / sum(map(abs, masses))
