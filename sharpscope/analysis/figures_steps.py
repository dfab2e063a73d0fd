"""Figures over training steps: from a frame of values (a row for each setting, seed and step) to a Figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from sharpscope.analysis.bands import band
from sharpscope.analysis.frames import natural
from sharpscope.analysis.style import Line, finish, panels, plain, styled

Lines = Mapping[str, Line]

BAND = "line: mean over seeds; band: 95 % t-interval (none with one seed)"

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
    """One line a setting (mean over seeds) and its 95 % t-interval; no band where there is one seed."""
    for label in sorted(values["setting"].unique()):
        rows = band(values[values["setting"] == label], [x], log=log)
        line = lines[label]
        marker = line.marker if len(rows) <= 12 else ""
        axis.plot(rows[x].astype(float), rows["mean"], label=plain(label), marker=marker, **line.plot)
        if (rows["n"] > 1).any():
            axis.fill_between(
                rows[x].astype(float), rows["low"], rows["high"], color=line.color, alpha=0.16, linewidth=0
            )
    if x == "step":
        axis.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    if log:
        axis.set_yscale("log")


def trajectories(values: pd.DataFrame, lines: Lines, quantities: Sequence[str], *, log: bool = False) -> Figure:
    """A panel for each of `quantities` (columns of `steps`) that the frame has, by step.

    `log`: logarithmic axis, geometric mean over seeds; values that are not positive leave a gap.
    """
    present = [name for name in quantities if (values["quantity"] == name).any()]
    with styled():
        figure, axes = panels(len(present))
        for axis, name in zip(axes, present, strict=True):
            draw_bands(axis, values[values["quantity"] == name], lines, log=log)
            axis.set(xlabel="step", ylabel=AXES[name])
        finish(figure, axes)
    return figure


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
    return trajectories(
        values, lines, ["clip_fraction_low", "clip_fraction_high", "truncated_fraction", "zero_std_groups"]
    )


def weight_statistics(values: pd.DataFrame, lines: Lines) -> Figure:
    """Mean of the token weights, their effective sample size and how many sit on a bound, by step."""
    return trajectories(values, lines, ["weight_mean", "weight_ess", "weight_saturation_low", "weight_saturation_high"])


def evaluations(values: pd.DataFrame, lines: Lines, axis_label: str = "accuracy [share of completions]") -> Figure:
    """An evaluation's quantity pooled over levels, by step: a panel for each split and temperature."""
    pooled = values[values["level"] == "all"]
    places = sorted(set(map(tuple, pooled[["split", "temperature"]].to_numpy().tolist())))
    return _eval_panels(
        [(f"{split}, {_temperature(t)}", _at(pooled, split=split, temperature=t)) for split, t in places],
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
                (f"{split}, level {level}, {_temperature(temperature)}", _at(chosen, split=split, level=level))
            )
    return _eval_panels(content, lines, axis_label)


def _at(values: pd.DataFrame, **place: object) -> pd.DataFrame:
    chosen = values
    for column, value in place.items():
        chosen = chosen[chosen[column] == value]
    return chosen


def _temperature(value: float) -> str:
    return "greedy" if value == 0 else f"temperature {value:g}"


def _eval_panels(content: Sequence[tuple[str, pd.DataFrame]], lines: Lines, axis_label: str) -> Figure:
    with styled():
        figure, axes = panels(len(content))
        for axis, (title, rows) in zip(axes, content, strict=True):
            draw_bands(axis, rows, lines)
            axis.set(xlabel="step", ylabel=axis_label, title=plain(title))
        finish(figure, axes)
    return figure
