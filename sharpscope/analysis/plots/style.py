"""How every figure looks: three styles, two widths, one color-blind safe palette, and what a figure needs to be drawn and saved."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from io import BytesIO
from pathlib import Path
from textwrap import fill

import matplotlib as mpl
import pandas as pd
from cycler import cycler
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullFormatter
from numpy.typing import ArrayLike

from sharpscope.analysis.curves import COLORS
from sharpscope.analysis.text import printable
from sharpscope.errors import UserError, nearest

DARK_COLORS = (
    "#4fb3e8",
    "#f2b134",
    "#3fcf9b",
    "#ff8f4d",
    "#e3a0d8",
    "#dcb48c",
    "#ffc9ec",
    "#b5b5b5",
    "#f1ea6a",
    "#8fd0f5",
)
"""The same hues as COLORS, lighter: each has a contrast of at least 4.5 with the dark page."""
GRAY = "#7b8188"
"""Of lines that are no data; readable on white and on the dark page."""
WIDTHS = {"one": 3.35, "two": 6.9}
"""Width of a figure [inches]: one or two columns of a two-column paper."""

_INK = {"light": ("#ffffff", "#1b1f23", "#e6e8ea"), "dark": ("#14171a", "#e6e9ec", "#2c3238")}
"""Background, text and grid."""
STYLES = {
    "paper": ("light", 8.0),
    "notebook": ("light", 9.5),
    "dark": ("dark", 9.5),
}
"""Name of a style -> its colors, and the size of its text [points]."""
FORMATS = (".png", ".svg", ".pdf")
_SECTION = re.compile(r"\b(?:\w+\.)+(?=\w+=)")


def styled(style: str = "paper") -> AbstractContextManager[None]:
    """Context in which figures are made and saved; matplotlib's own settings come back afterwards.

    Raises:
        UserError: there is no such style.
    """
    if style not in STYLES:
        raise UserError(f"style {style}: unknown{nearest(style, STYLES)}")
    kind, size = STYLES[style]
    page, ink, grid = _INK[kind]
    colors = DARK_COLORS if kind == "dark" else COLORS
    settings = {
        "font.size": size,
        "axes.titlesize": size,
        "axes.labelsize": size,
        "legend.fontsize": size - 1,
        "xtick.labelsize": size - 1,
        "ytick.labelsize": size - 1,
        "figure.facecolor": page,
        "savefig.facecolor": page,
        "axes.facecolor": page,
        "text.color": ink,
        "axes.labelcolor": ink,
        "axes.edgecolor": GRAY,
        "xtick.color": ink,
        "ytick.color": ink,
        "axes.grid": True,
        "grid.color": grid,
        "grid.linewidth": 0.6,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.prop_cycle": cycler(color=colors),
        "lines.linewidth": 1.4,
        "lines.markersize": 3.5,
        "legend.frameon": False,
        "figure.dpi": 100,
        "savefig.dpi": 200,
        "text.usetex": False,
        "svg.hashsalt": "sharpscope",
        "svg.fonttype": "none",
    }
    return mpl.rc_context(settings)  # type: ignore[arg-type]


def colors() -> list[str]:
    """The palette of the current style."""
    return list(mpl.rcParams["axes.prop_cycle"].by_key()["color"])


def diverging() -> str:
    """Color map for values around 0, which has the page's color."""
    return "vlag" if mpl.rcParams["figure.facecolor"] == _INK["light"][0] else "icefire"


class Picture(Figure):
    """A figure made without pyplot, so without global state, that Jupyter shows all the same.

    Attributes:
        frame: the numbers that it shows.
    """

    frame: pd.DataFrame

    def panels(
        self, count: int, height: float, across: int = 2, sharey: bool = False
    ) -> list[Axes]:
        """`count` axes, each `height` inches high, at most `across` beside each other (one in a narrow figure)."""
        columns = min(count, across if self.get_figwidth() > 5 else 1)
        rows = -(-count // columns)
        self.set_figheight(rows * height + 0.4)
        axes = self.subplots(rows, columns, squeeze=False, sharey=sharey).ravel()
        for unused in axes[count:]:
            unused.remove()
        return list(axes[:count])

    def panels_by(
        self, frame: pd.DataFrame, column: str, height: float, across: int = 2, sharey: bool = False
    ) -> list[tuple[Axes, str, pd.DataFrame]]:
        """A panel for each value of a column, with the value and its rows, in the order of the frame; see `panels`."""
        groups = frame.groupby(column, sort=False)
        axes = self.panels(groups.ngroups, height, across, sharey)
        return [(axis, str(name), rows) for axis, (name, rows) in zip(axes, groups, strict=True)]

    def _repr_png_(self) -> bytes:
        """The figure as PNG."""
        png = BytesIO()
        self.savefig(png, format="png", dpi=110)
        return png.getvalue()


def picture(width: float) -> Picture:
    """An empty figure of this width [inches]."""
    figure = Picture(figsize=(width, 2.4), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def plain(text: object, limit: int = 60) -> str:
    """Text as a figure's label: no math mode, and shown in legends also if it begins with an underscore."""
    clean = printable(text, limit)
    return ("\u200b" + clean if clean.startswith("_") else clean).replace("$", r"\$")


def setting_text(label: object) -> str:
    """A setting's label for a legend: `grpo (lr=0.0002)` of `grpo (optimizer.lr=0.0002)`."""
    return plain(_SECTION.sub("", str(label)), 100)


def color_of(labels: Iterable[object]) -> dict[str, str]:
    """One color for each label, the same in every panel; plain GRPO is always first."""
    names = sorted(dict.fromkeys(map(str, labels)), key=lambda name: (name != "grpo", name))
    palette = colors()
    return {name: palette[n % len(palette)] for n, name in enumerate(names)}


def colored(
    frame: pd.DataFrame, column: str, palette: Mapping[str, str]
) -> Iterator[tuple[str, str, pd.DataFrame]]:
    """Each value of a column in the order of the frame, its color, and its rows."""
    for name, rows in frame.groupby(column, sort=False):
        yield str(name), palette[str(name)], rows


def legend(figure: Figure) -> None:
    """A legend above the figure that names each label once, and folded labels of the y axes."""
    found: dict[str, Artist] = {}
    for axis in figure.axes:
        axis.set_ylabel(fill(axis.get_ylabel(), 30))
        handles, labels = axis.get_legend_handles_labels()
        found.update(zip(map(str, labels), handles, strict=True))
        if (own := axis.get_legend()) is not None:
            own.remove()
    if not found:
        return
    # 0.065 inch a letter and 0.5 inch for the line: a legend wider than its figure would be cut off
    fit = int(figure.get_figwidth() / (0.5 + 0.065 * max(map(len, found))))
    across = max(1, min(len(found), 4, fit))
    lines = -(-len(found) // across)
    figure.set_figheight(figure.get_figheight() + 0.17 * lines)
    drawn = figure.legend(
        list(found.values()),
        list(found),
        loc="outside upper center",
        ncols=across,
    )
    for handle in drawn.legend_handles:  # the points of a scatter plot are too small to tell colors
        if isinstance(handle, Line2D) and handle.get_linestyle() == "None":
            handle.set(markersize=5, alpha=1)


def band(axis: Axes, x: ArrayLike, low: ArrayLike, high: ArrayLike, color: str) -> None:
    """An interval around a line of this color."""
    axis.fill_between(
        x,
        low,
        high,
        color=color,
        alpha=0.18,
        linewidth=0,
    )


def inches(axis: Axes) -> float:
    """Width of an axis' figure [inches]."""
    figure = axis.figure
    assert isinstance(figure, Figure)
    return figure.get_figwidth()


def titled(axis: Axes, text: object, color: str = "") -> None:
    """A panel's quantity above it, on as many lines as it needs: beside a low panel it would not fit."""
    # matplotlib wraps no title: letters are 0.0078 inch wide for each point of the font
    grid = axis.get_gridspec()
    size = float(mpl.rcParams["font.size"])
    assert grid is not None
    room = inches(axis) / grid.ncols - 0.4  # [inches], beside the ticks
    letters = int(room / (0.0078 * size))
    title = fill(plain(text, 120), letters)
    axis.set_title(title, loc="left", color=color or mpl.rcParams["text.color"])


def log_axis(axis: Axes) -> None:
    """A logarithmic y axis with plain numbers: powers of ten and, where there are few of these, twice and 5 times them."""
    axis.set_yscale("log")
    low, high = axis.get_ylim()
    axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 60 * low else (1.0,)))
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter(NullFormatter())


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write `name`.png and `name`.svg; equal figures give equal files."""
    paths = [folder / f"{name}.{ending}" for ending in ("png", "svg")]
    for path in paths:
        save_as(figure, path)
    return paths


def save_as(figure: Figure, file: Path, dpi: float | None = None) -> Path:
    """Write a figure to a .png, .svg or .pdf file without the date, so that equal figures give equal files.

    Raises:
        UserError: another ending, or the file cannot be written.
    """
    if file.suffix not in FORMATS:
        raise UserError(f"{file}: a figure is one of {', '.join(FORMATS)}; name the file so")
    dates = {
        ".png": {"Software": None},
        ".svg": {"Date": None},
        ".pdf": {"CreationDate": None},
    }
    face = figure.get_facecolor()
    with styled():
        try:
            figure.savefig(
                file,
                metadata=dates[file.suffix],
                facecolor=face,
                dpi=dpi or "figure",
            )
        except OSError as error:
            raise UserError(f"{file}: cannot be written ({error.strerror})") from error
    return file
