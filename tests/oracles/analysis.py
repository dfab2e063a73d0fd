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


def eval_by_step(runs, split, temperature, level=None):
    """{step: accuracies over seeds}; level None pools the levels by their numbers of completions."""
    result = {}
    for run in runs:
        sums = {}
        for row in run.eval.itertuples():
            wanted = row.level != "all" if level is None else row.level == level
            if row.split == split and row.temperature == temperature and wanted:
                hits, total = sums.get(row.step, (0.0, 0.0))
                sums[row.step] = (hits + row.accuracy * row.n * row.k, total + row.n * row.k)
        for step, (hits, total) in sums.items():
            result.setdefault(step, []).append(hits / total)
    return dict(sorted(result.items()))


def lorenz_share(masses, share):
    """Part of the whole that the largest `share` of the masses holds; share·n must be whole."""
    count = round(share * len(masses))
    return sum(sorted(map(abs, masses), reverse=True)[:count]) / sum(map(abs, masses))


def decile_sums(rows, column):
    """{(decile, sign of the advantage): sum over all steps}, deciles by rank of logp within the step."""
    result = {}
    for step in {row["step"] for row in rows}:
        inside = sorted((row for row in rows if row["step"] == step), key=lambda row: row["logp"])
        for rank, row in enumerate(inside):
            decile = min(10 * rank // len(inside) + 1, 10)
            sign = (row["advantage"] > 0) - (row["advantage"] < 0)
            result[decile, sign] = result.get((decile, sign), 0.0) + row[column]
    return result


def smoothed(nodes, weights, x, width):
    """Σ w N(x; node, width²) at one place."""
    scale = width * math.sqrt(2 * math.pi)
    return sum(w * math.exp(-0.5 * ((x - node) / width) ** 2) / scale for node, w in zip(nodes, weights, strict=True))
