"""Figures: from small frames to matplotlib figures with their uncertainty, and the picture of one run to share.

All have one style: a color-blind safe palette, a paper's column width, legends outside the data.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from io import BytesIO, StringIO
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import get_font_names
from matplotlib.ticker import MaxNLocator
from rich.cells import cell_len
from rich.console import Console

from sharpscope.analysis.curves import COLORS
from sharpscope.analysis.headline import largest_update
from sharpscope.analysis.report import curve_table, found_sections
from sharpscope.analysis.sections import Section, to_terminal
from sharpscope.analysis.spikes import recorded_by
from sharpscope.analysis.statistics import contrast_interval, mean_interval
from sharpscope.analysis.study import Study
from sharpscope.analysis.text import printable
from sharpscope.errors import UserError
from sharpscope.traces import Run

if TYPE_CHECKING:
    from sharpscope.analysis.claims import Verdict

FEW = 30
"""Points up to which intervals are bars and not a band."""
BLUE, GRAY = COLORS[0], "#777777"
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


def panel(width: float, height: float) -> tuple[Figure, Axes]:
    """A figure of this size [inches] with one axis; made without pyplot, so no global state."""
    figure = Picture(figsize=(width, height + 0.4), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots()


def plain(text: object, limit: int = 60) -> str:
    """Text as a figure's label: no math mode, and shown in legends also if it begins with an underscore."""
    clean = printable(text, limit)
    return ("\u200b" + clean if clean.startswith("_") else clean).replace("$", r"\$")


def setting_text(label: object) -> str:
    """A setting's label for a legend: `grpo (lr=0.0002)` of `grpo (optimizer.lr=0.0002)`."""
    return plain(_SECTION.sub("", str(label)), 100)


def finish(figure: Figure, axis: Axes) -> None:
    """Fold a long axis label, and add a legend above the figure that names each label once."""
    axis.set_ylabel(fill(axis.get_ylabel(), 30))
    handles = {
        label: handle for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    if handles:
        # 0.06 inch a letter and 0.5 inch for the line: a legend wider than its figure would be cut off
        across = max(
            1,
            min(
                len(handles), 3, int(figure.get_figwidth() / (0.5 + 0.06 * max(map(len, handles))))
            ),
        )
        figure.set_figheight(figure.get_figheight() + 0.15 * max(0, -(-len(handles) // across) - 1))
        figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=across)


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write `name`.png and `name`.svg; equal figures give equal files."""
    paths = [folder / f"{name}.{ending}" for ending in ("png", "svg")]
    with styled():
        for path, metadata in zip(paths, ({"Software": None}, {"Date": None}), strict=True):
            figure.savefig(path, metadata=metadata)
    return paths


# -- The figures


def curves(chart: Mapping[str, Any], settings: Sequence[Mapping[str, Any]]) -> Figure:
    """A chart of `study_charts`: a curve for each of its settings with its interval, and thin lines of few seeds."""
    x = np.array(chart["x"], dtype=float)
    with styled():
        figure, axis = panel(ONE_COLUMN, 1.9)
        for setting, named in zip(settings, chart["series"], strict=True):
            series = {name: np.array(values, dtype=float) for name, values in named.items()}
            y, color = series["y"], setting["color"]
            for each in series.get("seeds", ()):
                axis.plot(x, each, color=color, linewidth=0.5, alpha=0.5)
            if "low" in series and len(x) <= FEW:
                arms = [y - series["low"], series["high"] - y]
                axis.errorbar(
                    x, y, yerr=arms, color=color, linestyle="none", linewidth=1, capsize=2
                )
            elif "low" in series:
                axis.fill_between(
                    x, series["low"], series["high"], color=color, linewidth=0, alpha=0.16
                )
            if "hollow" in series:
                at = series["hollow"].astype(int)
                ring: Any = {"markerfacecolor": "w", "markeredgecolor": color, "markersize": 6}
                axis.plot(x[at], y[at], "o", label="saturated", **ring)
            axis.plot(
                x,
                y,
                color=color,
                marker="o" if len(x) <= 12 else "",
                label=setting_text(setting["label"]),
            )
        axis.set(
            xlabel="step",
            ylabel=plain(chart["title"], 100),
            yscale="log" if chart["log"] else "linear",
        )
        axis.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        finish(figure, axis)
    return figure


def paired_dots(verdict: Verdict) -> Figure:
    """The numbers that were tested, a dot for each pair and a line for each part, with mean and 95 % interval; dashed: the margin."""
    claim, parts = verdict.claim, verdict.finding.parts
    margin = claim.margin_of_parts(verdict.terms) * (1 if claim.direction == "higher" else -1)
    unit = {"points": "points", "percent": "%", "log": "%"}.get(claim.scale, claim.effect_unit)

    def scaled(values: object) -> np.ndarray:
        """Values in the claim's unit."""
        data = np.asarray(values, dtype=float)
        return {"plain": data, "log": 100 * np.expm1(data)}.get(claim.scale, 100 * data)

    with styled():
        figure, axis = panel(WIDTH, 0.5 + 0.3 * len(parts))
        axis.axvline(0, color=GRAY, linewidth=0.8)
        axis.axvline(float(scaled(margin)), color=GRAY, linewidth=0.8, linestyle="--")
        for row, frame in enumerate(parts.values()):
            data = frame["difference"].to_numpy(dtype=float)
            interval = contrast_interval(data) or mean_interval(data)
            axis.plot(
                scaled(data), np.full(len(data), row), ".", color=GRAY, alpha=0.7, markersize=7
            )
            if interval is not None:
                axis.plot(scaled([interval.low, interval.high]), [row, row], color=BLUE)
            axis.plot(scaled(data.mean()), row, "o", color=BLUE, markersize=5)
        axis.set_yticks(range(len(parts)), [plain(name) for name in parts])
        axis.set(
            xlabel=fill(plain(f"{claim.effect} [{unit}]", 160), 60), ylim=(-0.6, len(parts) - 0.4)
        )
        finish(figure, axis)
    return figure


def rotation_figure(table: pd.DataFrame, noise: float) -> Figure:
    """The angle [degrees] by which each method of `table` turns the gradient and the optimizer's step; dashed: the batch's noise."""
    shown = table[table[["gradient_rotation", "update_rotation"]].notna().any(axis=1)]
    shown = shown.sort_values(
        "gradient_rotation", ascending=False, na_position="first", kind="stable"
    )
    with styled():
        figure, axis = panel(WIDTH, 0.9 + 0.2 * len(shown))
        height = np.arange(len(shown))
        axis.plot(shown["gradient_rotation"], height, "o", color=BLUE, label="gradient")
        axis.plot(shown["update_rotation"], height, "s", color=COLORS[1], label="optimizer's step")
        if math.isfinite(noise):
            axis.axvline(
                noise,
                color=GRAY,
                linestyle="--",
                linewidth=1,
                label=f"noise of the batch, {noise:.0f}°",
            )
        axis.set_yticks(height, [plain(name, 48) for name in shown["method"]])
        axis.set(xlabel="angle to the reference [°]", ylim=(-0.6, len(shown) - 0.4))
        axis.set_xlim(left=0)
        finish(figure, axis)
    return figure


def weight_functions(functions: pd.DataFrame) -> Figure:
    """Weights over logit and probability. `functions`: method, axis (logit | probability), x, weight."""
    with styled():
        figure = Picture(figsize=(WIDTH, 2.4), layout="constrained")
        FigureCanvasAgg(figure)
        for axis, name in zip(figure.subplots(1, 2), ("logit", "probability"), strict=True):
            axis.set_prop_cycle(color=COLORS)
            for method, part in functions[functions["axis"] == name].groupby("method", sort=False):
                axis.plot(part["x"], part["weight"], label=setting_text(method))
            axis.set(xlabel=f"{name} of the token", ylabel="token weight")
        finish(figure, axis)  # both have the same labels
    return figure


def chart_figures(studies: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, Figure]]:
    """Names and figures of the charts of each study, see `study_charts`."""
    for study in studies:
        for chart in study["charts"]:
            name = (
                re.sub(r"\W+", "_", f"{study['name']} {chart['title'].partition(' [')[0]}")
                .strip("_")
                .lower()
            )
            yield name, curves(chart, study["settings"])


# -- The picture of one run to share: `show RUN --card card.png`

LETTER, LINE = 13 / 150, 0.19
"""Width of a letter, whole pixels at 150 to an inch, and height of a line [inches], in DejaVu Sans Mono of 10 points."""
FONTS = ("DejaVu Sans Mono", "Noto Sans Mono CJK JP", "Noto Sans CJK JP", "DejaVu Sans")
"""Those that are installed are used, the first that has a letter."""


def write_card(run: Run, file: Path) -> Path:
    """Write a picture of what the terminal shows of a run, its headline and its first curve, to a .png or .svg.

    Raises:
        UserError: another ending, no shares of tokens, or `file` cannot be written.
    """
    if file.suffix not in (".png", ".svg"):
        raise UserError(f"--card {file}: the picture is a .png or an .svg")
    if largest_update(run) is None:
        why = recorded_by(run, "recording.token_gradients_every")
        raise UserError(f"--card: no token's share of the gradient was recorded in {run.name}{why}")
    study = Study({run.name: run}, name=run.task)
    sections = [
        *found_sections(study, study.settings, top=3),
        Section("", curve_table(run).head(1)),
    ]
    with styled(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        try:
            terminal_picture(sections).savefig(file, dpi=150)
        except OSError as error:
            raise UserError(f"--card {file}: cannot be written ({error.strerror})") from error
    return file


def terminal_picture(sections: Sequence[Section], width: int = 96) -> Figure:
    """Sections as a terminal of `width` letters shows them."""
    console = Console(file=StringIO(), force_terminal=True, color_system="truecolor")
    shown = console.render_lines(
        to_terminal(sections), console.options.update(width=width), pad=False
    )
    across, down = LETTER * (width + 4), LINE * (len(shown) + 2)
    figure = Figure(figsize=(across, down), facecolor="white")
    FigureCanvasAgg(figure)
    look: dict[str, Any] = {
        "family": [name for name in FONTS if name in get_font_names()],
        "size": 10,
    }
    for n, line in enumerate(shown):
        x = 2 * LETTER
        for text, style, _ in line:
            color = style.color.get_truecolor().hex if style and style.color else None
            look |= {
                "weight": "bold" if style and style.bold else "normal",
                "color": "white" if color else "black",
            }
            box = {"facecolor": color, "edgecolor": "none", "pad": 1.5} if color else None
            figure.text(
                x / across, 1 - (n + 2) * LINE / down, text, parse_math=False, bbox=box, **look
            )
            x += LETTER * cell_len(text)
    return figure
