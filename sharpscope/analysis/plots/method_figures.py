"""Figures of methods and claims: rotation, effects against removal, and the pairs that a claim tests."""

from __future__ import annotations

import math
from textwrap import fill
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure
from scipy.stats import spearmanr

from sharpscope.analysis.plots.registry import not_from_runs, plot
from sharpscope.analysis.plots.style import (
    GRAY,
    WIDTHS,
    Picture,
    color_of,
    colored,
    colors,
    legend,
    picture,
    plain,
    styled,
    titled,
)
from sharpscope.analysis.statistics import contrast_interval, mean_interval

if TYPE_CHECKING:
    from sharpscope.analysis.claims import Verdict


@plot(not_from_runs, "method", "gradient_rotation", "update_rotation")
def rotation(figure: Picture, frame: pd.DataFrame) -> None:
    """Angles by which methods turn the gradient and the optimizer's step, with the noise of the batch (column `noise`) dashed."""
    angles = ["gradient_rotation", "update_rotation"]
    shown = frame[frame[angles].notna().any(axis=1)]
    shown = shown.sort_values(
        angles[0],
        ascending=False,
        na_position="first",
        kind="stable",
    )
    (axis,) = figure.panels(1, 0.5 + 0.2 * len(shown))
    height = np.arange(len(shown))
    labels = ("gradient", "optimizer's step")
    marks = "os"
    for name, text, mark, color in zip(angles, labels, marks, colors()[:2], strict=True):
        axis.plot(shown[name], height, mark, color=color, label=text)
        if f"{name}_low" in shown:  # the range over batches
            ends = shown[f"{name}_low"], shown[f"{name}_high"]
            axis.hlines(
                height,
                *ends,
                color=color,
                linewidth=1.2,
                alpha=0.6,
            )
    noise = frame["noise"].iloc[0] if "noise" in frame and len(frame) else math.nan
    if math.isfinite(noise):
        text = f"noise of the batch, {noise:.0f}°"
        axis.axvline(
            noise,
            color=GRAY,
            linestyle="--",
            linewidth=1,
            label=text,
        )
    axis.set_yticks(height, [plain(name, 48) for name in shown["method"]])
    axis.set(xlabel="angle to the reference [°]", ylim=(-0.6, len(shown) - 0.4))
    axis.set_xlim(left=0)
    legend(figure)


@plot(not_from_runs, "method", "policy", "gradient_rotation", "update_rotation")
def rotation_map(figure: Picture, frame: pd.DataFrame) -> None:
    """Methods × policies: angle of each method's gradient to the reference's as a heat map, beside its angle after the optimizer."""
    table = frame.pivot(index="method", columns="policy", values="gradient_rotation")
    table = table.loc[table.mean(axis=1).sort_values(ascending=False).index]
    height = 0.8 + 0.15 * len(table)
    if figure.get_figwidth() > 5:
        figure.set_figheight(height)
        left, right = figure.subplots(1, 2, width_ratios=[3, 2])
    else:
        figure.set_figheight(height + 2.4)
        left, right = figure.subplots(2, 1, height_ratios=[height, 2.4])
    left.grid(visible=False)
    look = {
        "annot": True,
        "fmt": ".0f",
        "annot_kws": {"size": 6.5},
        "cbar": False,
    }
    sns.heatmap(
        table,
        cmap="cividis",
        vmin=0,
        vmax=90,
        ax=left,
        **look,
    )
    left.set_yticks(np.arange(len(table)) + 0.5, [plain(name, 30) for name in table.index])
    left.tick_params(length=0)
    left.tick_params(axis="x", rotation=20)
    left.set(xlabel="", ylabel="", title="angle of the gradient [°]")
    for policy, color, rows in colored(frame, "policy", color_of(frame["policy"])):
        angles = rows["gradient_rotation"], rows["update_rotation"]
        right.plot(
            *angles,
            "o",
            color=color,
            label=plain(policy),
            alpha=0.8,
        )
    right.axline(
        (0, 0),
        slope=1,
        color=GRAY,
        linewidth=0.8,
        linestyle="--",
    )
    right.set(xlabel="angle of the gradient [°]", ylabel="angle of the optimizer's step [°]")
    right.set(xlim=(0, None), ylim=(0, None))
    legend(figure)


@plot(not_from_runs, "outcome", "effect", "removal")
def removal(figure: Picture, frame: pd.DataFrame) -> None:
    """Effects of tokens against the change that their removal from the update makes, for each outcome, with the rank correlation.

    Frame: `outcome`; `effect`, what was computed of a token; `removal`, how much less the outcome changed without it. One unit.
    """
    for axis, outcome, every in figure.panels_by(frame, "outcome", 2.2, across=3):
        rows = every.dropna(subset=["effect", "removal"])
        axis.axline(
            (0, 0),
            slope=1,
            color=GRAY,
            linewidth=0.9,
            linestyle="--",
            label="equal",
        )
        sns.scatterplot(
            rows,
            x="removal",
            y="effect",
            color=colors()[0],
            s=12,
            linewidth=0,
            alpha=0.7,
            ax=axis,
        )
        rank = spearmanr(rows["effect"], rows["removal"]).statistic if len(rows) > 2 else math.nan
        unit = f" [{rows['unit'].iloc[0]}]" if "unit" in rows and len(rows) else ""
        titled(axis, f"{outcome}{unit}: rank correlation {rank:.2f}, n = {len(rows)}")
        axis.set(xlabel="measured by removal", ylabel="effect")
    legend(figure)


def paired_dots(verdict: Verdict) -> Figure:
    """The numbers that were tested, a dot for each pair and a line for each part, with mean and 95 % interval; dashed: the margin."""
    claim = verdict.claim
    parts = verdict.finding.parts
    margin = claim.margin_of_parts(verdict.terms) * (1 if claim.direction == "higher" else -1)
    unit = {"points": "points", "percent": "%", "log": "%"}.get(claim.scale, claim.effect_unit)

    def scaled(values: object) -> np.ndarray:
        """Values in the claim's unit."""
        data = np.asarray(values, float)
        return {"plain": data, "log": 100 * np.expm1(data)}.get(claim.scale, 100 * data)

    with styled():
        figure = picture(WIDTHS["two"])
        (axis,) = figure.panels(1, 0.5 + 0.3 * len(parts))
        axis.axvline(0, color=GRAY, linewidth=0.8)
        axis.axvline(
            float(scaled(margin)),
            color=GRAY,
            linewidth=0.8,
            linestyle="--",
        )
        for row, frame in enumerate(parts.values()):
            data = frame["difference"].to_numpy(float)
            interval = contrast_interval(data) or mean_interval(data)
            places = np.full(len(data), row)
            axis.plot(
                scaled(data),
                places,
                ".",
                color=GRAY,
                alpha=0.7,
                markersize=7,
            )
            if interval is not None:
                axis.plot(scaled([interval.low, interval.high]), [row, row], color=colors()[0])
            axis.plot(
                scaled(data.mean()),
                row,
                "o",
                color=colors()[0],
                markersize=5,
            )
        axis.set_yticks(range(len(parts)), [plain(name) for name in parts])
        label = fill(plain(f"{claim.effect} [{unit}]", 160), 60)
        axis.set(xlabel=label, ylim=(-0.6, len(parts) - 0.4))
    return figure
