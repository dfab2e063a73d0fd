"""Figures of tokens: from frames of sampled or summed token rows, one for each setting, to a Figure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sharpscope.analysis.figures.draw import draw_points, symlog
from sharpscope.analysis.figures.style import BLACK, BLUE, GRAY, Line, Lines, finish, panels, setting_text, styled
from sharpscope.analysis.figures.style import lines as method_lines
from sharpscope.analysis.tokens import complement, inverse_inclusion
from sharpscope.analysis.weight_curve import INPUTS, weight_at, weight_input, weight_inputs

Samples = Mapping[str, pd.DataFrame]

REST = "1 − π of the token"
SMALLEST = 1e-8  # where 1 − π is 0 in float32, it is drawn here


def weights(
    samples: Samples, shapings: Mapping[str, Mapping[str, Any]], lines: Lines, carried: pd.DataFrame | None = None
) -> Figure:
    """Token weights as functions of their input, as observed against π, and the share of the gradient along π.

    `samples`: setting -> tokens with logp, logit, entropy, weight. `shapings`: setting -> resolved shaping. `carried`: tokens with
    logp, loss_coef, weight, score_norm_local and inclusion_probability, of all settings together; None leaves the last panel out.
    """
    inputs = sorted({name for name in map(weight_input, shapings.values()) if name is not None})
    with styled():
        figure, axes = panels(len(inputs) + 1 + (carried is not None), columns=2 if len(inputs) > 1 else 3, height=2.1)
        drawn = list(axes)
        if carried is not None:
            _carried(drawn.pop(), carried)
        for axis, name in zip(drawn, inputs, strict=False):
            for label, shaping in shapings.items():
                if weight_input(shaping) == name:
                    _function(axis, samples[label], shaping, lines[label], label)
            axis.set(xlabel=INPUTS[name], ylabel="weight w [1]", title="function\n(gray: 80 % of tokens)")
        for label, tokens in samples.items():
            rest = np.maximum(complement(tokens["logp"].to_numpy()), SMALLEST)
            draw_quantiles(drawn[-1], rest, tokens["weight"].to_numpy(dtype=float), lines[label], label)
        drawn[-1].set(xscale="log", xlabel=REST, ylabel="weight w [1]", title="observed\n(median, 10 to 90 %)")
        drawn[-1].invert_xaxis()
        finish(figure, axes)
    return figure


def weight_functions(curves: pd.DataFrame, on_tokens: pd.DataFrame | None = None) -> Figure:
    """Weights over logit and probability; below, the median weight of a run's tokens with 10 to 90 % bands.

    `curves`: method, axis (logit | probability), x, weight. `on_tokens`: method, logit, probability, weight of each token.
    """
    import seaborn as sns

    xlabels = {"logit": "raw logit of the token", "probability": "probability π of the token"}
    styles = method_lines(dict.fromkeys([*curves["method"], *(on_tokens["method"] if on_tokens is not None else [])]))
    with styled():
        figure, axes = panels(4 if on_tokens is not None else 2)
        for number, axis in enumerate(axes):
            name = list(xlabels)[number % 2]
            title = "on the run's tokens, calibrated there" if number > 1 else "function, published constants"
            source = curves[curves["axis"] == name] if number < 2 else on_tokens
            for method, part in () if source is None else source.groupby("method", sort=False):
                points = part.assign(
                    x=part["x"] if number < 2 else _bin_medians(part[name], equal_counts=name == "logit")
                )
                look: dict[str, Any] = {"errorbar": ("pi", 80) if number > 1 else None, "err_kws": {"linewidth": 0}}
                look |= {"label": setting_text(method), "legend": False, "estimator": "median"}
                sns.lineplot(points, x="x", y="weight", ax=axis, **look, **styles[str(method)].plot)
            axis.set(xlabel=xlabels[name], ylabel="token weight w [1]", title=title)
        finish(figure, axes)
    return figure


def _bin_medians(values: pd.Series, *, equal_counts: bool, bins: int = 20) -> pd.Series:
    """Each value replaced by the median of its bin; the bins have equal counts or equal widths."""
    binned = pd.qcut(values, bins, duplicates="drop") if equal_counts else pd.cut(values, bins)
    return values.groupby(binned, observed=True).transform("median")


def _carried(axis: Axes, tokens: pd.DataFrame) -> None:
    """Share of the tokens, and of the gradient |c|·‖∇ ln π‖/w that they carry without their weights, at 1 − π or above."""
    rest = np.maximum(complement(tokens["logp"].to_numpy()), SMALLEST)
    weight = tokens["weight"].to_numpy(dtype=float)
    pull = tokens["loss_coef"].abs().to_numpy(dtype=float) * tokens["score_norm_local"].to_numpy(dtype=float)
    count = inverse_inclusion(tokens)
    carried = np.where(weight > 0, count * pull / np.where(weight > 0, weight, 1.0), 0.0)
    order = np.argsort(-rest, kind="stable")
    for values, label, color, dash in (
        (carried, "gradient carried without weights", BLACK, "-"),
        (count, "tokens", GRAY, "--"),
    ):
        share = np.cumsum(values[order]) / values.sum()
        axis.plot(rest[order], share, color=color, linestyle=dash, label=label)
    axis.set(xscale="log", xlabel=REST, ylabel="share at this 1 − π or above", title="where the\ngradient is")
    axis.invert_xaxis()


def _function(axis: Axes, tokens: pd.DataFrame, shaping: Mapping[str, Any], line: Line, label: str) -> None:
    u = weight_inputs(shaping, tokens)
    grid = np.linspace(u.min(), u.max(), 300)
    weight = weight_at(shaping, grid)
    if weight is not None:
        axis.axvspan(*np.quantile(u, [0.1, 0.9]), color=GRAY, alpha=0.08, linewidth=0)
        axis.plot(grid, weight, label=setting_text(label), **line.plot)


def draw_quantiles(axis: Axes, x: np.ndarray, y: np.ndarray, line: Line, label: str) -> None:
    """Median and 10 to 90 % band of y in bins of ln x; see `log_bins`."""
    import seaborn as sns

    points = log_bins(x, y)
    marker = line.marker if points["x"].nunique() <= 12 else ""
    look: dict[str, Any] = {"color": line.color, "linestyle": line.dash, "marker": marker, "legend": False}
    look |= {"estimator": "median", "errorbar": ("pi", 80), "err_kws": {"linewidth": 0, "alpha": 0.16}}
    sns.lineplot(points, x="x", y="y", ax=axis, label=setting_text(label), **look)


def score_norms(samples: Samples, lines: Lines, exact: np.ndarray | None = None) -> Figure:
    """Norm of ∇ ln π over all parameters against 1 − π, with the law ∝ (1 − π) through the median ratio (dotted).

    Args:
        samples: setting → tokens with logp and score_norm_local: median and 10 to 90 %.
        lines: of the settings.
        exact: (n, 2) 1 − π and exact norm of tokens of all settings together, in a panel of their own.
    """
    with styled():
        figure, axes = panels(bool(samples) + (exact is not None), height=2.4)
        for label, sample in samples.items():
            rest = np.maximum(complement(sample["logp"].to_numpy()), SMALLEST)
            norm = sample["score_norm_local"].to_numpy(dtype=float)
            rest, norm = rest[norm > 0], norm[norm > 0]
            draw_quantiles(axes[0], rest, norm, lines[label], label)
            ends = np.array([rest.min(), rest.max()])
            law = float(np.median(norm / rest)) * ends
            axes[0].plot(ends, law, color=lines[label].color, linewidth=0.9, linestyle=":", label="∝ (1 − π)")
            axes[0].set(ylabel="‖∇ ln π‖, own position only [L2, parameters]", title="median, 10 to 90 %")
        if exact is not None:
            x, y = exact[(exact > 0).all(axis=1)].T
            axes[-1].plot(x, y, ".", color=BLUE, markersize=1.5, alpha=0.2, rasterized=True, label="token, exact norm")
            if len(x):
                ends = np.array([x.min(), x.max()])
                axes[-1].plot(ends, np.median(y / x) * ends, ":", color=GRAY, label="∝ (1 − π)")
            axes[-1].set(ylabel="‖∇ ln π‖, exact [L2, parameters]", title="tokens of all settings")
        for axis in axes:
            axis.set(xscale="log", yscale="log", xlabel=REST)
        finish(figure, axes)
    return figure


def draw_deciles(content: Mapping[str, pd.DataFrame], lines: Lines, axis_label: str) -> Figure:
    """A quantity by probability decile on a symmetric-logarithmic axis: mean and 95 % t-interval over seeds.

    `content`: title of a panel → setting, seed, decile (1 = least likely), value.
    """
    labels = sorted({label for frame in content.values() for label in frame["setting"]})
    palette = {label: lines[label].color for label in labels}
    look: dict[str, Any] = {"hue": "setting", "hue_order": labels, "markersize": 2.5}
    look |= {"dodge": 0.2 * (len(labels) - 1), "markers": [lines[label].marker for label in labels]}
    with styled():
        figure, axes = panels(len(content), sharey=True, height=2.4)
        for number, (axis, (title, frame)) in enumerate(zip(axes, content.items(), strict=True)):
            draw_points(axis, frame, palette, x="decile", y="value", order=range(1, 11), **look)
            axis.axhline(0, color=GRAY, linewidth=0.8)
            axis.set(xlabel="decile of π, 1 = least likely", ylabel="" if number else axis_label, title=title)
        # After drawing: seaborn would average on the scale of the axis.
        symlog(axes[0].yaxis, pd.concat([own["value"] for own in content.values()]), share=0.5)
        for label in labels:
            axes[0].plot(
                [], [], linestyle="none", marker=lines[label].marker, color=palette[label], label=setting_text(label)
            )
        finish(figure, axes)
    return figure


def log_bins(x: np.ndarray, y: np.ndarray, bins: int = 24) -> pd.DataFrame:
    """The points with x replaced by the geometric mean of its bin, of `bins` equal ones in ln x: x, y.

    Bins of fewer than 5 points are left out.
    """
    scale = np.log(x)
    points = pd.DataFrame({"scale": scale, "y": y, "bin": pd.cut(scale, bins, labels=False) if len(x) else []})
    groups = points.groupby("bin")["scale"]
    return points.assign(x=np.exp(groups.transform("mean")))[groups.transform("size") >= 5][["x", "y"]]
