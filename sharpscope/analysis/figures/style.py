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
from xml.etree import ElementTree
from xml.sax.saxutils import escape

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import (
    LogFormatterSciNotation,
    LogLocator,
    MaxNLocator,
    NullFormatter,
    NullLocator,
    ScalarFormatter,
)

from sharpscope.analysis.text import printable

BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, BLACK, GRAY = (
    "#0173b2",
    "#d55e00",
    "#029e73",
    "#cc78bc",
    "#de8f05",
    "#56b4e9",
    "#000000",
    "#777777",
)
"""Black, gray, and six of seaborn's `colorblind` palette: the others are too close to these or too pale for a line."""

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

# A method's column is its color and its row its dash pattern. Related methods share a color where that is possible.
_METHODS = (
    ("grpo", "grpo-sg", "ar", "cov-grpo", "tr-grpo", "gspo", "dapo"),
    ("grpo-sam", "rloo", "grpo-sg-shuffled", "grpo-sg-reverse", "grpo-sg-constant", "grpo-sg-entropy", "dr-grpo"),
    ("grpo-gnp", "gmpo", "lopti", "clip-cov", "gdpo", "holder", "cispo"),
    ("ppo-ewma", "", "ar-lopti", "kl-cov", "dppo", "high-entropy", "papo"),
    ("lite-ppo", "", "reinforce-pp", "opo", "dppo-kl", "maxrl", "grpo-sg-mean-one"),
    ("dual-clip", "", "reinforce-pp-baseline", "otb", "", "luspo", "bnpo"),
    ("sapo", "", "", "cov-grpo-completion", "lp-reg", "vespo", "stapo"),
)
_FIXED = {name: (color, dash) for dash, row in enumerate(_METHODS) for color, name in enumerate(row) if name}
_CONTROLS = ("shuffled", "reverse", "constant", "entropy", "mean-one")

WIDTH, ONE_COLUMN = 5.5, 3.5
"""Width of a figure [inches]: the text column of an ICLR or NeurIPS paper; with a single panel, that of a two-column paper."""

_RC: Any = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "legend.fontsize": 7,
    "legend.title_fontsize": 7,
    "legend.borderaxespad": 0.2,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#E5E5E5",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "lines.linewidth": 1.4,
    "lines.markersize": 3.5,
    "legend.frameon": False,
    "figure.dpi": 100,
    "savefig.dpi": 200,
    "svg.hashsalt": "sharpscope",
    "svg.fonttype": "none",
    "text.usetex": False,
}


_SECTION = re.compile(r"\b(?:\w+\.)+(?=\w+=)")
_SUPERSCRIPT = str.maketrans("0123456789.-", "⁰¹²³⁴⁵⁶⁷⁸⁹·⁻")
_SVG, _XLINK = "{http://www.w3.org/2000/svg}", "{http://www.w3.org/1999/xlink}"
_QUOTE = {"'": "&apos;"}
_FINE = re.compile(r"(?<![^ ])-?\d+\.\d+(?![^ ])")  # a number alone in an attribute or in a list
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
    result: dict[str, Line] = {}
    # Labels that are a method's name come first, so that a variant never takes its line.
    for label in sorted(set(labels), key=lambda text: (text not in _FIXED, text)):
        taken = {(line.color, line.dash) for line in result.values()}
        free = [look for look in _looks(label) if look[:2] not in taken] or _looks(label)
        result[label] = Line(*free[0])
    return result


def _looks(label: str) -> list[tuple[str, Any, str]]:
    """(color, dash, marker) that a label may have, by preference: variants of a method have shades of its color."""
    fixed = _FIXED.get(_method(label))
    every = list(zip(DASHES, MARKERS, strict=True))
    if label in _FIXED:
        colors, looks = [COLORS[_FIXED[label][0]]], every[_FIXED[label][1] :]
    elif fixed is not None:
        colors, looks = _shades(COLORS[fixed[0]]), every[fixed[1] :] + every[: fixed[1]]
    else:
        colors, looks = list(COLORS), every
    return [(color, *look) for look in looks for color in colors]


def _shades(color: str) -> list[str]:
    """The color darker and lighter; of black, two grays."""
    rgb = to_rgb(color)
    mixed = ([0.55 * part + 0.1 for part in rgb], [0.5 + 0.5 * part for part in rgb])
    return [to_hex((red, green, blue)) for red, green, blue in mixed]


def is_control(label: str) -> bool:
    """Whether a setting's method is a control: the weights of another method, misplaced (`grpo-sg-shuffled`)."""
    return label.partition(" ")[0].endswith(tuple(f"-{name}" for name in _CONTROLS))


def _method(label: str) -> str:
    names = [name for name in _FIXED if label == name or label.startswith((f"{name}-", f"{name} ", f"{name}+"))]
    return max(names, key=len, default="")


def styled() -> AbstractContextManager[None]:
    """Context in which figures are made and saved; matplotlib's own settings come back afterwards."""
    return mpl.rc_context(_RC)


def panels(count: int, *, columns: int = 2, height: float = 2.0, **shared: Any) -> tuple[Figure, list[Axes]]:
    """A figure with `count` equal axes in rows of `columns`; made without pyplot, so no global state.

    Args:
        count: number of axes.
        columns: axes in a row, at most.
        height: of a row [inches].
        shared: `sharex`, `sharey` of `Figure.subplots`.
    """
    columns = min(count, columns)
    rows = -(-count // columns)
    figure = Figure(figsize=(WIDTH if columns > 1 else ONE_COLUMN, height * rows + 0.4), layout="constrained")
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


def finish(
    figure: Figure, axes: Sequence[Axes], columns: Mapping[str, Sequence[Axes]] | None = None, fold: int = 30
) -> None:
    """Fold long axis labels, keep ticks apart, and add legends that name each label once.

    Args:
        figure: of the axes.
        axes: all of them.
        columns: title → axes of a column from the top: a legend above each column. None: one above the figure.
        fold: length of a line of an ordinate's label [characters].
    """
    for axis in axes:
        for ticked in (axis.xaxis, axis.yaxis):
            _few_ticks(ticked)
        axis.set_ylabel(fill(axis.get_ylabel(), fold))
    above = 1.12 if any(axis.get_title("left") for axis in axes) else 1.0  # a legend stands above the title
    for title, column in (columns or {}).items():
        handles = _handles(column)
        texts = [fill(label, 72 // len(columns or ()), break_on_hyphens=False) for label in handles]
        column[0].legend(
            handles.values(), texts, title=title or None, loc="lower left", bbox_to_anchor=(0, above), alignment="left"
        )
    handles = {} if columns else _handles(axes)
    if handles:
        # 0.06 inch a letter and 0.5 inch for the line: a legend wider than its figure would be cut off.
        fitting = int(figure.get_figwidth() / (0.5 + 0.06 * max(map(len, handles))))
        across = max(1, min(len(handles), 3, fitting))
        figure.set_figheight(figure.get_figheight() + 0.15 * max(0, -(-len(handles) // across) - 1))
        figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=across)
    elif columns:
        most = max(sum(text.count("\n") + 1 for text in _legend_texts(column[0])) for column in columns.values())
        figure.set_figheight(figure.get_figheight() + 0.14 * most)


def _handles(axes: Iterable[Axes]) -> dict[str, Any]:
    """Label → its first artist."""
    handles: dict[str, Any] = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    return handles


def _legend_texts(axis: Axes) -> list[str]:
    legend = axis.get_legend()
    return [] if legend is None else [text.get_text() for text in legend.get_texts()]


class _Powers(LogFormatterSciNotation):
    """matplotlib's labels of a logarithmic axis as plain text: parsing math text takes an eighth of a report's time."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        label = re.sub(r"[{}$]|\\mathdefault", "", super().__call__(x, pos)).replace(r"\times", "×")
        number, _, exponent = label.partition("^")
        return (number + exponent.translate(_SUPERSCRIPT)).replace("-", "−")


def _few_ticks(axis: Axis) -> None:
    """Set ticks whose labels do not overlap; on a logarithmic axis of few decades those of matplotlib do."""
    if type(axis.get_major_formatter()) is LogFormatterSciNotation:
        transform: Any = axis.get_transform()  # logarithmic or symmetric-logarithmic
        axis.set_major_formatter(_Powers(transform.base))
    low, high = sorted(axis.get_view_interval())  # an inverted axis gives the larger end first
    if axis.get_scale() != "log" or low <= 0:
        return
    axis.set_minor_formatter(NullFormatter())
    if high < 10 * low:
        axis.set_major_locator(MaxNLocator(4))
        axis.set_major_formatter(ScalarFormatter())
        axis.set_minor_locator(NullLocator())
    elif high < 100 * low:
        axis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
        axis.set_major_formatter("{x:g}")


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
    canvas, dpi = figure.canvas, figure.dpi
    with styled(), io.StringIO() as sink:
        try:
            # Figure.savefig would draw twice: once for the layout, which drawing makes as well.
            FigureCanvasSVG(figure).print_svg(sink, metadata={"Date": None})
        finally:
            figure.set_canvas(canvas)
            figure.dpi = dpi
        return _PATH.sub(_rounded, sink.getvalue())


def compact_svg(svg: str) -> str:
    """The same picture in about half the size: no metadata, no group names, shared styles, coordinates to a tenth of a point.

    Attributes are in single quotes, so that the text fits into a data address with few escapes.
    """
    styles: dict[str, str] = {}
    text = _compact(ElementTree.fromstring(svg), styles)
    rules = "".join(f".{name}{{{escape(rule)}}}" for rule, name in styles.items())
    return text.replace("</style>", f"{rules}</style>", 1)


def _compact(element: ElementTree.Element, styles: dict[str, str]) -> str:
    """An element of an SVG by matplotlib as text; `styles`: style → name of the class that stands for it."""
    tag = element.tag.removeprefix(_SVG)
    if tag == "metadata":
        return ""
    attributes = {"xmlns": _SVG[1:-1], "xmlns:xlink": _XLINK[1:-1]} if tag == "svg" else {}
    for name, value in element.attrib.items():
        if name == "style":
            attributes["class"] = styles.setdefault(value, f"s{len(styles)}")
        elif tag != "g" or name != "id":
            attributes[name.replace(_XLINK, "xlink:")] = _FINE.sub(_tenths, " ".join(value.split()))
    inside = escape(element.text or "").strip() + "".join(_compact(child, styles) for child in element)
    if tag == "g" and not attributes:
        return inside
    opened = tag + "".join(f" {name}='{escape(value, _QUOTE)}'" for name, value in attributes.items())
    return f"<{opened}>{inside}</{tag}>" if inside else f"<{opened}/>"


def _tenths(value: re.Match[str]) -> str:
    """A number to one decimal; below 10, which markers need, to two."""
    number = float(value[0])
    return f"{number:.{1 if abs(number) >= 10 else 2}f}".rstrip("0").rstrip(".")


def _rounded(path: re.Match[str]) -> str:
    short = _LONG.sub(lambda number: f"{float(number[0]):.2f}", path[0])
    # In a path without curves points after the first need no letter: lines are the default.
    return short if _CURVE.search(short) else short.replace(" \nL ", " ")
