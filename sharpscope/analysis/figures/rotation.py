"""Rotation of gradients and updates by methods: rays at their angles, with the angle of the batch's noise shaded."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Wedge

from sharpscope.analysis.figures.style import COLORS, GRAY, panels, plain

TOGETHER = 1.0
"""Rays closer than this have one label [degrees]."""
GAP = 0.06
"""Distance between labels [radii]."""


def rotation_figure(table: pd.DataFrame, noise: float) -> Figure:
    """Rays at each method's angle from the reference direction, above for gradients and below for optimizer steps.

    Args:
        table: columns `method`, `gradient_rotation` and `update_rotation` [degrees]; rows without an angle are left out.
        noise: angle between the batch's gradient and the expected gradient [degrees], shaded in the first panel; NaN: none.
    """
    figure, axes = panels(2, columns=1, height=3.0)
    figure.set_figwidth(6.0)
    shaded = f"; shaded: the noise of the batch, {noise:.0f}°" if math.isfinite(noise) else ""
    order = {method: number for number, method in enumerate(table["method"])}  # one color in both panels
    titles = {"gradient_rotation": f"gradient{shaded}", "update_rotation": "optimizer's step"}
    for axis, (column, title) in zip(axes, titles.items(), strict=True):
        rays = table.loc[table[column].notna(), ["method", column]].sort_values(column, kind="stable")
        end = 90.0 if rays.empty or rays[column].iloc[-1] <= 90 else 180.0
        if column == "gradient_rotation" and math.isfinite(noise):
            axis.add_patch(Wedge((0, 0), 1, 0, noise, color=GRAY, alpha=0.2, lw=0))
        bundles = _bundles(rays["method"].tolist(), rays[column].tolist())
        heights = _spread([math.sin(math.radians(angle)) for angle, _ in bundles])
        _frame(axis, end, max(heights, default=0.0), title)
        for (angle, names), height in zip(bundles, heights, strict=True):
            color = COLORS[min(order[name] for name in names) % len(COLORS)]
            x, y = math.cos(math.radians(angle)), math.sin(math.radians(angle))
            axis.plot([0, x], [0, y], color=color, lw=1.4)
            axis.plot([x, 1.1, 1.15], [y, height, height], color=color, lw=0.5, alpha=0.7)
            axis.text(1.17, height, plain(f"{angle:.1f}° {_names(names)}", 120), fontsize=7, color=color, va="center")
    return figure


def _frame(axis: Axes, end: float, top: float, title: str) -> None:
    """A circle's sector from 0 to `end` degrees with a tick every 15, and room for labels up to `top`."""
    arc = np.radians(np.linspace(0, end, 181))
    axis.plot(np.cos(arc), np.sin(arc), color="black", lw=0.8)
    for tick in np.radians(np.arange(0, end + 1, 15)):
        axis.plot([0.97 * np.cos(tick), np.cos(tick)], [0.97 * np.sin(tick), np.sin(tick)], color="black", lw=0.8)
    axis.plot([-1 if end > 90 else 0, 1], [0, 0], color="black", lw=0.8)
    axis.set(xlim=(-1.02 if end > 90 else -0.02, 2.7), ylim=(-0.04, max(1.04, top + 0.04)), aspect="equal")
    axis.set_title(plain(title), loc="left")
    axis.axis("off")


def _bundles(methods: Sequence[str], angles: Sequence[float]) -> list[tuple[float, list[str]]]:
    """(mean angle, methods) of rays that share a label; `angles` ascend."""
    bundles: list[list[tuple[float, str]]] = []
    for angle, method in zip(angles, methods, strict=True):
        if bundles and angle - bundles[-1][0][0] < TOGETHER:
            bundles[-1].append((angle, method))
        else:
            bundles.append([(angle, method)])
    return [(float(np.mean([a for a, _ in bundle])), [name for _, name in bundle]) for bundle in bundles]


def _names(names: Sequence[str], most: int = 4) -> str:
    rest = len(names) - most
    return ", ".join(names) if rest <= 1 else f"{', '.join(names[:most])} and {rest} others"


def _spread(heights: Sequence[float]) -> list[float]:
    """Heights of labels: in the order of the angles, `GAP` apart at least, close to the ends of their rays."""
    placed: list[float] = []
    for height in heights:
        placed.append(max(height, placed[-1] + GAP) if placed else height)
    return placed
