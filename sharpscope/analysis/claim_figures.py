"""Figures of the claims: each from one frame (see the claim's module for its columns) to a Figure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from sharpscope.analysis.bands import band
from sharpscope.analysis.figures.style import (
    BLUE,
    COLORS,
    GREY,
    MARKERS,
    VERMILLION,
    Line,
    finish,
    panels,
    plain,
    styled,
)
from sharpscope.analysis.statistics import contrast_interval

Lines = Mapping[str, Line]


def influence_by_decile(cells: pd.DataFrame) -> Figure:
    """Held-out influence by decile of probability, a panel for each advantage sign; bands over seeds (C9).

    `cells`: advantage (positive | negative), decile (1 = least likely), influence (step's mean |influence|),
    seed, step.
    """
    with styled():
        figure, axes = panels(2)
        for axis, sign in zip(axes, ("positive", "negative"), strict=True):
            rows = cells[(cells["advantage"] == sign) & cells["influence"].notna()]
            means = rows.groupby(["decile", "seed"])[["influence"]].mean().reset_index()
            points = band(means, ["decile"], "influence")
            axis.axhline(0, color=GREY, linewidth=0.8)
            label = "mean over seeds and steps of the baseline"
            axis.errorbar(
                points["decile"], points["mean"], yerr=_half(points), fmt="o-", color=BLUE, capsize=2, label=label
            )
            axis.set(
                xlabel="decile of π (1: least likely)",
                ylabel="influence [step's mean |influence|]; below 0 hurts",
                title=f"{sign} advantage",
            )
        finish(figure, axes)
    return figure


def bound_tightness(bound: pd.DataFrame) -> Figure:
    """Failures and the bound at the fixed radius along training, and the first-order term's share of it (C5).

    `bound`: step, seed, rho, fixed_rho, tested, train, heldout, sharpness, first_order, bound; only tested seeds are drawn.
    """
    rows = bound[np.isclose(bound["rho"], bound["fixed_rho"]) & bound["tested"]]
    rows = rows.assign(
        first_bound=rows["train"] + rows["first_order"], tightness=rows["first_order"] / rows["sharpness"]
    )
    curves = (
        ("heldout", "held-out failure", BLUE, "-"),
        ("train", "training failure", GREY, "-"),
        ("bound", "training failure + sharpness", VERMILLION, "-"),
        ("first_bound", "training failure + rho·‖∇L‖", VERMILLION, "--"),
    )
    with styled():
        figure, axes = panels(2)
        for column, label, color, dash in curves:
            _curve(axes[0], rows, column, label, color, dash)
        rho = float(bound["fixed_rho"].iloc[0])
        axes[0].set(
            xlabel="step",
            ylabel="failure [share of completions]",
            title=f"rho = {rho:g}, fixed on seeds that are not drawn",
        )
        _curve(axes[1], rows, "tightness", "", BLUE, "-")
        axes[1].axhline(1, color=GREY, linewidth=0.8)
        axes[1].set(xlabel="step", ylabel="rho·‖∇L‖ / sharpness", title="1: first order is all of it")
        finish(figure, axes)
    return figure


def gap_against_sharpness(grid: pd.DataFrame, quantity: str = "asam") -> Figure:
    """Generalisation gap against sharpness; colour: learning rate, marker: group size, hollow: with more than the least
    decay, line: same grid but for decay (C6).

    `grid`: gap, the sharpness `quantity`, method, seed, and the grid's settings.
    """
    shorts = (("learning rate", "lr"), ("group size", "G"), ("weight decay", "decay"))
    named = {axis: short for axis, short in shorts if axis in grid}
    places = {axis: sorted(grid[axis].unique()) for axis in named}
    with styled():
        figure, axes = panels(1, width=5.0, height=3.4)
        for values, rows in grid.groupby(list(named)) if named else [((), grid)]:
            at = dict(zip(named, values, strict=True))
            color, marker = (
                looks[places[axis].index(at[axis]) % len(looks)] if axis in at else looks[0]
                for axis, looks in (("learning rate", COLORS), ("group size", MARKERS))
            )
            label = ", ".join(f"{named[axis]} {value:g}" for axis, value in at.items())
            fill: Literal["full", "none"] = (
                "none" if at.get("weight decay", 0) != places.get("weight decay", [0])[0] else "full"
            )
            axes[0].plot(
                rows[quantity], rows["gap"], linestyle="none", marker=marker, color=color, label=label, fillstyle=fill
            )
            if "weight decay" not in at or fill == "none":
                continue  # a line for each, not for each of its ends
            rest = [axis for axis in at if axis != "weight decay"]
            alike = grid[(grid[rest] == rows[rest].iloc[0]).all(axis=1)] if rest else grid
            for _, same in alike.groupby(["method", "seed"]):
                ordered = same.sort_values("weight decay")
                axes[0].plot(ordered[quantity], ordered["gap"], color=color, linewidth=0.6, alpha=0.6)
        if (grid[quantity] > 0).all():
            axes[0].set_xscale("log")
            axes[0].xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            axes[0].xaxis.set_major_formatter("{x:g}")
            axes[0].xaxis.set_minor_formatter(NullFormatter())
        axes[0].set(xlabel=f"sharpness ({quantity}) [nats]", ylabel="training − held-out accuracy [share]")
        finish(figure, axes)
    return figure


def shaping_ablation(comparisons: pd.DataFrame) -> Figure:
    """Held-out accuracy of the treatment minus that of each control and rival, with 95 % intervals over seeds (C10).

    `comparisons`: rival, seed, difference.
    """
    with styled():
        names = list(dict.fromkeys(comparisons["rival"]))
        figure, axes = panels(1, width=5.4, height=0.6 + 0.32 * len(names))
        axes[0].axvline(0, color=GREY, linewidth=0.8)
        for place, name in enumerate(names):
            values = comparisons.loc[comparisons["rival"] == name, "difference"].to_numpy(dtype=float)
            axes[0].plot(values, np.full(len(values), place), "|", color=GREY, markersize=7)
            interval = contrast_interval(values)
            if interval is not None:
                axes[0].plot([interval.low, interval.high], [place, place], color=BLUE, linewidth=2)
            axes[0].plot([values.mean()], [place], "o", color=BLUE)
        axes[0].set_yticks(range(len(names)), [plain(name) for name in names])
        axes[0].invert_yaxis()
        axes[0].set(xlabel="held-out accuracy, treatment − rival [share]; ticks: seeds")
        finish(figure, axes)
    return figure


def constants_sensitivity(values: pd.DataFrame) -> Figure:
    """Held-out accuracy against each constant of the shaping, all others as they are; bands over seeds.

    `values`: constant, setting (a number), seed, accuracy; the method's own setting is marked by `default` = True.
    """
    names = sorted(values["constant"].unique())
    with styled():
        figure, axes = panels(len(names), columns=3)
        for axis, name in zip(axes, names, strict=True):
            rows = values[values["constant"] == name]
            points = band(rows, ["setting"], "accuracy")
            axis.errorbar(points["setting"], points["mean"], yerr=_half(points), fmt="o-", color=BLUE, capsize=2)
            for own in rows.loc[rows["default"], "setting"].unique():
                axis.axvline(own, color=GREY, linewidth=0.8, linestyle="--")
            axis.set(xlabel=plain(name), ylabel="held-out accuracy [share]")
        finish(figure, axes)
    return figure


def lucky_spikes(shares: pd.DataFrame, lines: Lines) -> Figure:
    """Gradient share of lucky and of confident tokens by step and method, with the weights and without (C13).

    Steps that most seeds recorded, see `_regular`; the claim itself compares the steps that both runs of a pair have.

    `shares`: method, seed, step, lucky, confident, lucky_unweighted, confident_unweighted.
    """
    with styled():
        figure, axes = panels(2)
        for axis, column, title in zip(axes, ("lucky", "confident"), ("unlikely, A > 0", "confident"), strict=True):
            for method, rows in shares.groupby("method"):
                line = lines[str(method)]
                _curve(axis, rows, column, plain(method), line.color, line.dash)
                if not np.allclose(rows[column], rows[f"{column}_unweighted"]):
                    without = band(_regular(rows, f"{column}_unweighted"), ["step"], f"{column}_unweighted")
                    label = plain(f"{method}, weights taken out")
                    axis.plot(without["step"], without["mean"], color=line.color, linestyle=":", label=label)
            axis.set(xlabel="step", ylabel="share of Σ|c|·‖∇ log π‖", title=title)
        finish(figure, axes)
    return figure


def entropy_prediction(prediction: pd.DataFrame, lines: Lines) -> Figure:
    """Measured against predicted change of entropy, each in its run's standard deviations; means of ten bins (C12).

    `prediction`: run, method, predicted, measured.
    """
    with styled():
        figure, axes = panels(1, width=4.2, height=3.4)
        axes[0].axhline(0, color=GREY, linewidth=0.8)
        axes[0].axvline(0, color=GREY, linewidth=0.8)
        for method, rows in prediction.groupby("method"):
            spread = rows.groupby("run")[["predicted", "measured"]].transform("std").replace(0.0, np.nan)
            scaled = (rows[["predicted", "measured"]] / spread).dropna()
            if len(scaled) < 10:
                continue
            line = lines[str(method)]
            axes[0].plot(
                scaled["predicted"],
                scaled["measured"],
                ".",
                color=line.color,
                alpha=0.15,
                markersize=3,
                rasterized=True,
            )
            bins = pd.qcut(scaled["predicted"].rank(method="first"), 10, labels=False)
            means = scaled.groupby(bins).mean()
            axes[0].plot(means["predicted"], means["measured"], marker=line.marker, label=plain(method), **line.plot)
        axes[0].set(xlabel="predicted ΔH [run's std]", ylabel="measured ΔH [run's std]")
        finish(figure, axes)
    return figure


def reward_fit(curves: Mapping[str, pd.DataFrame]) -> Figure:
    """Reward of a run, the damped oscillator and its overdamped limit, a panel for each run (C11).

    `curves`: title → step, reward, oscillator, exponential.
    """
    with styled():
        figure, axes = panels(len(curves))
        for axis, (title, rows) in zip(axes, curves.items(), strict=True):
            axis.plot(rows["step"], rows["reward"], ".", color=GREY, markersize=3, label="reward")
            axis.plot(rows["step"], rows["oscillator"], color=VERMILLION, label="damped oscillator")
            axis.plot(rows["step"], rows["exponential"], color=BLUE, linestyle="--", label="single exponential")
            axis.set(xlabel="step", ylabel="mean reward", title=plain(title))
        finish(figure, axes)
    return figure


def _curve(axis: Axes, rows: pd.DataFrame, column: str, label: str, color: str, dash: object) -> None:
    """Mean over seeds by step with its 95 % band; several runs of a seed are averaged first."""
    points = band(_regular(rows, column), ["step"], column)
    if not len(points):
        return
    marker = "o" if len(points) <= 12 else ""
    axis.plot(
        points["step"], points["mean"], marker=marker, markersize=3, color=color, linestyle=dash, label=label or None
    )
    axis.fill_between(points["step"], points["low"], points["high"], color=color, alpha=0.16, linewidth=0)


def _regular(rows: pd.DataFrame, column: str) -> pd.DataFrame:
    """step, seed and their mean, of the steps that more than half of the seeds have.

    A spike's step is recorded out of turn in the one run that has the spike: no mean over seeds, and what made it stand out
    would stand out in the curve.
    """
    means = rows.groupby(["step", "seed"])[[column]].mean().dropna().reset_index()
    return means[2 * means.groupby("step")["seed"].transform("size") > means["seed"].nunique()]


def _half(points: pd.DataFrame) -> np.ndarray:
    """Half-widths of the bands, 0 where one seed gives none."""
    return np.nan_to_num((points["high"] - points["mean"]).to_numpy(dtype=float))
