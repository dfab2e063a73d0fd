"""Figures: from small frames to matplotlib figures with their uncertainty, and the picture of one run to share.

All have one style: a color-blind safe palette, a paper's column width, legends outside the data.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from io import BytesIO
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
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, ScalarFormatter

from sharpscope.analysis.curves import COLORS, in_order, study_charts
from sharpscope.analysis.forks import COMPARISONS, NAMES, UNITS, fork_differences
from sharpscope.analysis.headline import Moved, accuracy_texts, concentration_text, largest_update, moved_tokens
from sharpscope.analysis.measures import STEPS, step_values
from sharpscope.analysis.report import laid_out, main_differences
from sharpscope.analysis.sections import Marked
from sharpscope.analysis.spikes import recorded_by
from sharpscope.analysis.statistics import contrast_interval, mean_interval
from sharpscope.analysis.study import Study
from sharpscope.analysis.text import method_label, model_label, number, percent, printable, visible
from sharpscope.errors import UserError
from sharpscope.traces import Run, Runs

if TYPE_CHECKING:
    from sharpscope.analysis.claims import Verdict

FEW = 30
"""Points up to which intervals are bars and not a band."""
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


# -- The figures


def curves(chart: Mapping[str, Any], labels: Sequence[str]) -> Figure:
    """A chart of `study_charts`: a curve for each setting with its interval, and thin lines of few seeds."""
    styles, x = lines(labels), np.array(chart["x"], dtype=float)
    with styled():
        figure, (axis,) = panels(1, height=1.9)
        for label, series in zip(labels, chart["series"], strict=True):
            _curve(axis, x, {name: np.array(values, dtype=float) for name, values in series.items()}, styles[label])
            axis.lines[-1].set_label(setting_text(label))
        axis.set(xlabel="step", ylabel=plain(chart["title"], 100), yscale="log" if chart["log"] else "linear")
        axis.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        finish(figure, [axis])
    return figure


def _curve(axis: Axes, x: np.ndarray, series: Mapping[str, np.ndarray], line: Mapping[str, Any]) -> None:
    """One setting's curve; the mean is the last line that is added."""
    y, color = series["y"], line["color"]
    for each in series.get("seeds", ()):
        axis.plot(x, each, color=color, linewidth=0.5, alpha=0.5)
    if "low" in series and len(x) <= FEW:
        arms = [y - series["low"], series["high"] - y]
        axis.errorbar(x, y, yerr=arms, color=color, linestyle="none", linewidth=1, capsize=2)
    elif "low" in series:
        axis.fill_between(x, series["low"], series["high"], color=color, linewidth=0, alpha=0.16)
    if "hollow" in series:
        at = series["hollow"].astype(int)
        axis.plot(x[at], y[at], "o", markerfacecolor="w", markeredgecolor=color, markersize=6, label="saturated")
    axis.plot(x, y, marker="o" if len(x) <= 12 else "", **line)


def differences(table: pd.DataFrame) -> Figure:
    """One row for each contrast with its 95 % interval: a panel for each quantity.

    `table`: quantity (with its unit), contrast, difference, low, high.
    """
    quantities = list(dict.fromkeys(table["quantity"]))
    contrasts = list(dict.fromkeys(table["contrast"]))[::-1]
    height = np.arange(len(contrasts))
    with styled():
        figure, axes = panels(len(quantities), height=0.7 + 0.18 * len(contrasts), sharey=True)
        for axis, quantity in zip(axes, quantities, strict=True):
            part = table[table["quantity"] == quantity].set_index("contrast").reindex(contrasts).astype({"low": float})
            axis.axvline(0, color=GRAY, linewidth=0.8)
            axis.hlines(height, part["low"], part["high"], color=BLUE, linewidth=1.2)
            axis.plot(part["difference"], height, "o", color=BLUE)
            axis.set_yticks(height, [setting_text(name) for name in contrasts])
            axis.set(xlabel=fill(plain(quantity, 80), 26), ylim=(-0.6, len(contrasts) - 0.4))
        finish(figure, axes)
    return figure


def fork_effects(table: pd.DataFrame) -> Figure | None:
    """Each arm's difference to the reference by state and comparison, a panel for each outcome; None if nothing was measured.

    `table`: of one fork, from `sharpscope.analysis.fork_differences`.
    """
    compared = (table["arm"] != table["reference"]) & table["difference"].notna()
    named = table["outcome"].isin(list(NAMES)) & table["comparison"].isin(list(COMPARISONS))  # 0.2 had one more
    shown = table[compared & named]
    if shown.empty:
        return None
    several = shown["state"].nunique() > 1
    matched = shown["comparison"].map({name: ", matched KL" * (name == "kl") for name in COMPARISONS})
    contrast = shown["arm"] + (", " + shown["state"] if several else "") + matched
    units = [UNITS.get(outcome, ("", 1.0)) for outcome in shown["outcome"]]
    names = [NAMES[name] + f" [{unit}]" * bool(unit) for name, (unit, _) in zip(shown["outcome"], units, strict=True)]
    ends = shown[["difference", "low", "high"]].astype(float).mul([factor for _, factor in units], axis=0)
    rank = shown["outcome"].map(list(NAMES).index).to_numpy().argsort(kind="stable")
    return differences(ends.assign(quantity=names, contrast=contrast).iloc[rank])


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
        figure, (axis,) = panels(1, height=0.5 + 0.3 * len(parts))
        figure.set_figwidth(WIDTH)
        axis.axvline(0, color=GRAY, linewidth=0.8)
        axis.axvline(float(scaled(margin)), color=GRAY, linewidth=0.8, linestyle="--")
        for row, frame in enumerate(parts.values()):
            data = frame["difference"].to_numpy(dtype=float)
            interval = contrast_interval(data) or mean_interval(data)
            axis.plot(scaled(data), np.full(len(data), row), ".", color=GRAY, alpha=0.7, markersize=7)
            if interval is not None:
                axis.plot(scaled([interval.low, interval.high]), [row, row], color=BLUE)
            axis.plot(scaled(data.mean()), row, "o", color=BLUE, markersize=5)
        axis.set_yticks(range(len(parts)), [plain(name) for name in parts])
        axis.set(xlabel=fill(plain(f"{claim.effect} [{unit}]", 160), 60), ylim=(-0.6, len(parts) - 0.4))
        finish(figure, [axis])
    return figure


def rotation_figure(table: pd.DataFrame, noise: float) -> Figure:
    """The angle by which each method turns the gradient and the optimizer's step, as dots on a line of degrees.

    Args:
        table: columns `method`, `gradient_rotation` and `update_rotation` [degrees]; an angle that is NaN is left out.
        noise: angle between the batch's gradient and the expected gradient [degrees], a dashed line; NaN: none.
    """
    shown = table[table[["gradient_rotation", "update_rotation"]].notna().any(axis=1)]
    shown = shown.sort_values("gradient_rotation", ascending=False, na_position="first", kind="stable")
    with styled():
        figure, (axis,) = panels(1, height=0.9 + 0.2 * len(shown))
        figure.set_figwidth(WIDTH)
        height = np.arange(len(shown))
        axis.plot(shown["gradient_rotation"], height, "o", color=BLUE, label="gradient")
        axis.plot(shown["update_rotation"], height, "s", color=COLORS[1], label="optimizer's step")
        if math.isfinite(noise):
            axis.axvline(noise, color=GRAY, linestyle="--", linewidth=1, label=f"noise of the batch, {noise:.0f}°")
        axis.set_yticks(height, [plain(name, 48) for name in shown["method"]])
        axis.set(xlabel="angle to the reference [°]", ylim=(-0.6, len(shown) - 0.4))
        axis.set_xlim(left=0)
        finish(figure, [axis])
    return figure


def weight_functions(functions: pd.DataFrame, on_tokens: pd.DataFrame | None = None) -> Figure:
    """Weights over logit and probability; below, the median weight of a run's tokens with 10 to 90 % bands.

    `functions`: method, axis (logit | probability), x, weight. `on_tokens`: method, logit, probability, weight of each token.
    """
    labels = {"logit": "logit of the token", "probability": "probability π of the token"}
    tokens = functions[[]].assign(method="").head(0) if on_tokens is None else on_tokens
    styles = lines([*functions["method"], *tokens["method"]])
    with styled():
        figure, axes = panels(2 if on_tokens is None else 4)
        for axis, name in zip(axes, labels, strict=False):
            for method, part in functions[functions["axis"] == name].groupby("method", sort=False):
                axis.plot(part["x"], part["weight"], label=setting_text(method), **styles[str(method)])
            axis.set(xlabel=labels[name], ylabel="token weight", title="function, published constants")
        for axis, name in zip(axes[2:], labels, strict=False):
            for method, part in tokens.groupby("method", sort=False):
                bins = pd.qcut(part[name], 20, duplicates="drop") if name == "logit" else pd.cut(part[name], 20)
                grouped = part.groupby(bins, observed=True)
                enough, weight = grouped.size() >= 5, grouped["weight"]
                at, *levels = grouped[name].median(), *(weight.quantile(q) for q in (0.5, 0.1, 0.9))
                at, middle, low, high = (each[enough] for each in (at, *levels))
                line = styles[str(method)]
                axis.plot(at, middle, label=setting_text(method), marker="o" if len(at) <= 12 else "", **line)
                axis.fill_between(at, low, high, color=line["color"], linewidth=0, alpha=0.16)
            axis.set(xlabel=labels[name], ylabel="token weight", title="on the run's tokens, calibrated there")
        finish(figure, axes)
    return figure


def run_pictures(runs: Runs) -> Iterator[tuple[str, Figure]]:
    """Names and figures of each study among `runs`: its charts and differences; and those of forks."""
    for study, settings in laid_out(runs):
        made = study_charts(study, settings, runs)
        labels = [setting["label"] for setting in made["settings"]]
        for chart in made["charts"]:
            name = re.sub(r"\W+", "_", chart["title"].partition(" [")[0]).strip("_").lower()
            yield f"{study.slug}{name}", curves(chart, labels)
        shown = study.only([setting.label for setting in settings])
        table = main_differences(study, shown.labels)
        if len(table) > 1:
            share = (table["unit"] == "share").to_numpy()
            ends = table[["difference", "low", "high"]].astype(float).mul(np.where(share, 100, 1), axis=0)
            named = table["quantity"] + np.where(share, " [points]", "")
            yield f"{study.slug}differences", differences(table.assign(**ends, quantity=named))
    forked = fork_differences(runs.forks) if any(run.rows("forks") for run in runs) else pd.DataFrame({"fork": []})
    for name, part in forked.groupby("fork", sort=False):  # type: ignore[assignment]
        if (figure := fork_effects(part)) is not None:
            yield f"fork_{name}" if forked["fork"].nunique() > 1 else "forks", figure


SIZE = (12.0, 6.3)
"""Inches at 100 dots each: 1200 × 630, as links to pages show them."""
SENTENCE, LETTERS = 58, 13
"""Characters of a sentence, and their size [points]."""
LETTER = 0.602
"""Width of a letter of DejaVu Sans Mono over its size."""
TINT = {1: "#a9cdf0", -1: "#f7c297", 0: "#dddddd"}
"""Background of a token that is made more or less likely."""
FONTS = ("DejaVu Sans Mono", "Noto Sans Mono CJK JP", "Noto Sans CJK JP", "DejaVu Sans")
"""Those that are installed are used, the first that has a letter."""


def write_card(run: Run, file: Path) -> Path:
    """Write the picture of a run.

    Args:
        run: with recorded shares of tokens.
        file: ends in .png or .svg.

    Raises:
        UserError: another ending, or no shares.
    """
    if file.suffix not in (".png", ".svg"):
        raise UserError(f"--card {file}: the picture is a .png or an .svg")
    spike = largest_update(run)
    if spike is None:
        why = recorded_by(run, "recording.token_gradients_every")
        raise UserError(f"--card: no token's share of the gradient was recorded in {run.name}{why}")
    with styled(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        try:
            card(run, spike.step).savefig(file, dpi=100)
        except OSError as error:
            raise UserError(f"--card {file}: cannot be written ({error.strerror})") from error
    return file


def card(run: Run, step: int) -> Figure:
    """The picture of a run with the shares of a step's tokens."""
    figure = Figure(figsize=SIZE, facecolor="white")
    FigureCanvasAgg(figure)
    model = run.config.get("policy", {}).get("model") or run.info.get("model")
    facts = [printable(run.name, 40), method_label(run.method), *([model_label(str(model))] if model else [])]
    _write(figure, 0.04, 0.93, " · ".join(facts), size=14, color="#555555")
    said = concentration_text(run, step) or "Which tokens moved the model"
    for n, line in enumerate(fill(said, 68).splitlines()[:2]):
        _write(figure, 0.04, 0.845 - 0.075 * n, line, size=21, weight="bold")
    which = f"Step {step}: the tokens with the largest shares of the gradient. ↑ made more likely, ↓ less likely"
    _write(figure, 0.04, 0.685, which, size=13)
    for n, one in enumerate(moved_tokens(run, step, top=3)):
        _sentence(figure, 0.605 - 0.085 * n, one)
    study = Study({run.name: run}, name=run.task)
    values = step_values(study, list(STEPS))
    axis = figure.add_axes((0.08, 0.13, 0.88, 0.24))
    if len(values):  # the reward by step, or else the first quantity that varies
        name = next(name for name in STEPS if name in set(values["quantity"]))
        part = values[values["quantity"] == name]
        marker = "o" if len(part) <= 20 else ""
        axis.plot(part["step"], STEPS[name].factor * part["value"], color=COLORS[0], linewidth=2, marker=marker)
        axis.set_title(f"{STEPS[name].name}, by step", loc="left", fontsize=12)
        axis.tick_params(labelsize=11)
    _write(figure, 0.04, 0.035, printable(" ".join(accuracy_texts(study.settings)[:1]), 110), size=12, color="#333333")
    _write(figure, 0.96, 0.035, "sharpscope", size=12, color="#555555", ha="right")
    return figure


def _write(figure: Figure, x: float, y: float, text: str, **style: object) -> None:
    """Text at a place of the figure, without math mode."""
    figure.text(x, y, visible(text), parse_math=False, **style)  # type: ignore[arg-type]


def _sentence(figure: Figure, y: float, one: Moved) -> None:
    """One token in its sentence on a line, its background colored by its direction, and its numbers."""
    _write(figure, 0.04, y, {1: "↑", -1: "↓"}.get(one.sentence.direction, "·"), size=LETTERS + 3, weight="bold")
    x, fonts = 0.065, [name for name in FONTS if name in get_font_names()]
    for text, style in _parts(one.sentence):
        _write(figure, x, y, text, size=LETTERS, family=fonts, **style)
        x += LETTER * LETTERS / 72 / SIZE[0] * len(text)
    outcome = "" if one.correct is None else ("right · " if one.correct else "wrong · ")
    times = f" (×{one.count})" if one.count > 1 else ""
    numbers = f"{outcome}{percent(one.share, 1, sign=True)}{times} · π {number(one.probability)}"
    _write(figure, 0.96, y, numbers, size=LETTERS, ha="right")


def _parts(sentence: Marked) -> list[tuple[str, dict[str, object]]]:
    """(text, style) of what stands before the token, of it, and after it, together at most SENTENCE letters."""
    whole = visible(sentence.token)[:30]
    token = whole.strip() or "‸"
    lead, trail = whole[: len(whole) - len(whole.lstrip())], whole[len(whole.rstrip()) :]
    before, after, half = visible(sentence.before) + lead, trail + visible(sentence.after), (SENTENCE - len(token)) // 2
    before = before if len(before) <= half else f"…{before[1 - half :]}"
    room = SENTENCE - len(token) - len(before)
    after = after if len(after) <= room else f"{after[: room - 1]}…"
    box = {"facecolor": TINT[sentence.direction], "edgecolor": "none", "pad": 2.5}
    return [(before, {"color": "#555555"}), (token, {"bbox": box}), (after, {"color": "#555555"})]
