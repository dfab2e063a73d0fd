"""The steps at which the quantities of a log change: level or trend, by tests of two lines against one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd

from sharpscope.diagnose.logs import Log
from sharpscope.diagnose.quantities import BY_NAME
from sharpscope.rules.measures import Values

ORDERED = (
    *("reward", "grad_norm", "update_norm", "entropy", "kl", "kl_step"),
    *("length", "truncated", "dead_groups", "clipped", "mismatch", "mismatch_kl"),
)
"""Quantities whose changes are listed."""
ORDERED_SUPERVISED = ("loss", "eval_loss", "grad_norm", "entropy", "chosen", "margin")
"""Those of a training on given texts."""

LEAST = 6
"""Fewest steps on each side of a change."""

THRESHOLD = 11.0
"""F statistic from which a change is reported. Fewer than 2 in 100 series of independent noise have one; of 20 steps with an
autocorrelation of 0.3 to 0.8, 6 to 22 in 100 do."""

_LONGEST = 1000
"""Values of a series above which means of neighbors are judged."""
_MOST = 3
"""Changes of one quantity from which on no part is split again."""
_CHI2 = 5.99
"""95 % quantile of χ² with two degrees of freedom."""
_SHARES = frozenset({"truncated", "dead_groups", "clipped", "entropy", "kl"})
"""Quantities of which a change of less than 0.02 is not listed."""


@dataclass(frozen=True)
class Change:
    """A change of one quantity."""

    quantity: str  # canonical name
    step: int  # first step after the change
    low: int  # low, high: 95 % interval of `step`, by the likelihood of the other steps
    high: int
    # where the quantity goes from there; flat: it stops rising or falling
    direction: Literal["up", "down", "flat"]
    # before, after: its mean value before the change and after it, up to the next change
    before: float
    after: float


def changes(log: Log, quantities: tuple[str, ...] | None = None) -> list[Change]:
    """Changes of level or trend of the quantities of a log, sorted by step.

    A change splits a part of a series in two if two straight lines fit it much better than one, judged by their F statistic
    with the autocorrelation of the residuals taken into account; the parts are split again. Quantities that vary by
    factors are judged by their logarithm, and single outliers count no more than four standard deviations. `quantities`: those
    that are looked at; default: by the kind of training.
    """
    if quantities is None:
        given_texts = log.training not in ("rewards", "distillation")
        quantities = ORDERED_SUPERVISED if given_texts else ORDERED
    found = [change for name in quantities for change in _of_series(name, log.finite(name))]
    return sorted(found, key=lambda change: (change.step, change.quantity))


@dataclass(frozen=True, kw_only=True)
class _Split:
    """Where two lines fit a part of a series better than one; positions in the series."""

    at: int  # first value of the second line
    low: int  # low, high: 95 % interval of `at`
    high: int


def _of_series(name: str, series: pd.Series) -> list[Change]:
    """The changes of one quantity."""
    values, steps = thinned(
        series.to_numpy(float),
        series.index.to_numpy(),
        _LONGEST,
    )
    judged = _judged(values, logarithmic=BY_NAME[name].log)
    if judged is None:
        return []
    splits: list[_Split] = []
    _split(judged, 0, len(judged), splits)
    splits.sort(key=lambda split: split.at)
    edges = [0, *(split.at for split in splits), len(judged)]
    found = []
    for number, split in enumerate(splits):
        left = slice(edges[number], split.at)
        right = slice(split.at, edges[number + 2])
        change = Change(
            quantity=name,
            step=int(steps[split.at]),
            low=int(steps[split.low]),
            high=int(steps[split.high]),
            direction=_direction(judged[left], judged[right]),
            before=float(values[left].mean()),
            after=float(values[right].mean()),
        )
        if _matters(change):
            found.append(change)
    return found


def thinned(values: Values, steps: Values, most: int) -> tuple[Values, Values]:
    """At most `most` values, means over equal numbers of steps, and the first step of each.

    Args:
        values: finite ones (n,).
        steps: of each (n,).
        most: how many there may be.
    """
    if len(values) <= most:
        return values, steps
    edges = np.linspace(0, len(values), most + 1).astype(int)
    sums = np.add.reduceat(values, edges[:-1])
    return sums / np.diff(edges), steps[edges[:-1]]


def _judged(values: Values, logarithmic: bool) -> Values | None:
    """A series as it is judged: on its scale and without outliers; None if a logarithm has nothing to show."""
    if not logarithmic:
        return _without_outliers(values)
    positive = values[values > 0]
    if not len(positive):
        return None
    return _without_outliers(np.log(np.maximum(values, positive.min())))


def _matters(change: Change) -> bool:
    """Whether a change is large enough to be listed, and its ends differ as they are printed."""
    name = change.quantity
    before = change.before
    after = change.after
    if f"{before:.3g}" == f"{after:.3g}":
        return False
    if name.startswith(("mismatch", "kl_step")):
        return max(before, after) >= 1e-3  # below is rounding
    if name in _SHARES:
        return abs(after - before) >= 0.02  # two points of a share, or 0.02 nats
    return True


def _without_outliers(y: Values) -> Values:
    """Values limited to four robust standard deviations of the noise around their running median over five."""
    if len(y) < 2 * LEAST:
        return y
    windows = np.lib.stride_tricks.sliding_window_view(np.pad(y, 2, mode="edge"), 5)
    center = np.median(windows, axis=1)
    spread = 1.4826 * float(np.median(np.abs(y - center)))
    if spread == 0:
        return y
    return np.clip(y, center - 4 * spread, center + 4 * spread)


def _line_rss(y: Values) -> Values:
    """Residual sum of squares of the line through y[:n], for n = 1 … len(y); shape (len(y),).

    From running sums of the values, of their positions t, and of the products of both.
    """
    t = np.arange(len(y), dtype=float)
    n = t + 1
    of_y = np.cumsum(y)
    of_t = np.cumsum(t)
    tt = np.cumsum(t * t) - of_t * of_t / n
    ty = np.cumsum(t * y) - of_t * of_y / n
    yy = np.cumsum(y * y) - of_y * of_y / n
    # through the first value alone a line has any slope
    explained = np.divide(
        ty * ty,
        tt,
        out=np.zeros(len(y)),
        where=tt > 0,
    )
    return np.maximum(yy - explained, 0.0)


def _split(y: Values, start: int, end: int, found: list[_Split]) -> None:
    """Append the splits of y[start:end]: the best one, if it is significant, then those of its two parts."""
    if end - start < 2 * LEAST or len(found) >= _MOST:
        return
    part = y[start:end] - y[start:end].mean()
    scale = float(np.ptp(part))
    if scale <= 1e-9 * max(1.0, float(np.abs(y).max())):
        return
    best = _best(part / scale)
    if best is None:
        return
    at = start + best.at
    found.append(
        _Split(
            at=at,
            low=start + best.low,
            high=start + best.high,
        )
    )
    _split(y, start, at, found)
    _split(y, at, end, found)


def _best(y: Values) -> _Split | None:
    """The best split of a series with at least LEAST values on either side, None if it is not significant."""
    n = len(y)
    # the line through the first i + 1 values and another through the rest
    two = _line_rss(y)[:-1] + _line_rss(y[::-1])[::-1][1:]
    two = two[LEAST - 1 : n - LEAST]
    at = int(np.argmin(two)) + LEAST
    least = max(float(two.min()), 1e-12 * n)
    residuals = np.concatenate([_residuals(y[:at]), _residuals(y[at:])])
    # of n values with an autocorrelation rho about n·(1 − rho)/(1 + rho) are independent
    rho = _autocorrelation(residuals)
    independent = (1 - rho) / (1 + rho)
    one = float(_line_rss(y)[-1])
    statistic = (one - least) / 2 / (least / (n - 4)) * independent
    if statistic < THRESHOLD:
        return None
    likelihood = independent * n * np.log(np.maximum(two, least) / least)
    plausible = np.flatnonzero(likelihood <= _CHI2) + LEAST
    return _Split(
        at=at,
        low=int(plausible[0]),
        high=int(plausible[-1]),
    )


def _autocorrelation(residuals: Values) -> float:
    """Autocorrelation of the residuals (n,) of two lines at lag 1, whose four fitted values bias it towards zero."""
    power = float((residuals**2).sum())
    if power == 0:
        return float(np.clip(2 / len(residuals), 0, 0.9))
    rho = float((residuals[1:] * residuals[:-1]).sum()) / power
    return float(np.clip(rho + (2 + 4 * rho) / len(residuals), 0, 0.9))


def _residuals(y: Values) -> Values:
    """A series without its line of least squares."""
    if len(y) < 2:
        return y - y.mean()
    t = np.arange(len(y)) - (len(y) - 1) / 2
    slope = float((t * y).sum() / (t * t).sum())
    return y - y.mean() - slope * t


def _direction(before: Values, after: Values) -> Literal["up", "down", "flat"]:
    """Where a series goes at a change: flat if it had a trend that it does not keep, and it does not turn back either."""
    window = min(len(after), max(LEAST, len(before)))
    line = before - _residuals(before)
    climbed = float(line[-1] - line[0])
    noise = np.std(np.concatenate([_residuals(before), _residuals(after)]))
    rise = float(after[:window].mean() - line[-1])
    expected = climbed * window / len(before)
    if abs(climbed) > 2 * noise and abs(rise) < abs(expected) / 2:
        return "flat"
    return "up" if rise > 0 else "down"
