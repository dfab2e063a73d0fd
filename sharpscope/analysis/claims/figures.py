"""Three figures that all claims share: paired differences as dots, a scatter with its line, and a binned curve."""

from __future__ import annotations

import math
from collections.abc import Iterator
from textwrap import fill

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from sharpscope.analysis.claims.base import PairedClaim, Verdict
from sharpscope.analysis.figures.style import BLUE, COLORS, GRAY, VERMILLION, WIDTH, finish, panels, plain, styled
from sharpscope.analysis.statistics import contrast_interval, mean_interval

BINS = 10
WORDS = {
    "one_minus_pi": "1 − π",
    "score_norm": "‖∇ ln π‖ [L2 norm]",
    "decile": "decile of probability, 1 = least likely",
    "influence": "influence [step's mean |influence|], below 0 hurts",
    "testing": "SAM sharpness at the fixed radius [failure]",
    "asam": "ASAM sharpness [failure]",
    "gap": "generalization gap [share]",
    "predicted": "predicted change [nats]",
    "measured": "measured change [nats]",
}
"""Column → label of its axis."""


def paired_dots(verdict: Verdict) -> Figure:
    """The numbers that were tested, a dot for each pair and a line for each part, with mean and 95 % interval; dashed: the margin."""
    claim, parts = verdict.claim, verdict.finding.parts
    assert isinstance(claim, PairedClaim)
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


def scatter(frame: pd.DataFrame, x: str, y: str, label: str) -> Figure:
    """Points and their least-squares line."""
    data = frame[[x, y]].astype(float).dropna()
    with styled():
        figure, (axis,) = panels(1, height=3.0)
        axis.plot(data[x], data[y], ".", color=BLUE, alpha=0.5, markersize=4)
        if data[x].nunique() > 1:
            ends = np.array([data[x].min(), data[x].max()])
            axis.plot(ends, np.polyval(np.polyfit(data[x], data[y], 1), ends), color=VERMILLION)
        axis.set(xlabel=WORDS[x], ylabel=WORDS[y], title=plain(label))
        finish(figure, [axis])
    return figure


def binned(frame: pd.DataFrame, x: str, y: str, label: str, by: str | None = None) -> Figure:
    """Median of y with its quartiles in bins of x, in logarithms where both are positive; a curve for each value of `by`."""
    frame = frame.dropna(subset=[x, y])
    log = bool((frame[[x, y]] > 0).all(axis=None)) and by is None
    with styled():
        figure, (axis,) = panels(1, height=3.0)
        for (name, rows), color in zip(frame.groupby(by) if by else [("", frame)], COLORS, strict=False):
            bins = rows[x] if rows[x].nunique() <= BINS else pd.qcut(rows[x], BINS, duplicates="drop")
            groups = rows.groupby(bins, observed=True)
            low, middle, high = (groups[y].quantile(q) for q in (0.25, 0.5, 0.75))
            at = groups[x].median()
            error = [middle - low, high - middle]
            axis.errorbar(
                at,
                middle,
                error,
                color=color,
                marker="o",
                markersize=4,
                label=" ".join([by, str(name)]) if by else None,
            )
        scale = "log" if log else "linear"
        axis.set(xlabel=WORDS[x], ylabel=WORDS[y], title=plain(label), xscale=scale, yscale=scale)
        finish(figure, [axis])
    return figure


def figures_of(verdict: Verdict) -> Iterator[tuple[str, Figure, str]]:
    """(name, figure, caption) of everything that a verdict can show."""
    name = f"{verdict.claim.name.lower()}{'' if verdict.claim.key == verdict.claim.name else '_2'}"
    finding = verdict.finding
    if isinstance(verdict.claim, PairedClaim) and finding.parts and not finding.missing:
        caption = f"{verdict.title}: {verdict.verdict}. A dot for each of {verdict.n} {verdict.claim.unit}; dashed: the margin."
        yield name, paired_dots(verdict), caption
    for kind, key, x, y, label in verdict.claim.figures:
        frame = finding.frames.get(key)
        if frame is None or len(frame) < 2 or not math.isfinite(float(frame[y].astype(float).std())):
            continue
        if kind == "scatter":
            yield f"{name}_{key}", scatter(frame, x, y, label), f"{label}; line: least squares."
        else:
            by = "advantage" if "advantage" in frame else None
            yield f"{name}_{key}", binned(frame, x, y, label, by), f"{label}: medians, bars: quartiles."
