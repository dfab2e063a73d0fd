"""One style for every figure: a color-blind safe palette, a paper's column width, legends outside the data."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from io import BytesIO
from pathlib import Path
from textwrap import fill
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, ScalarFormatter

from sharpscope.analysis.curves import COLORS, in_order
from sharpscope.analysis.text import printable

BLUE, GRAY = COLORS[0], "#777777"
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1, 2)))
WIDTH, ONE_COLUMN = 5.5, 3.5
"""Width of a figure [inches]: the text column of an ICLR or NeurIPS paper; with a single panel, that of a two-column paper."""

_RC: Any = {
    **{"font.size": 8, "axes.titlesize": 8, "axes.labelsize": 8},
    **{"legend.fontsize": 7, "xtick.labelsize": 7, "ytick.labelsize": 7},
    **{"axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True},
    **{"axes.grid": True, "grid.color": "#E5E5E5", "grid.linewidth": 0.6},
    **{"lines.linewidth": 1.4, "lines.markersize": 3.5, "legend.frameon": False},
    **{"figure.dpi": 100, "savefig.dpi": 200, "text.usetex": False},
    **{"svg.hashsalt": "sharpscope", "svg.fonttype": "none"},
}
_SECTION = re.compile(r"\b(?:\w+\.)+(?=\w+=)")


def lines(labels: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Label → color and linestyle, as keyword arguments of `Axes.plot`; the same in every figure of a study.

    grpo comes first, then by name; colors repeat with another dash.
    """
    count = len(COLORS)
    return {
        label: {"color": COLORS[n % count], "linestyle": DASHES[n // count % len(DASHES)]}
        for n, label in enumerate(in_order(labels))
    }


def styled() -> AbstractContextManager[None]:
    """Context in which figures are made and saved; matplotlib's own settings come back afterwards."""
    return mpl.rc_context(_RC)


class Picture(Figure):
    """A figure that Jupyter shows although pyplot did not make it."""

    def _repr_png_(self) -> bytes:
        """The figure as PNG."""
        png = BytesIO()
        self.savefig(png, format="png", dpi=110)
        return png.getvalue()


def panels(count: int, *, height: float = 2.0, **shared: Any) -> tuple[Figure, list[Axes]]:
    """A figure with `count` equal axes in rows of two; made without pyplot, so no global state.

    Args:
        count: number of axes.
        height: of a row [inches].
        shared: `sharex`, `sharey` of `Figure.subplots`.
    """
    columns = min(count, 2)
    rows = -(-count // columns)
    figure = Picture(figsize=(WIDTH if columns > 1 else ONE_COLUMN, height * rows + 0.4), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(rows, columns, squeeze=False, **shared).ravel()
    for spare in grid[count:]:
        spare.remove()
    return figure, list(grid[:count])


def plain(text: object, limit: int = 60) -> str:
    """Text as a figure's label: no math mode, and shown in legends also if it begins with an underscore."""
    clean = printable(text, limit)
    return ("\u200b" + clean if clean.startswith("_") else clean).replace("$", r"\$")


def setting_text(label: object) -> str:
    """A setting's label for a legend: `grpo (lr=0.0002)` of `grpo (optimizer.lr=0.0002)`."""
    return plain(_SECTION.sub("", str(label)), 100)


def finish(figure: Figure, axes: Sequence[Axes]) -> None:
    """Fold long axis labels, keep the ticks of logarithmic axes apart, and add a legend above the figure that names each label once."""
    handles: dict[str, Any] = {}
    for axis in axes:
        for ticked in (axis.xaxis, axis.yaxis):
            low, high = sorted(ticked.get_view_interval())  # an inverted axis gives the larger end first
            if ticked.get_scale() == "log" and low > 0:
                ticked.set_minor_formatter(NullFormatter())
                if high < 10 * low:
                    ticked.set_major_locator(MaxNLocator(4))
                    ticked.set_major_formatter(ScalarFormatter())
                elif high < 100 * low:
                    ticked.set_major_locator(LogLocator(subs=(1.0, 3.0)))
                    ticked.set_major_formatter("{x:g}")
        axis.set_ylabel(fill(axis.get_ylabel(), 30))
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    if handles:
        # 0.06 inch a letter and 0.5 inch for the line: a legend wider than its figure would be cut off
        across = max(1, min(len(handles), 3, int(figure.get_figwidth() / (0.5 + 0.06 * max(map(len, handles))))))
        figure.set_figheight(figure.get_figheight() + 0.15 * max(0, -(-len(handles) // across) - 1))
        figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=across)


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write `name`.png and `name`.svg; equal figures give equal files."""
    paths = [folder / f"{name}.{ending}" for ending in ("png", "svg")]
    with styled():
        for path, metadata in zip(paths, ({"Software": None}, {"Date": None}), strict=True):
            figure.savefig(path, metadata=metadata)
    return paths
