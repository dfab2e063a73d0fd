"""Figures of the claims about single tokens and about pairs of runs: each from a verdict's own frame to a Figure."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from sharpscope.analysis.bands import mean_interval
from sharpscope.analysis.figures.style import BLUE, GREY, VERMILLION, finish, panels, plain, styled


def bound_counts(violations: pd.DataFrame) -> Figure:
    """Share of each step's tokens outside claim C1's bounds, over all runs.

    `violations`: run, step, tokens, below, above.
    """
    sums = violations.groupby("step")[["tokens", "below", "above"]].sum()
    with styled():
        figure, (axis,) = panels(1, width=5.0)
        share = (sums["below"] + sums["above"]) / sums["tokens"]
        axis.plot(sums.index, share, "o-", color=BLUE, markersize=3, label="all runs together")
        axis.set(xlabel="step", ylabel="tokens outside the bounds [share]")
        finish(figure, [axis])
    return figure


def norm_sample(sample: pd.DataFrame) -> Figure:
    """Exact score norms against 1 − π, and the law ∝ (1 − π) through their median (C2).

    `sample`: one_minus_pi, score_norm.
    """
    with styled():
        figure, (axis,) = panels(1, width=5.0, height=3.4)
        x, y = (sample[name].to_numpy(dtype=float) for name in ("one_minus_pi", "score_norm"))
        shown = (x > 0) & (y > 0)
        x, y = x[shown], y[shown]
        axis.plot(x, y, ".", color=BLUE, markersize=2.5, alpha=0.5, rasterized=True, label="token")
        if len(x):
            ends = np.array([x.min(), x.max()])
            axis.plot(ends, np.median(y / x) * ends, ":", color=GREY, label="∝ (1 − π)")
        axis.set(xscale="log", yscale="log", xlabel="1 − π", ylabel="‖∇ ln π‖, exact [L2, parameters]")
        finish(figure, [axis])
    return figure


def dominance(curves: pd.DataFrame) -> Figure:
    """Share of Σ|c|·‖∇ ln π‖ that the smallest tokens hold, and that of the null in which the norm is 1 − π (C3).

    `curves`: tokens (share, smallest first), lorenz, lorenz_null.
    """
    with styled():
        figure, (axis,) = panels(1, width=5.0)
        axis.plot(curves["tokens"], curves["lorenz"], color=BLUE, label="recorded")
        axis.plot(curves["tokens"], curves["lorenz_null"], ":", color=VERMILLION, label="if norm = 1 − π")
        axis.plot([0, 1], [0, 1], color=GREY, linewidth=0.8, label="all tokens equal")
        axis.set(xlabel="share of tokens, smallest first", ylabel="share of Σ|c|·‖∇ ln π‖")
        finish(figure, [axis])
    return figure


def paired(frames: Mapping[str, pd.DataFrame], methods: tuple[str, str], unit: str) -> Figure:
    """Baseline and treatment of every seed, joined, with the mean of each: a panel for each frame (C4, C7, C8).

    `frames`: title → seed, baseline, treatment. Error bars: 95 % t-interval over seeds, none with one seed.
    """
    kept = {title: frame for title, frame in frames.items() if len(frame)}
    with styled():
        figure, axes = panels(len(kept))
        for axis, (title, frame) in zip(axes, kept.items(), strict=True):
            ends = frame[["baseline", "treatment"]].to_numpy(dtype=float)  # (seeds, 2)
            for row in ends:
                axis.plot([0, 1], row, "-", color=GREY, linewidth=0.8, alpha=0.7)
            middle, half = zip(*(mean_interval(column) for column in ends.T), strict=True)
            axis.errorbar(
                [0, 1], middle, yerr=np.nan_to_num(half), fmt="o", color=BLUE, capsize=3, label="mean over seeds"
            )
            axis.set_xticks([0, 1], [plain(name) for name in methods])
            axis.set(xlim=(-0.3, 1.3), ylabel=unit, title=plain(title))
        finish(figure, axes)
    return figure
