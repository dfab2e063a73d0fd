"""The figure that all paired claims share: differences as dots, with their mean, interval and margin."""

from __future__ import annotations

from textwrap import fill

import numpy as np
from matplotlib.figure import Figure

from sharpscope.analysis.claims.base import Verdict
from sharpscope.analysis.figures.style import BLUE, GRAY, WIDTH, finish, panels, plain, styled
from sharpscope.analysis.statistics import contrast_interval, mean_interval


def paired_dots(verdict: Verdict) -> Figure:
    """The numbers that were tested, a dot for each pair and a line for each part, with mean and 95 % interval; dashed: the margin."""
    claim, parts = verdict.claim, verdict.finding.parts
    margin = claim.margin_of_parts(verdict.terms) * (1 if claim.direction == "higher" else -1)
    unit = {"points": "points", "percent": "%", "log": "%"}.get(claim.scale, claim.effect_unit)

    def scaled(values: object) -> np.ndarray:
        data = np.asarray(values, dtype=float)
        return {"plain": data, "log": 100 * np.expm1(data)}.get(claim.scale, 100 * data)

    with styled():
        figure, (axis,) = panels(1, height=0.5 + 0.3 * len(parts))
        figure.set_figwidth(WIDTH)
        axis.axvline(0, color=GRAY, linewidth=0.8)
        axis.axvline(float(scaled(margin)), color=GRAY, linewidth=0.8, linestyle="--")
        for row, frame in enumerate(parts.values()):
            data = frame["difference"].to_numpy(dtype=float)
            interval = contrast_interval(data) or mean_interval(data)
            axis.plot(scaled(data), np.full(len(data), row), ".", color=GRAY, alpha=0.7, markersize=7)
            if interval is not None:
                axis.plot(scaled([interval.low, interval.high]), [row, row], color=BLUE)
            axis.plot(scaled(data.mean()), row, "o", color=BLUE, markersize=5)
        axis.set_yticks(range(len(parts)), [plain(name) for name in parts])
        axis.set(xlabel=fill(plain(f"{claim.effect} [{unit}]", 160), 60), ylim=(-0.6, len(parts) - 0.4))
        finish(figure, [axis])
    return figure
