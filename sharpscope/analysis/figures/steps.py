"""Figures over training steps: from a frame of values (a row for each setting, seed and step) to a Figure."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import fill

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from sharpscope.analysis.figures.style import GRAY, Lines, finish, panels, plain, styled
from sharpscope.analysis.frames import natural
from sharpscope.analysis.statistics import FEWEST, band, mean_interval
from sharpscope.analysis.text import sampling

CROWDED = 3
"""With more settings than this, curves of single steps would hide one another."""
POINTS = 40
"""Points of a curve in a crowded figure, at most."""

BAND = f"line: mean over seeds; band: 95 % t-interval (below {FEWEST} seeds: a thin line each)"

CLIPPING = ("clip_fraction_low", "clip_fraction_high", "truncated_fraction", "zero_std_groups")

AXES = {
    "reward_mean": "mean reward of a completion [reward]",
    "accuracy": "accuracy on the step's completions [share]",
    "grad_norm": "gradient norm before clipping [L2, parameters]",
    "update_norm": "norm of the parameters' change [L2, parameters]",
    "entropy_mean": "mean entropy of a token [nats]",
    "clip_fraction_low": "clipped at the lower bound [share of tokens]",
    "clip_fraction_high": "clipped at the upper bound [share of tokens]",
    "truncated_fraction": "truncated completions [share]",
    "zero_std_groups": "groups of equal rewards [groups]",
    "weight_mean": "mean token weight",
    "weight_saturation_low": "weights on the lower bound [share]",
    "weight_saturation_high": "weights on the upper bound [share]",
    "weight_ess": "effective sample size of the weights [share]",
}


def draw_bands(axis: Axes, values: pd.DataFrame, lines: Lines, *, x: str = "step", log: bool = False) -> None:
    """One line a setting (mean over seeds) and its 95 % t-interval; below FEWEST seeds a thin line for each."""
    for label in sorted(values["setting"].unique()):
        here = values[values["setting"] == label]
        rows = band(here, [x], log=log)
        line = lines[label]
        marker = line.marker if len(rows) <= 12 else ""
        axis.plot(rows[x].astype(float), rows["mean"], label=plain(label), marker=marker, **line.plot)
        if (rows["n"] >= FEWEST).any():
            axis.fill_between(
                rows[x].astype(float),
                rows["low"],
                rows["high"],
                where=rows["n"] >= FEWEST,
                color=line.color,
                alpha=0.16,
                linewidth=0,
            )
        elif (rows["n"] > 1).any():
            for _, one in here.groupby("seed"):
                axis.plot(one[x].astype(float), one["value"], color=line.color, alpha=0.35, linewidth=0.6)
    if x == "step":
        axis.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    if log:
        axis.set_yscale("log")


def draw_curve(axis: Axes, rows: pd.DataFrame, column: str, label: str, color: str, dash: object) -> None:
    """Mean over seeds by step with its 95 % band; several runs of a seed are averaged first."""
    points = band(regular_steps(rows, column), ["step"], column)
    if not len(points):
        return
    marker = "o" if len(points) <= 12 else ""
    axis.plot(
        points["step"], points["mean"], marker=marker, markersize=3, color=color, linestyle=dash, label=label or None
    )
    axis.fill_between(points["step"], points["low"], points["high"], color=color, alpha=0.16, linewidth=0)


def regular_steps(rows: pd.DataFrame, column: str) -> pd.DataFrame:
    """step, seed and their mean, of the steps that more than half of the seeds have.

    Other steps are recorded only in runs with a spike there, which are no fair sample of the seeds.
    """
    means = rows.groupby(["step", "seed"])[[column]].mean().dropna().reset_index()
    return means[2 * means.groupby("step")["seed"].transform("size") > means["seed"].nunique()]


def trajectories(values: pd.DataFrame, lines: Lines, quantities: Sequence[str], *, log: bool = False) -> Figure:
    """A panel for each of `quantities` (columns of `steps`) that the frame has, by step.

    With more than CROWDED settings each point is a mean over several steps, so that POINTS are left; the axis says so.

    `log`: logarithmic axis, geometric mean over seeds (and steps); values that are not positive leave a gap.
    """
    present = [name for name in quantities if (values["quantity"] == name).any()]
    size = block_size(values)
    with styled():
        figure, axes = panels(len(present))
        for axis, name in zip(axes, present, strict=True):
            draw_bands(axis, in_blocks(values[values["quantity"] == name], size, log=log), lines, log=log)
            axis.set(xlabel="step" if size == 1 else f"step (a point: the mean of {size} steps)", ylabel=AXES[name])
        finish(figure, axes)
    return figure


def block_size(values: pd.DataFrame) -> int:
    """Over how many steps a point is to be averaged: 1 for up to CROWDED settings, else so many that POINTS are left."""
    if values["setting"].nunique() <= CROWDED:
        return 1
    return -(-values["step"].nunique() // POINTS)


def in_blocks(values: pd.DataFrame, size: int, *, log: bool = False) -> pd.DataFrame:
    """setting, seed, step, value with each `size` steps in a row made one: their mean (`log`: geometric), at their middle.

    What is no number, or with `log` not positive, makes its block so.
    """
    if size == 1:
        return values
    first = values["step"].min()
    block = (values["step"] - first) // size
    ground = values.assign(value=np.log(values["value"].where(values["value"] > 0)) if log else values["value"])
    made = ground.groupby(["setting", "seed", block.rename("block")], sort=True)
    means = made.agg(value=("value", lambda v: v.mean(skipna=False)), step=("step", "mean")).reset_index()
    return means.assign(value=np.exp(means["value"])) if log else means


def reward(values: pd.DataFrame, lines: Lines) -> Figure:
    """Mean reward and accuracy of the training completions, by step."""
    return trajectories(values, lines, ["reward_mean", "accuracy"])


def gradient_norm(values: pd.DataFrame, lines: Lines) -> Figure:
    """Gradient norm and the size of the parameters' change, by step; logarithmic."""
    return trajectories(values, lines, ["grad_norm", "update_norm"], log=True)


def entropy(values: pd.DataFrame, lines: Lines) -> Figure:
    """Mean entropy of a token, by step."""
    return trajectories(values, lines, ["entropy_mean"])


def clipping(values: pd.DataFrame, lines: Lines) -> Figure:
    """Shares of clipped tokens and truncated completions, and groups without a signal, by step."""
    return trajectories(values, lines, list(CLIPPING))


def weight_statistics(values: pd.DataFrame, lines: Lines) -> Figure:
    """Mean of the token weights, their effective sample size and how many sit on a bound, by step."""
    return trajectories(values, lines, ["weight_mean", "weight_ess", "weight_saturation_low", "weight_saturation_high"])


def evaluations(values: pd.DataFrame, lines: Lines, axis_label: str = "accuracy [share of completions]") -> Figure:
    """An evaluation's quantity pooled over levels, by step: a panel for each split and temperature."""
    pooled = values[values["level"] == "all"]
    places = sorted(set(map(tuple, pooled[["split", "temperature"]].to_numpy().tolist())))
    return _eval_panels(
        [(f"{split}, {sampling(t, 'temperature ')}", _at(pooled, split=split, temperature=t)) for split, t in places],
        lines,
        axis_label,
    )


def evaluations_by_level(
    values: pd.DataFrame, lines: Lines, temperature: float, axis_label: str = "accuracy [share of completions]"
) -> Figure:
    """The same by size: a panel for each split and level, at one temperature."""
    chosen = values[(values["temperature"] == temperature) & (values["level"] != "all")]
    content = []
    for split in sorted(chosen["split"].unique()):
        for level in natural(chosen.loc[chosen["split"] == split, "level"]):
            content.append(
                (
                    f"{split}, level {level}, {sampling(temperature, 'temperature ')}",
                    _at(chosen, split=split, level=level),
                )
            )
    return _eval_panels(content, lines, axis_label)


def every_setting(values: pd.DataFrame, lines: Lines) -> Figure:
    """One row a setting: each seed's value as a dot, the mean, and from FEWEST seeds on its 95 % t-interval.

    `values`: setting, value, one row a seed. Dotted: the mean of `grpo`, or else of the setting with the most seeds.
    """
    labels = sorted(values["setting"].unique(), reverse=True)
    sizes = values.groupby("setting").size()
    against = "grpo" if "grpo" in labels else str(sizes.idxmax())
    with styled():
        texts = [fill(f"{plain(label, 100)}  n = {sizes[label]}", 40) for label in labels]
        rows = np.array([1 + 0.6 * text.count("\n") for text in texts])  # a row is as high as its label
        places = np.cumsum(rows) - rows / 2 - 0.5  # 0, 1, 2 … where no label is folded
        figure, (axis,) = panels(1, width=6.4, height=1.0 + 0.24 * float(rows.sum()))
        for place, label in zip(places, labels, strict=True):
            seen = values.loc[values["setting"] == label, "value"].to_numpy(dtype=float)
            interval = mean_interval(seen, "t") if len(seen) >= FEWEST else None
            color = lines[label].color
            named = label == labels[-1]  # the legend's entries, once
            axis.plot(
                seen,
                [place] * len(seen),
                "o",
                color=color,
                alpha=0.3,
                markersize=3,
                markeredgewidth=0,
                label="a seed" if named else None,
            )
            axis.errorbar(
                seen.mean(),
                place,
                xerr=None if interval is None else (interval.high - interval.low) / 2,
                fmt="D",
                color=color,
                capsize=2,
                label="mean over seeds, 95 % t-interval" if named else None,
            )
        middle = float(values.loc[values["setting"] == against, "value"].mean())
        axis.axvline(middle, color=GRAY, linestyle=":", linewidth=1, label=f"mean of {plain(against)}")
        axis.set_yticks(places, texts)
        axis.set(xlabel="held-out accuracy at the last evaluation\n[share of completions]", ylabel="")
        axis.grid(axis="y", visible=False)
        finish(figure, [axis])
    return figure


def _at(values: pd.DataFrame, **place: object) -> pd.DataFrame:
    chosen = values
    for column, value in place.items():
        chosen = chosen[chosen[column] == value]
    return chosen


def _eval_panels(content: Sequence[tuple[str, pd.DataFrame]], lines: Lines, axis_label: str) -> Figure:
    with styled():
        figure, axes = panels(len(content))
        for axis, (title, rows) in zip(axes, content, strict=True):
            draw_bands(axis, rows, lines)
            axis.set(xlabel="step", ylabel=axis_label, title=plain(title))
        finish(figure, axes)
    return figure
