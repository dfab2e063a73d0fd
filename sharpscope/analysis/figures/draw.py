"""Building blocks of all figures, on seaborn: curves over seeds with quantile bands, points with intervals, and facets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, SymmetricalLogLocator

from sharpscope.analysis.figures.style import BLACK, GRAY, Lines, finish, panels, setting_text, styled
from sharpscope.analysis.statistics import FEWEST, mean_interval

FEW = 6
"""With fewer seeds than this, quantiles over them would be their range: each seed is drawn as a thin line instead."""
POINTS = 50
"""Points of a curve over steps, at most; of longer runs each point is a median over several steps."""

BAND = f"Line: median over seeds; band: 10 to 90 % quantile, below {FEW} seeds a thin line each"


@dataclass(frozen=True)
class Row:
    """A row of panels.

    Attributes:
        label: of the ordinate, with its unit.
        values: setting, seed, the abscissa, value; with `group`, a column of panels for each.
        scale: linear, log, symlog, or auto (see `set_scale`).
        beside: what is drawn as a dotted line for comparison, such as a threshold; columns as `values`.
        beside_label: name of `beside` in the legend.
        title: above the first panel.
    """

    label: str
    values: pd.DataFrame
    scale: str = "linear"
    beside: pd.DataFrame = field(default_factory=pd.DataFrame)
    beside_label: str = ""
    title: str = ""


def facets(
    rows: Sequence[Row],
    lines: Lines,
    *,
    x: str = "step",
    xlabel: str = "step",
    reference: str = "",
    height: float = 1.35,
    xscale: str = "linear",
) -> Figure:
    """Panels of curves: a row for each of `rows`, a column for each group of settings; rows share their ordinate.

    Args:
        rows: from top to bottom.
        lines: of the settings.
        x: column of the abscissa.
        xlabel: its label, with the unit.
        reference: setting whose median is drawn in gray in the columns that lack it.
        height: of a row [inches].
        xscale: scale of the abscissa.
    """
    names = _groups(rows)
    with styled():
        figure, axes = panels(
            len(rows) * len(names), columns=len(names), height=height, sharex=True, sharey="row" if names[1:] else False
        )
        grid = np.array(axes, dtype=object).reshape(len(rows), len(names))
        for row, own in zip(rows, grid, strict=True):
            for name, axis in zip(names, own, strict=True):
                if reference and not (row.values["setting"] == reference)[_inside(row.values, name)].any():
                    other = row.values[row.values["setting"] == reference]
                    draw_medians(axis, other, x=x, color=GRAY, linewidth=0.8, label=setting_text(reference))
                draw_curves(axis, row.values[_inside(row.values, name)], lines, x=x)
                for label, one in row.beside[_inside(row.beside, name)].groupby("setting") if len(row.beside) else ():
                    look = {"color": lines[str(label)].color, "linestyle": ":", "linewidth": 1.0}
                    draw_medians(axis, one, x=x, **look)
                    axis.plot([], [], ":", color=BLACK, linewidth=1.0, label=row.beside_label)
                axis.set(xlabel="", ylabel="")
            own[0].set_ylabel(row.label)
            own[0].set_title(row.title, loc="left", pad=2)
            set_scale(
                own[0], pd.concat([row.values["value"], row.beside.get("value", pd.Series(dtype=float))]), row.scale
            )
        figure.supxlabel(xlabel, fontsize="medium")
        grid[0, 0].set_xscale(xscale)
        if xscale == "linear":
            grid[0, 0].xaxis.set_major_locator(MaxNLocator(nbins=6 if len(names) == 1 else 4, integer=x == "step"))
        columns = {name if names[1:] else "": list(grid[:, number]) for number, name in enumerate(names)}
        finish(figure, axes, columns, fold=int(14 * height))
    return figure


def _groups(rows: Sequence[Row]) -> list[str]:
    """Groups of the rows' settings in their order; one without a name where there are none."""
    names: list[str] = []
    for row in rows:
        if "group" in row.values:
            present = set(row.values["group"].dropna())
            names += [name for name in row.values["group"].cat.categories if name in present and name not in names]
    return names or [""]


def _inside(values: pd.DataFrame, group: str) -> pd.Series:
    return values["group"] == group if "group" in values else pd.Series(True, index=values.index)


def draw_curves(axis: Axes, values: pd.DataFrame, lines: Lines, *, x: str = "step") -> None:
    """One line a setting, the median over seeds, with the band from the 10 to the 90 % quantile.

    Below FEW seeds there is a thin line for each seed in place of the band. Missing values are left out.
    """
    for label, own in values.dropna(subset=["value"]).groupby("setting", sort=True):
        line, seeds = lines[str(label)], own["seed"].nunique()
        if 1 < seeds < FEW:
            for _, one in own.sort_values([x, "value"]).groupby("seed"):
                axis.plot(one[x], one["value"], color=line.color, linewidth=0.5, alpha=0.5)
        marker = line.marker if own[x].nunique() <= 12 else ""
        look: dict[str, Any] = {"color": line.color, "linestyle": line.dash, "marker": marker}
        _medians(axis, own, x, band=seeds >= FEW, label=setting_text(label), **look)


def draw_medians(axis: Axes, values: pd.DataFrame, *, x: str = "step", **look: Any) -> None:
    """The median over seeds as a line of its own; a short bar where it has one point."""
    if values[x].nunique() == 1:
        look |= {"marker": "_", "markersize": 12, "markeredgecolor": look.get("color"), "markeredgewidth": 1.0}
    _medians(axis, values, x, band=False, **look)


def _medians(axis: Axes, values: pd.DataFrame, x: str, *, band: bool, **look: Any) -> None:
    """Medians at each abscissa, with the band from the 10 to the 90 % quantile; ten times as fast as seaborn's lineplot."""
    known = values[[x, "value"]].dropna().sort_values(x)
    if known.empty:
        return
    at, first = np.unique(known[x].to_numpy(), return_index=True)
    groups = np.split(known["value"].to_numpy(dtype=float), first[1:])
    look = {"markeredgewidth": 0.75, "markeredgecolor": "w", **look}
    (line,) = axis.plot(at, [np.median(group) for group in groups], **look)
    if band:
        low, high = np.transpose([np.percentile(group, [10, 90]) for group in groups])
        axis.fill_between(at, low, high, color=line.get_color(), linewidth=0, alpha=0.16)


def draw_points(
    axis: Axes,
    values: pd.DataFrame,
    palette: Mapping[str, str] | str,
    *,
    x: str,
    y: str,
    order: Sequence[Any] | None = None,
    interval: Callable[[Any], tuple[float, float]] | None = None,
    **options: Any,
) -> None:
    """Every seed as a pale dot, and the mean with its interval (95 % t-interval from FEWEST seeds on, unless given).

    Args:
        axis: to draw on.
        values: a row for each seed; one of `x` and `y` is a category.
        palette: a color for all, or one for each value of the column `hue` in `options`.
        x, y: columns.
        order: of the categories.
        interval: values → (low, high).
        options: of seaborn's pointplot.
    """
    import seaborn as sns

    look = {"color": palette} if isinstance(palette, str) else {"palette": dict(palette)}
    shared: dict[str, Any] = {"x": x, "y": y, "ax": axis, "order": order, "legend": False} | look
    hue = {name: options[name] for name in ("hue", "hue_order") if name in options}
    sns.stripplot(
        values, **shared, **hue, dodge=bool(options.get("dodge")), size=3, alpha=0.3, linewidth=0, jitter=False
    )
    sns.pointplot(
        values,
        **shared,
        **options,
        errorbar=interval or t_interval,
        linestyle="none",
        capsize=0.12,
        err_kws={"linewidth": 1.2},
    )


def t_interval(values: Any) -> tuple[float, float]:
    """95 % t-interval of the mean; none below FEWEST values."""
    data = np.asarray(values, dtype=float)
    result = mean_interval(data, "t") if len(data) >= FEWEST else None
    return (np.nan, np.nan) if result is None else (result.low, result.high)


def set_scale(axis: Axes, values: pd.Series, scale: str) -> None:
    """Set the ordinate's scale; `auto` is logarithmic for positive values, and symmetric-logarithmic for others."""
    if scale == "auto":
        scale = "symlog" if (values <= 0).any() else "log"
    if scale == "symlog":
        symlog(axis.yaxis, values)
    elif values.notna().any():
        axis.set_yscale(scale)


def symlog(axis: Axis, values: pd.Series, share: float = 0.1) -> None:
    """Make an axis symmetric-logarithmic: linear below the decade that holds the smallest `share` of absolute values."""
    size = np.abs(values.to_numpy(dtype=float))
    size = size[np.isfinite(size) & (size > 0)]
    if len(size):
        smallest = 10 ** np.floor(np.log10(np.quantile(size, share)))
        set_one = axis.axes.set_xscale if axis is axis.axes.xaxis else axis.axes.set_yscale
        set_one("symlog", linthresh=smallest)
        locator = SymmetricalLogLocator(base=10, linthresh=smallest)
        locator.set_params(numticks=5)
        axis.set_major_locator(locator)


def in_blocks(values: pd.DataFrame) -> tuple[pd.DataFrame, int]:
    """The values with several steps in a row made one, so that POINTS are left; and how many steps that is.

    A block has the median of its values at the mean of its steps; missing values are left out.
    """
    size = -(-values["step"].nunique() // POINTS)
    if size == 1:
        return values, 1
    block = ((values["step"] - values["step"].min()) // size).rename("block")
    by = [name for name in values if name not in ("step", "value")]
    grouped = values.groupby([*by, block], sort=False, observed=True)
    return grouped.agg(value=("value", "median"), step=("step", "mean")).reset_index().drop(columns="block"), size


def regular_steps(rows: pd.DataFrame, column: str, setting: str) -> pd.DataFrame:
    """setting, seed, step, value: the mean of `column` over runs of a seed, at steps that more than half of the seeds have.

    Other steps are recorded only in runs with a spike there, which are no fair sample of the seeds.
    """
    means = rows.groupby(["step", "seed"])[column].mean().dropna().rename("value").reset_index()
    regular = 2 * means.groupby("step")["seed"].transform("size") > means["seed"].nunique()
    return means[regular].assign(setting=setting)


def with_groups(values: pd.DataFrame, groups: Mapping[str, Sequence[str]]) -> pd.DataFrame:
    """The rows of the settings in `groups` (name → settings), with the name as `group`."""
    names = {label: name for name, labels in groups.items() for label in labels}
    group = pd.Categorical(values["setting"].map(names), categories=list(groups), ordered=True)
    return values.assign(group=group)[pd.notna(group)].reset_index(drop=True)
