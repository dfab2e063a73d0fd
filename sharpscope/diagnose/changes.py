"""The steps at which the quantities of a log change: level or trend, by tests of two lines against one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd

from sharpscope.diagnose.logs import Log
from sharpscope.diagnose.quantities import BY_NAME

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
_MOST = 3


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


def _of_series(name: str, series: pd.Series) -> list[Change]:
    values, steps = _means(series.to_numpy(float), series.index.to_numpy())
    y = values
    if BY_NAME[name].log:
        positive = values[values > 0]
        if not len(positive):
            return []
        y = np.log(np.maximum(values, positive.min()))
    y = _without_outliers(y)
    splits: list[tuple[int, int, int]] = []
    _split(y, 0, len(y), splits)
    splits.sort()
    found = []
    for number, (at, low, high) in enumerate(splits):
        start = splits[number - 1][0] if number else 0
        end = splits[number + 1][0] if number + 1 < len(splits) else len(y)
        direction = _direction(y[start:at], y[at:end])
        before, after = float(values[start:at].mean()), float(values[at:end].mean())
        if _matters(name, before, after):
            interval = int(steps[low]), int(steps[high])
            found.append(Change(name, int(steps[at]), *interval, direction, before, after))
    return found


def _means(values: np.ndarray, steps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """At most `_LONGEST` values, means over equal numbers of steps, and the first step of each."""
    if len(values) <= _LONGEST:
        return values, steps
    edges = np.linspace(0, len(values), _LONGEST + 1).astype(int)[:-1]
    return np.add.reduceat(values, edges) / np.diff(np.append(edges, len(values))), steps[edges]


def _matters(name: str, before: float, after: float) -> bool:
    """Whether a change is large enough to be listed, and its ends differ as they are printed."""
    if f"{before:.3g}" == f"{after:.3g}":
        return False
    if name.startswith(("mismatch", "kl_step")):
        return max(before, after) >= 1e-3  # below is rounding
    if BY_NAME[name].log or name not in ("truncated", "dead_groups", "clipped", "entropy", "kl"):
        return True
    return abs(after - before) >= 0.02  # two points of a share, or 0.02 nats


def _without_outliers(y: np.ndarray) -> np.ndarray:
    """Values limited to four robust standard deviations of the noise around their running median over five."""
    if len(y) < 2 * LEAST:
        return y
    padded = np.pad(y, 2, mode="edge")
    center = np.median(np.lib.stride_tricks.sliding_window_view(padded, 5), axis=1)
    spread = 1.4826 * float(np.median(np.abs(y - center)))
    return y if spread == 0 else np.clip(y, center - 4 * spread, center + 4 * spread)


def _line_rss(y: np.ndarray) -> np.ndarray:
    """Residual sum of squares of the line through y[:n], for n = 1 … len(y); shape (len(y),)."""
    n = np.arange(1, len(y) + 1)
    t = np.arange(len(y), dtype=float)
    sy, syy, sty = np.cumsum(y), np.cumsum(y * y), np.cumsum(t * y)
    st, stt = np.cumsum(t), np.cumsum(t * t)
    a, b, c = stt - st * st / n, sty - st * sy / n, syy - sy * sy / n
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.maximum(np.where(a > 0, c - b * b / a, c), 0.0)


def _split(y: np.ndarray, start: int, end: int, found: list[tuple[int, int, int]]) -> None:
    """Append (first index after, lowest, highest) of the changes of y[start:end]."""
    part = y[start:end] - y[start:end].mean() if end > start else y[start:end]
    n = len(part)
    scale = float(np.ptp(part)) if n else 0.0
    if n < 2 * LEAST or scale <= 1e-9 * max(1.0, float(np.abs(y).max())) or len(found) >= _MOST:
        return
    part = part / scale
    one = float(_line_rss(part)[-1])
    # two[i]: a line through the first i + 1 values and another through the rest
    two = _line_rss(part)[:-1] + _line_rss(part[::-1])[::-1][1:]
    inside = slice(LEAST - 1, n - LEAST)
    two = two[inside]
    best = int(np.argmin(two))
    least = max(float(two[best]), 1e-12 * n)
    at = best + LEAST
    residuals = np.concatenate([_residuals(part[:at]), _residuals(part[at:])])
    power = float((residuals**2).sum())
    rho = float((residuals[1:] * residuals[:-1]).sum() / power) if power > 0 else 0.0
    rho = float(np.clip(rho + (2 + 4 * rho) / n, 0, 0.9))  # four fitted values bias it towards zero
    effective = (1 - rho) / (1 + rho)
    statistic = (one - least) / 2 / (least / (n - 4)) * effective
    if statistic < THRESHOLD:
        return
    # chi2, 2 df, 95 %
    plausible = np.flatnonzero(effective * n * np.log(np.maximum(two, least) / least) <= 5.99)
    low, high = int(plausible.min()) + LEAST, int(plausible.max()) + LEAST
    found.append((start + at, start + low, start + high))
    _split(y, start, start + at, found)
    _split(y, start + at, end, found)


def _residuals(y: np.ndarray) -> np.ndarray:
    t = np.arange(len(y)) - (len(y) - 1) / 2
    slope = float((t * y).sum() / (t * t).sum()) if len(y) > 1 else 0.0
    return y - y.mean() - slope * t


def _direction(before: np.ndarray, after: np.ndarray) -> Literal["up", "down", "flat"]:
    """Where a series goes at a change: flat if it had a trend that it does not keep, and it does not turn back either."""
    window = min(len(after), max(LEAST, len(before)))
    fitted = before - _residuals(before)
    noise = float(np.std(np.concatenate([_residuals(before), _residuals(after)])))
    rise = float(after[:window].mean() - fitted[-1])
    trend = float(fitted[-1] - fitted[0]) * window / len(before)
    if abs(fitted[-1] - fitted[0]) > 2 * noise and abs(rise) < abs(trend) / 2:
        return "flat"
    return "up" if rise > 0 else "down"
