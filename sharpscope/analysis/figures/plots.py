"""The figures: from small frames to matplotlib figures, all in one style, with their uncertainty."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from sharpscope.analysis.curves import study_charts
from sharpscope.analysis.figures.style import (
    BLUE,
    COLORS,
    GRAY,
    WIDTH,
    finish,
    lines,
    panels,
    plain,
    setting_text,
    styled,
)
from sharpscope.analysis.forks import COMPARISONS, NAMES, UNITS, fork_differences
from sharpscope.analysis.report import laid_out, main_differences
from sharpscope.analysis.statistics import contrast_interval, mean_interval
from sharpscope.traces import Runs

if TYPE_CHECKING:
    from sharpscope.analysis.claims import Verdict

FEW = 30
"""Points up to which intervals are bars and not a band."""


def curves(chart: Mapping[str, Any], labels: Sequence[str]) -> Figure:
    """A chart of `study_charts`: a curve for each setting with its interval, and thin lines of few seeds."""
    styles, x = lines(labels), np.array(chart["x"], dtype=float)
    with styled():
        figure, (axis,) = panels(1, height=1.9)
        for label, series in zip(labels, chart["series"], strict=True):
            _curve(axis, x, {name: np.array(values, dtype=float) for name, values in series.items()}, styles[label])
            axis.lines[-1].set_label(setting_text(label))
        axis.set(xlabel="step", ylabel=plain(chart["title"], 100), yscale="log" if chart["log"] else "linear")
        axis.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        finish(figure, [axis])
    return figure


def _curve(axis: Axes, x: np.ndarray, series: Mapping[str, np.ndarray], line: Mapping[str, Any]) -> None:
    """One setting's curve; the mean is the last line that is added."""
    y, color = series["y"], line["color"]
    for each in series.get("seeds", ()):
        axis.plot(x, each, color=color, linewidth=0.5, alpha=0.5)
    if "low" in series and len(x) <= FEW:
        arms = [y - series["low"], series["high"] - y]
        axis.errorbar(x, y, yerr=arms, color=color, linestyle="none", linewidth=1, capsize=2)
    elif "low" in series:
        axis.fill_between(x, series["low"], series["high"], color=color, linewidth=0, alpha=0.16)
    if "hollow" in series:
        at = series["hollow"].astype(int)
        axis.plot(x[at], y[at], "o", markerfacecolor="w", markeredgecolor=color, markersize=6, label="saturated")
    axis.plot(x, y, marker="o" if len(x) <= 12 else "", **line)


def differences(table: pd.DataFrame) -> Figure:
    """One row for each contrast with its 95 % interval: a panel for each quantity.

    `table`: quantity (with its unit), contrast, difference, low, high.
    """
    quantities = list(dict.fromkeys(table["quantity"]))
    contrasts = list(dict.fromkeys(table["contrast"]))[::-1]
    height = np.arange(len(contrasts))
    with styled():
        figure, axes = panels(len(quantities), height=0.7 + 0.18 * len(contrasts), sharey=True)
        for axis, quantity in zip(axes, quantities, strict=True):
            part = table[table["quantity"] == quantity].set_index("contrast").reindex(contrasts).astype({"low": float})
            axis.axvline(0, color=GRAY, linewidth=0.8)
            axis.hlines(height, part["low"], part["high"], color=BLUE, linewidth=1.2)
            axis.plot(part["difference"], height, "o", color=BLUE)
            axis.set_yticks(height, [setting_text(name) for name in contrasts])
            axis.set(xlabel=fill(plain(quantity, 80), 26), ylim=(-0.6, len(contrasts) - 0.4))
        finish(figure, axes)
    return figure


def fork_effects(table: pd.DataFrame) -> Figure | None:
    """Each arm's difference to the reference by state and comparison, a panel for each outcome; None if nothing was measured.

    `table`: of one fork, from `sharpscope.analysis.fork_differences`.
    """
    compared = (table["arm"] != table["reference"]) & table["difference"].notna()
    shown = table[compared & table["outcome"].isin(list(NAMES))]
    if shown.empty:
        return None
    several = shown["state"].nunique() > 1
    matched = shown["comparison"].map({name: ", matched KL" * (name == "kl") for name in COMPARISONS})
    contrast = shown["arm"] + (", " + shown["state"] if several else "") + matched
    units = [UNITS.get(outcome, ("", 1.0)) for outcome in shown["outcome"]]
    names = [NAMES[name] + f" [{unit}]" * bool(unit) for name, (unit, _) in zip(shown["outcome"], units, strict=True)]
    ends = shown[["difference", "low", "high"]].astype(float).mul([factor for _, factor in units], axis=0)
    rank = shown["outcome"].map(list(NAMES).index).to_numpy().argsort(kind="stable")
    return differences(ends.assign(quantity=names, contrast=contrast).iloc[rank])


def paired_dots(verdict: Verdict) -> Figure:
    """The numbers that were tested, a dot for each pair and a line for each part, with mean and 95 % interval; dashed: the margin."""
    claim, parts = verdict.claim, verdict.finding.parts
    margin = claim.margin_of_parts(verdict.terms) * (1 if claim.direction == "higher" else -1)
    unit = {"points": "points", "percent": "%", "log": "%"}.get(claim.scale, claim.effect_unit)

    def scaled(values: object) -> np.ndarray:
        """Values in the claim's unit."""
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


def rotation_figure(table: pd.DataFrame, noise: float) -> Figure:
    """The angle by which each method turns the gradient and the optimizer's step, as dots on a line of degrees.

    Args:
        table: columns `method`, `gradient_rotation` and `update_rotation` [degrees]; an angle that is NaN is left out.
        noise: angle between the batch's gradient and the expected gradient [degrees], a dashed line; NaN: none.
    """
    shown = table[table[["gradient_rotation", "update_rotation"]].notna().any(axis=1)]
    shown = shown.sort_values("gradient_rotation", ascending=False, na_position="first", kind="stable")
    with styled():
        figure, (axis,) = panels(1, height=0.9 + 0.2 * len(shown))
        figure.set_figwidth(WIDTH)
        height = np.arange(len(shown))
        axis.plot(shown["gradient_rotation"], height, "o", color=BLUE, label="gradient")
        axis.plot(shown["update_rotation"], height, "s", color=COLORS[1], label="optimizer's step")
        if math.isfinite(noise):
            axis.axvline(noise, color=GRAY, linestyle="--", linewidth=1, label=f"noise of the batch, {noise:.0f}°")
        axis.set_yticks(height, [plain(name, 48) for name in shown["method"]])
        axis.set(xlabel="angle to the reference [°]", ylim=(-0.6, len(shown) - 0.4))
        axis.set_xlim(left=0)
        finish(figure, [axis])
    return figure


def quantiles(axis: Axes, x: pd.Series, y: pd.Series, bins: pd.Series, label: str, line: Mapping[str, Any]) -> None:
    """Median of y and its 10 to 90 % band over the median x of each of the `bins`; of fewer than 5 points none is drawn."""
    grouped = pd.DataFrame({"x": x, "y": y}).groupby(bins, observed=True)
    enough = grouped.size() >= 5
    at, *levels = grouped["x"].median(), *(grouped["y"].quantile(q) for q in (0.5, 0.1, 0.9))
    at, middle, low, high = (part[enough] for part in (at, *levels))
    axis.plot(at, middle, label=setting_text(label), marker="o" if len(at) <= 12 else "", **line)
    axis.fill_between(at, low, high, color=line["color"], linewidth=0, alpha=0.16)


def weight_functions(functions: pd.DataFrame, on_tokens: pd.DataFrame | None = None) -> Figure:
    """Weights over logit and probability; below, the median weight of a run's tokens with 10 to 90 % bands.

    `functions`: method, axis (logit | probability), x, weight. `on_tokens`: method, logit, probability, weight of each token.
    """
    labels = {"logit": "logit of the token", "probability": "probability π of the token"}
    tokens = functions[[]].assign(method="").head(0) if on_tokens is None else on_tokens
    styles = lines([*functions["method"], *tokens["method"]])
    with styled():
        figure, axes = panels(2 if on_tokens is None else 4)
        for axis, name in zip(axes, labels, strict=False):
            for method, part in functions[functions["axis"] == name].groupby("method", sort=False):
                axis.plot(part["x"], part["weight"], label=setting_text(method), **styles[str(method)])
            axis.set(xlabel=labels[name], ylabel="token weight", title="function, published constants")
        for axis, name in zip(axes[2:], labels, strict=False):
            for method, part in tokens.groupby("method", sort=False):
                bins = pd.qcut(part[name], 20, duplicates="drop") if name == "logit" else pd.cut(part[name], 20)
                quantiles(axis, part[name], part["weight"], bins, str(method), styles[str(method)])
            axis.set(xlabel=labels[name], ylabel="token weight", title="on the run's tokens, calibrated there")
        finish(figure, axes)
    return figure


def run_pictures(runs: Runs) -> Iterator[tuple[str, Figure]]:
    """Names and figures of each study among `runs`: its charts and differences; and those of forks."""
    for study, settings in laid_out(runs):
        made = study_charts(study, settings, runs)
        labels = [setting["label"] for setting in made["settings"]]
        for chart in made["charts"]:
            name = re.sub(r"\W+", "_", chart["title"].partition(" [")[0]).strip("_").lower()
            yield f"{study.slug}{name}", curves(chart, labels)
        shown = study.only([setting.label for setting in settings])
        table = main_differences(study, shown.labels)
        if len(table) > 1:
            share = (table["unit"] == "share").to_numpy()
            ends = table[["difference", "low", "high"]].astype(float).mul(np.where(share, 100, 1), axis=0)
            named = table["quantity"] + np.where(share, " [points]", "")
            yield f"{study.slug}differences", differences(table.assign(**ends, quantity=named))
    forked = fork_differences(runs.forks) if any(run.rows("forks") for run in runs) else pd.DataFrame({"fork": []})
    for name, part in forked.groupby("fork", sort=False):  # type: ignore[assignment]
        if (figure := fork_effects(part)) is not None:
            yield f"fork_{name}" if forked["fork"].nunique() > 1 else "forks", figure
