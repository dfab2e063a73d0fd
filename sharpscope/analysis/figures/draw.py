"""Building blocks of all figures, on seaborn: curves over seeds with quantile bands, points with intervals, and facets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import SymmetricalLogLocator

from sharpscope.analysis.figures.style import Lines, setting_text
from sharpscope.analysis.statistics import FEWEST, mean_interval

FEW = 6
"""With fewer seeds than this, quantiles over them would be their range: each seed is drawn as a thin line instead."""
POINTS = 50
"""Points of a curve over steps, at most; of longer runs each point is a median over several steps."""

BAND = f"Line: median over seeds; band: 10 to 90 % quantile, below {FEW} seeds a thin line each"


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
    result = mean_interval(data) if len(data) >= FEWEST else None
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
