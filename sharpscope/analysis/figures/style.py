"""One look for every figure: colors that color-blind readers can tell apart, one fixed line for each method."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator, ScalarFormatter

from sharpscope.analysis.text import printable

BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, BLACK = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#000000",
)
"""Okabe and Ito's palette, without its yellow, which is lost on white."""

COLORS = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, BLACK)
DASHES: tuple[Any, ...] = (
    "-",
    (0, (5, 2)),
    (0, (1.5, 1.5)),
    (0, (6, 2, 1, 2)),
    (0, (3, 1, 1, 1, 1, 1)),
    (0, (9, 2)),
    (0, (2, 4)),
    (0, (9, 2, 3, 2)),
)
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "p")
GRAY = "#777777"

# method -> (color, dash): families share a color
_FIXED = {
    "grpo": (0, 0),
    "grpo-sg": (1, 0),
    "tr-grpo": (4, 0),
    "ar": (2, 0),
    "lopti": (2, 1),
    "ar-lopti": (2, 2),
    "cov-grpo": (3, 0),
    "clip-cov": (3, 1),
    "kl-cov": (3, 2),
    "gspo": (5, 0),
    "holder": (5, 1),
    "dapo": (6, 0),
    "dr-grpo": (6, 1),
    "cispo": (6, 2),
    "papo": (6, 3),
    "ppo-ewma": (0, 3),
    "high-entropy": (5, 2),
    "grpo-sam": (0, 1),
    "grpo-gnp": (0, 2),
    "grpo-sg-shuffled": (2, 3),
    "grpo-sg-reverse": (3, 3),
    "grpo-sg-constant": (4, 1),
    "grpo-sg-entropy": (5, 3),
    "grpo-sg-mean-one": (6, 4),
    "lite-ppo": (0, 5),
    "rloo": (1, 5),
    "reinforce-pp": (2, 5),
    "reinforce-pp-baseline": (2, 6),
    "opo": (3, 5),
    "otb": (3, 6),
    "gdpo": (4, 5),
    "maxrl": (5, 5),
    "bnpo": (6, 5),
    "dual-clip": (0, 6),
    "sapo": (0, 7),
    "gmpo": (1, 6),
    "dppo": (4, 6),
    "dppo-kl": (4, 7),
    "luspo": (5, 6),
    "vespo": (6, 6),
}
_CONTROLS = {"shuffled": 1, "reverse": 2, "constant": 3, "mean-one": 4, "entropy": 3}

_RC: Any = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.labelsize": 9,
    "legend.fontsize": 8,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#E5E5E5",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "lines.linewidth": 1.6,
    "lines.markersize": 4,
    "legend.frameon": False,
    "figure.dpi": 100,
    "savefig.dpi": 160,
    "svg.hashsalt": "sharpscope",
    "svg.fonttype": "none",
    "text.usetex": False,
}


_CURVE = re.compile(r"[CQSTAHV]")  # what an SVG's path holds beside lines
_PATH, _LONG = (
    re.compile(r'\bd="[^"]*"'),
    re.compile(r"-?\d+\.\d{3,}"),
)  # of an SVG: coordinates of a path, and long ones among them


@dataclass(frozen=True)
class Picture:
    """A figure with its file name and caption, or `missing`: why there is none. `claim`: the one it belongs to, if any."""

    name: str
    caption: str
    figure: Figure | None = None
    missing: str = ""
    claim: str = ""


@dataclass(frozen=True)
class Line:
    """How one setting is drawn: color, dash pattern, marker."""

    color: str
    dash: Any
    marker: str

    @property
    def plot(self) -> dict[str, Any]:
        """Keyword arguments of Axes.plot."""
        return {"color": self.color, "linestyle": self.dash}


Lines = Mapping[str, Line]


def lines(labels: Iterable[str]) -> dict[str, Line]:
    """One line per label, the same in every figure of a study: the method's own if it has one, else the next free one.

    A label is a method's name, or begins with it (`grpo-sg weight.tau=4`, `grpo-sg-shuffled`).
    """
    taken: set[tuple[int, int]] = set()
    result: dict[str, Line] = {}
    # labels that are a method's very name come first, so that a variant never takes its line
    for label in sorted(set(labels), key=lambda text: (text not in _FIXED, text)):
        place = _first_free(_preferred(label), taken)
        taken.add(place)
        result[label] = Line(COLORS[place[0]], DASHES[place[1]], MARKERS[place[1]])
    return result


def _preferred(label: str) -> tuple[int, int] | None:
    names = [name for name in _FIXED if label == name or label.startswith((f"{name}-", f"{name} ", f"{name}+"))]
    if not names:
        return None
    name = max(names, key=len)
    rest = label[len(name) :].lstrip("-")
    control = next((dash for suffix, dash in _CONTROLS.items() if rest.startswith(suffix)), None)
    color, dash = _FIXED[name]
    return (color, dash if control is None else control)


def _first_free(preferred: tuple[int, int] | None, taken: set[tuple[int, int]]) -> tuple[int, int]:
    start = preferred or (0, 0)
    same_color = [(start[0], (start[1] + i) % len(DASHES)) for i in range(len(DASHES))] if preferred else []
    every = [(color, dash) for dash in range(len(DASHES)) for color in range(len(COLORS))]
    return next((place for place in [*same_color, *every] if place not in taken), start)


def styled() -> AbstractContextManager[None]:
    """Context in which figures are made and saved; matplotlib's own settings come back afterwards."""
    return mpl.rc_context(_RC)


def panels(count: int, *, columns: int = 2, width: float = 3.6, height: float = 2.7) -> tuple[Figure, list[Axes]]:
    """A figure with `count` equal axes in rows of `columns`; made without pyplot, so no global state."""
    columns = min(count, columns)
    rows = -(-count // columns)
    figure = Figure(figsize=(width * columns + 0.4, height * rows + 0.5), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    for spare in grid[count:]:
        spare.remove()
    return figure, list(grid[:count])


def half_widths(points: pd.DataFrame) -> np.ndarray:
    """Half-widths of the intervals of `band`, 0 where one seed gives none."""
    return np.nan_to_num((points["high"] - points["mean"]).to_numpy(dtype=float))


def plain(text: object, limit: int = 60) -> str:
    """Text as a figure's label: no math mode, and shown in legends also if it begins with an underscore."""
    clean = printable(text, limit)
    return ("\u200b" + clean if clean.startswith("_") else clean).replace("$", r"\$")


def finish(figure: Figure, axes: Sequence[Axes]) -> None:
    """Fold long axis labels, keep ticks apart, and one legend above all panels with each label once."""
    found: dict[str, Any] = {}
    for axis in axes:
        for ticked in (axis.xaxis, axis.yaxis):
            _few_ticks(ticked)
        axis.set_ylabel(fill(axis.get_ylabel(), 30))
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    if found:
        # 0.065 inch a letter and 0.55 inch for the line: a legend wider than its figure would be cut off.
        fitting = int(figure.get_figwidth() / (0.55 + 0.065 * max(map(len, found))))
        columns = max(1, min(len(found), 3, fitting))
        figure.set_figheight(figure.get_figheight() + 0.17 * max(0, -(-len(found) // columns) - 2))
        figure.legend(found.values(), found.keys(), loc="outside upper center", ncols=columns)


def _few_ticks(axis: Axis) -> None:
    """On a logarithmic axis of less than a decade matplotlib labels every minor tick, one over the other."""
    low, high = sorted(axis.get_view_interval())  # an inverted axis gives the larger end first
    if axis.get_scale() == "log" and low > 0 and high < 10 * low:
        axis.set_major_locator(MaxNLocator(4))
        axis.set_major_formatter(ScalarFormatter())
        axis.set_minor_locator(NullLocator())


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write `name`.png and `name`.svg; equal figures give equal files."""
    paths = [folder / f"{name}.png", folder / f"{name}.svg"]
    with styled():
        figure.savefig(paths[0], metadata={"Software": None})
        figure.set_layout_engine("none")  # the layout is done; doing it again takes as long as drawing
    paths[1].write_text(svg_text(figure), encoding="utf-8")
    return paths


def svg_text(figure: Figure) -> str:
    """A figure as SVG; coordinates are rounded to a hundredth of a point, as six decimals are half of a file of curves."""
    with styled(), io.StringIO() as sink:
        figure.savefig(sink, format="svg", metadata={"Date": None})
        return _PATH.sub(_rounded, sink.getvalue())


def _rounded(path: re.Match[str]) -> str:
    short = _LONG.sub(lambda number: f"{float(number[0]):.2f}", path[0])
    # In a path without curves points after the first need no letter: lines are the default.
    return short if _CURVE.search(short) else short.replace(" \nL ", " ")
