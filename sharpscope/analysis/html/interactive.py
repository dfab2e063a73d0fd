"""A matplotlib figure as plotly data, so that the figure whose values can be read is the very figure that was drawn."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.colors import to_hex
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator

MOST_POINTS = 3_000
"""A figure of more points is a cloud: it is shown as a picture, since no single value is read from it."""
SYMBOLS = {
    "o": "circle", "s": "square", "^": "triangle-up", "D": "diamond", "v": "triangle-down", ".": "circle", "|": "line-ns-open",
}  # fmt: skip
DASHES = {"-": "solid", "--": "dash", ":": "dot", "-.": "dashdot"}
_PANEL, _BELOW, _ABOVE = 250, 52, 24  # height of a panel, of what stands under it, of its title [pixels]


def plot_of(figure: Figure) -> dict[str, Any] | None:
    """plotly's `data` and `layout` of the figure's lines, bands and error bars, and the `height` of its panels [pixels].

    A line that has a band or error bars carries its interval: `customdata` holds [low, high] of every point, which the
    hover text shows. None where the figure has no line, or more than MOST_POINTS points.
    """
    axes = [axis for axis in figure.axes if axis.get_lines()]
    points = sum(np.size(line.get_xdata()) for axis in axes for line in axis.get_lines())
    if not axes or points > MOST_POINTS:
        return None
    places = [axis.get_subplotspec() for axis in axes]
    rows = max((place.rowspan.stop for place in places if place is not None), default=1)
    columns = max((place.colspan.stop for place in places if place is not None), default=1)
    above = _ABOVE if any(axis.get_title() for axis in axes) else 8
    height = rows * (above + _PANEL + _BELOW)
    data: list[dict[str, Any]] = []
    layout: dict[str, Any] = {"shapes": [], "annotations": [], "hovermode": "closest"}
    named: set[str] = set()
    for number, (axis, place) in enumerate(zip(axes, places, strict=True), 1):
        row, column = (0, 0) if place is None else (place.rowspan.start, place.colspan.start)
        end = "" if number == 1 else str(number)
        data += _traces(axis, end, named)
        layout["shapes"] += _rulers(axis, end)
        top = 1 - row / rows - above / height
        ends = [
            column / columns + (0.045 if column else 0.0),
            (column + 1) / columns - (0.03 if column + 1 < columns else 0),
        ]
        heights = [top - _PANEL / height, top]
        layout[f"xaxis{end}"] = _axis(axis, "x") | {"domain": ends, "anchor": f"y{end}"}
        layout[f"yaxis{end}"] = _axis(axis, "y") | {"domain": heights, "anchor": f"x{end}"}
        if axis.get_title():
            layout["annotations"].append({
                "text": _text(axis.get_title()), "showarrow": False, "xref": "paper", "yref": "paper",
                "x": sum(ends) / 2, "y": heights[1], "xanchor": "center", "yanchor": "bottom",
            })  # fmt: skip
    return {"data": data, "layout": layout, "height": height}


def _traces(axis: Axes, end: str, named: set[str]) -> list[dict[str, Any]]:
    """Bands first, so that lines lie over them; each label stands in the legend once, over all panels."""
    bands = [c for c in axis.collections if isinstance(c, PolyCollection)]
    boxes = [box for box in axis.containers if isinstance(box, ErrorbarContainer)]
    bars = {id(box[0]): _spans(box, 1) for box in boxes if box.has_yerr}
    across = {id(box[0]): _spans(box, 0) for box in boxes if box.has_xerr}
    caps = {id(cap) for box in boxes for cap in box[1]}
    place = {"xaxis": f"x{end}", "yaxis": f"y{end}"}
    found = [_band(band) | place for band in bands if len(band.get_paths())]
    for line in axis.get_lines():
        if id(line) in caps or not all(_in_data(line, axis)):
            continue
        trace = _line(line) | place
        spans = bars.get(id(line)) or _beside(line, bands)
        if spans is not None:
            trace["customdata"] = spans
            trace["hovertemplate"] = "%{x}: %{y:.4g} [%{customdata[0]:.4g}, %{customdata[1]:.4g}]"
        if spans is not None and id(line) in bars:
            trace["error_y"] = _error_bars(trace["y"], spans)
        if id(line) in across:
            trace["error_x"] = _error_bars(trace["x"], across[id(line)])
        label = str(line.get_label())
        shown = not label.startswith("_") and label != ""
        trace |= {
            "name": _text(label) if shown else "",
            "legendgroup": label,
            "showlegend": shown and label not in named,
        }
        named.add(label)
        found.append(trace)
    return found


def _line(line: Line2D) -> dict[str, Any]:
    marker, style = str(line.get_marker()), line.get_linestyle()
    drawn = style not in ("None", "none", "", " ")
    color = to_hex(line.get_color())
    trace: dict[str, Any] = {
        "type": "scatter", "x": _numbers(line.get_xdata()), "y": _numbers(line.get_ydata()), "connectgaps": False,
        "mode": "+".join([*(["lines"] if drawn else []), *(["markers"] if marker in SYMBOLS else [])]) or "lines",
        "line": {"color": color, "width": float(line.get_linewidth()) * 1.3, "dash": _dash(line)},
        "hovertemplate": "%{x}: %{y:.4g}",
    }  # fmt: skip
    if marker in SYMBOLS:
        trace["marker"] = {"symbol": SYMBOLS[marker], "color": color, "size": 5 if marker == "." else 7}
    if line.get_alpha() is not None:
        trace["opacity"] = float(line.get_alpha() or 1)
    return trace


def _dash(line: Line2D) -> str:
    pattern = getattr(line, "_unscaled_dash_pattern", (0, None))[1]
    style = str(line.get_linestyle())
    if pattern and style == "--":  # given as a pattern, or "--" itself: the same dashes as in the picture
        return ",".join(f"{float(length) * float(line.get_linewidth()):.1f}px" for length in pattern)
    return DASHES.get(style, "solid")


def _band(band: PolyCollection) -> dict[str, Any]:
    corners = np.concatenate([np.vstack([path.vertices, [[np.nan, np.nan]]]) for path in band.get_paths()])
    red, green, blue, alpha = np.atleast_2d(band.get_facecolor())[0]
    color = f"rgba({red * 255:.0f},{green * 255:.0f},{blue * 255:.0f},{alpha:.2f})"
    return {
        "type": "scatter", "x": _numbers(corners[:, 0]), "y": _numbers(corners[:, 1]), "fill": "toself",
        "fillcolor": color, "mode": "lines", "line": {"width": 0}, "hoverinfo": "skip", "showlegend": False,
    }  # fmt: skip


def _beside(line: Line2D, bands: list[PolyCollection]) -> list[list[float | None]] | None:
    """[low, high] of the band in the line's colour around each of its points."""
    x, y = np.asarray(line.get_xdata(), dtype=float), np.asarray(line.get_ydata(), dtype=float)
    for band in bands:
        if not len(band.get_paths()) or to_hex(np.atleast_2d(band.get_facecolor())[0]) != to_hex(line.get_color()):
            continue
        corners = np.concatenate([path.vertices for path in band.get_paths()])
        inside = [corners[corners[:, 0] == at, 1] for at in x]
        around = [ends.min() <= at <= ends.max() for at, ends in zip(y, inside, strict=True) if len(ends)]
        if around and all(around):
            return [[float(e.min()), float(e.max())] if len(e) else [None, None] for e in inside]
    return None


def _spans(box: ErrorbarContainer, direction: int) -> list[list[float | None]]:
    """[low, high] of each point of an error bar, along x (0) or y (1)."""
    lines = [bar for bar in box[2] if isinstance(bar, LineCollection)]
    bars = lines[0 if direction == 0 else -1]  # matplotlib puts the horizontal ones first
    return [[float(segment[:, direction].min()), float(segment[:, direction].max())] for segment in bars.get_segments()]


def _error_bars(values: Sequence[float | None], spans: Sequence[Sequence[float | None]]) -> dict[str, Any]:
    ends = [(value, *span) for value, span in zip(values, spans, strict=True)]
    return {
        "array": [None if value is None or high is None else high - value for value, _, high in ends],
        "arrayminus": [None if value is None or low is None else value - low for value, low, _ in ends],
        "thickness": 1.2, "width": 3,
    }  # fmt: skip


def _rulers(axis: Axes, end: str) -> list[dict[str, Any]]:
    """Lines over the whole width or height (axhline, axvline)."""
    found = []
    for line in axis.get_lines():
        across = _in_data(line, axis)
        if all(across):
            continue
        x, y = (_numbers(values) for values in (line.get_xdata(), line.get_ydata()))
        found.append({
            "type": "line", "layer": "below", "x0": x[0], "x1": x[-1], "y0": y[0], "y1": y[-1],
            "xref": f"x{end}" + ("" if across[0] else " domain"), "yref": f"y{end}" + ("" if across[1] else " domain"),
            "line": {"color": to_hex(line.get_color()), "width": 1, "dash": DASHES.get(str(line.get_linestyle()), "solid")},
        })  # fmt: skip
    return found


def _in_data(line: Line2D, axis: Axes) -> tuple[bool, bool]:
    """Whether x and y are in data coordinates; equality of transforms would depend on the limits set so far."""
    x, y = line.get_transform().contains_branch_seperately(axis.transData)
    return bool(x), bool(y)


def _axis(axis: Axes, which: str) -> dict[str, Any]:
    own = axis.xaxis if which == "x" else axis.yaxis
    log = own.get_scale() == "log"
    title = _text((axis.get_xlabel() if which == "x" else axis.get_ylabel()).replace("\n", " "))
    # exponents as "e": plotly sets powers with a style attribute, which the page's policy forbids
    found: dict[str, Any] = {
        "title": {"text": _fold(title), "standoff": 8},
        "type": "log" if log else "linear",
        "exponentformat": "e",
    }
    first, last = _limits(*(axis.get_xlim() if which == "x" else axis.get_ylim()))
    found["range"] = [float(np.log10(first)), float(np.log10(last))] if log else [first, last]
    if isinstance(own.get_major_locator(), FixedLocator):
        places = own.get_ticklocs()
        names = own.get_major_formatter().format_ticks(list(places))
        found |= {
            "tickvals": _numbers(places),
            "ticktext": [_text(name) for name in names],
        }
    return found


def _limits(first: float, last: float) -> tuple[float, float]:
    """The picture's limits (inverted if its axis is); around values that are all but equal, a tenth on either side."""
    if abs(last - first) > 1e-6 * max(abs(first), abs(last)):
        return float(first), float(last)
    return float(first) - 0.1 * abs(first), float(last) + 0.1 * abs(last)


def _fold(title: str) -> str:
    """A long axis title in two lines at the space nearest its middle."""
    spaces = [place for place, char in enumerate(title) if char == " "]
    if len(title) <= 34 or not spaces:
        return title
    middle = min(spaces, key=lambda place: abs(place - len(title) / 2))
    return f"{title[:middle]}<br>{title[middle + 1 :]}"


def _numbers(values: Any) -> list[float | None]:
    array = np.asarray(values, dtype=float)
    return [float(value) if np.isfinite(value) else None for value in array]


def _text(label: str) -> str:
    """A label as plotly's markup shows it literally; matplotlib's own escapes are undone."""
    return escape(label.replace(r"\$", "$").replace("\u200b", ""), quote=False)
