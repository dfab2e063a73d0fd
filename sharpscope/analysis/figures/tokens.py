"""Figures of tokens: from frames of sampled or summed token rows, one for each setting, to a Figure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sharpscope.analysis.figures.draw import draw_points, symlog
from sharpscope.analysis.figures.style import BLUE, GRAY, Line, Lines, finish, panels, setting_text, styled
from sharpscope.analysis.tokens import complement

Samples = Mapping[str, pd.DataFrame]

REST = "1 − π of the token"
SMALLEST = 1e-8  # where 1 − π is 0 in float32, it is drawn here


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
