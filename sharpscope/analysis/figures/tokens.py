"""Figures of tokens: from frames of sampled or summed token rows, one for each setting, to a Figure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sharpscope.analysis.bands import band
from sharpscope.analysis.figures.style import BLACK, GREY, Line, finish, panels, plain, styled
from sharpscope.analysis.token_frames import complement, lorenz, lower_factor, quantile_bins
from sharpscope.analysis.weight_curve import INPUTS, input_values, weight_at, weight_input

Lines = Mapping[str, Line]
Samples = Mapping[str, pd.DataFrame]

REST = "1 − π, one minus the token's probability"
SMALLEST = 1e-8  # where 1 − π is 0 in float32, it is drawn here


def weights(
    samples: Samples, shapings: Mapping[str, Mapping[str, Any]], lines: Lines, carried: pd.DataFrame | None = None
) -> Figure:
    """Token weights: the function of its own input (a panel for each kind of input), what was observed against π, and where
    along π the gradient is that they multiply.

    `samples`: setting -> tokens with logp, logit, entropy, weight. `shapings`: setting -> resolved shaping. `carried`: tokens with
    logp, loss_coef, weight and score_norm_local, of all settings together; None leaves the last panel out.
    """
    inputs = sorted({name for name in map(weight_input, shapings.values()) if name is not None})
    with styled():
        figure, axes = panels(len(inputs) + 1 + (carried is not None))
        if carried is not None:
            _carried(axes.pop(), carried)
        for axis, name in zip(axes, inputs, strict=False):
            for label, shaping in shapings.items():
                if weight_input(shaping) == name:
                    _function(axis, name, samples[label], shaping, lines[label], label)
            axis.set(xlabel=INPUTS[name], ylabel="weight w", title="function; grey: 10 to 90 % of the tokens")
        for label, tokens in samples.items():
            rest = np.maximum(complement(tokens["logp"].to_numpy()), SMALLEST)
            _quantiles(axes[-1], rest, tokens["weight"].to_numpy(dtype=float), lines[label], label)
        axes[-1].set(xscale="log", xlabel=REST, ylabel="weight w", title="observed: median, 10 to 90 %")
        axes[-1].invert_xaxis()
        finish(figure, list(figure.axes))
    return figure


def _carried(axis: Axes, tokens: pd.DataFrame) -> None:
    """Share of the tokens, and of the gradient |c|·‖∇ ln π‖/w that they carry without their weights, at 1 − π or above."""
    rest = np.maximum(complement(tokens["logp"].to_numpy()), SMALLEST)
    weight = tokens["weight"].to_numpy(dtype=float)
    pull = tokens["loss_coef"].abs().to_numpy(dtype=float) * tokens["score_norm_local"].to_numpy(dtype=float)
    carried = np.where(weight > 0, pull / np.where(weight > 0, weight, 1.0), 0.0)
    order = np.argsort(-rest, kind="stable")
    for values, label, color, dash in (
        (carried, "gradient carried without weights", BLACK, "-"),
        (np.ones(len(rest)), "tokens", GREY, "--"),
    ):
        share = np.cumsum(values[order]) / values.sum()
        axis.plot(rest[order], share, color=color, linestyle=dash, label=label)
    axis.set(xscale="log", xlabel=REST, ylabel="share at this 1 − π or above", title="where the gradient is")
    axis.invert_xaxis()


def _function(axis: Axes, name: str, tokens: pd.DataFrame, shaping: Mapping[str, Any], line: Line, label: str) -> None:
    u = input_values(name, tokens)
    grid = np.linspace(u.min(), u.max(), 300)
    weight = weight_at(shaping, grid)
    if weight is not None:
        axis.axvspan(*np.quantile(u, [0.1, 0.9]), color=GREY, alpha=0.08, linewidth=0)
        axis.plot(grid, weight, label=plain(label), **line.plot)


def _quantiles(axis: Axes, x: np.ndarray, y: np.ndarray, line: Line, label: str) -> None:
    rows = quantile_bins(x, y)
    marker = line.marker if len(rows) <= 12 else ""
    axis.plot(rows["x"], rows["q50"], label=plain(label), marker=marker, **line.plot)
    axis.fill_between(rows["x"], rows["q10"], rows["q90"], color=line.color, alpha=0.16, linewidth=0)


def logit_gradient(
    samples: Samples, lines: Lines, vocabulary: int | None, checks: Mapping[str, Mapping[str, Any]]
) -> Figure:
    """‖p − e_y‖ against 1 − π with claim C1's bounds, and the ratio of the two, which the bounds hold between 1 and √2.

    `samples`: setting -> tokens with logp, logit_grad_norm. `checks`: setting -> counts over *every* token.
    """
    tokens = sum(check["tokens"] for check in checks.values())
    broken = sum(check["below"] + check["above"] for check in checks.values())
    with styled():
        figure, axes = panels(2)
        lowest = 1.0
        for label, sample in samples.items():
            rest = np.maximum(complement(sample["logp"].to_numpy()), SMALLEST)
            norm = sample["logit_grad_norm"].to_numpy(dtype=float)
            lowest = min(lowest, float(rest[rest > SMALLEST].min(initial=1.0)))
            shown = (norm > 0) & (rest > SMALLEST)
            axes[0].plot(
                rest[shown][:4000], norm[shown][:4000], ".", color=lines[label].color, markersize=1.2, alpha=0.35,
                rasterized=True,
            )  # fmt: skip
            clear = rest > 1e-5  # below, rounding decides the ratio
            _quantiles(axes[1], rest[clear], norm[clear] / rest[clear], lines[label], label)
        grid = np.geomspace(lowest, 1, 50)
        for factor, dash, name in ((lower_factor(vocabulary), ":", "lower bound"), (np.sqrt(2), "--", "upper bound")):
            axes[0].plot(grid, factor * grid, color=BLACK, linestyle=dash, linewidth=1, label=name)
            axes[1].axhline(factor, color=BLACK, linestyle=dash, linewidth=1, label=name)
        axes[0].set(
            xscale="log", yscale="log", xlabel=REST, ylabel="‖p − e_y‖ [L2, logits]",
            title=f"{tokens:,} tokens checked, {broken:,} outside beyond rounding",
        )  # fmt: skip
        axes[1].set(xscale="log", xlabel=REST, ylabel="‖p − e_y‖ / (1 − π)", title="median, 10 to 90 %")
        finish(figure, axes)
    return figure


def score_norm(samples: Samples, lines: Lines, column: str) -> Figure:
    """Norm of ∇ ln π over all parameters against 1 − π: median, 10 to 90 %, and the law ∝ (1 − π) through the medians.

    `samples`: setting -> tokens with logp and `column` (score_norm or score_norm_local).
    """
    with styled():
        figure, (axis,) = panels(1, width=5.0, height=3.6)
        for label, sample in samples.items():
            rest = np.maximum(complement(sample["logp"].to_numpy()), SMALLEST)
            norm = sample[column].to_numpy(dtype=float)
            shown = norm > 0
            rest, norm = rest[shown], norm[shown]
            _quantiles(axis, rest, norm, lines[label], label)
            factor = float(np.median(norm / rest))
            ends = np.array([rest.min(), rest.max()])
            axis.plot(ends, factor * ends, color=lines[label].color, linewidth=0.9, linestyle=":", label="∝ (1 − π)")
        name = "‖∇ ln π‖" if column == "score_norm" else "‖∇ ln π‖, own position only"
        axis.set(xscale="log", yscale="log", xlabel=REST, ylabel=f"{name} [L2, parameters]", title="median, 10 to 90 %")
        finish(figure, [axis])
    return figure


def concentration(samples: Samples, lines: Lines, column: str) -> Figure:
    """Lorenz curves: share of Σ|c|·‖∇ ln π‖ that the largest tokens hold, against the null in which the norm is 1 − π.

    `samples`: setting -> tokens with logp, loss_coef and `column`.
    """
    with styled():
        figure, axes = panels(2)
        for label, sample in samples.items():
            coefficient = np.abs(sample["loss_coef"].to_numpy(dtype=float))
            found = lorenz(coefficient * sample[column].to_numpy(dtype=float))
            null = lorenz(coefficient * complement(sample["logp"].to_numpy()))
            for axis in axes:
                axis.plot(found["tokens"], found["mass"], label=plain(label), **lines[label].plot)
                axis.plot(
                    null["tokens"],
                    null["mass"],
                    color=lines[label].color,
                    linewidth=0.9,
                    linestyle=":",
                    label="if norm = 1 − π",
                )
        equal = np.geomspace(1e-4, 1, 100)
        for axis, scale in zip(axes, ("linear", "log"), strict=True):
            axis.plot(equal, equal, color=GREY, linewidth=0.8, label="all tokens equal")
            axis.set(
                xscale=scale, ylim=(0, 1.02), xlabel="share of tokens, largest first", ylabel="share of Σ |c|·‖∇ ln π‖"
            )
        axes[1].set_xlim(1e-4, 1)
        finish(figure, axes)
    return figure


def deciles(sums: pd.DataFrame, lines: Lines, axis_label: str, *, by_sign: bool = False) -> Figure:
    """A quantity summed over the tokens of each probability decile: mean and 95 % t-interval over seeds.

    `sums`: setting, seed, decile, value, and with `by_sign` also sign: then a panel for each sign of the advantage.
    """
    signs = [(1, "advantage > 0"), (-1, "advantage < 0")] if by_sign else [(None, "all tokens")]
    with styled():
        figure, axes = panels(len(signs))
        labels = sorted(sums["setting"].unique())
        for axis, (sign, title) in zip(axes, signs, strict=True):
            chosen = sums if sign is None else sums[sums["sign"] == sign]
            for number, label in enumerate(labels):
                rows = band(chosen[chosen["setting"] == label], ["decile"])
                shift = 0.16 * (number - (len(labels) - 1) / 2)
                half = (rows["high"] - rows["mean"]).fillna(0)
                axis.errorbar(
                    rows["decile"] + shift, rows["mean"], yerr=half, fmt=lines[label].marker, color=lines[label].color,
                    capsize=2, linewidth=1, label=plain(label),
                )  # fmt: skip
            axis.axhline(0, color=GREY, linewidth=0.8)
            axis.set(xlabel="decile of π, 1 = least likely", ylabel=axis_label, title=title, xticks=range(1, 11))
        finish(figure, axes)
    return figure
