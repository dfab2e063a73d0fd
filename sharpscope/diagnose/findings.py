"""Findings and the order of events: the rules of `sharpscope.rules` judged in a log, and the steps at which its quantities change."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd

from sharpscope.diagnose.logs import BY_NAME, Log
from sharpscope.packaged import package_yaml
from sharpscope.rules.judging import EARLY, WINDOW, History, applies, finite, step_noise
from sharpscope.rules.table import RULES, SEVERITIES, Rule, Severity


@dataclass(frozen=True)
class Finding:
    """A rule that applied."""

    rule: Rule
    severity: Severity  # by what the reward does afterwards
    began: Change  # of the quantity that shows it best
    change: str  # how the quantity changed, and what the reward did afterwards
    measured: str  # what the rule measured, with its threshold
    certainty: str  # where it applies, and how often it does in healthy runs

    @property
    def step(self) -> int:
        """The step at which it began."""
        return self.began.step

    @property
    def text(self) -> str:
        """The numbers on one line."""
        return f"{self.change}; {self.measured}" if self.measured else self.change


@dataclass(frozen=True)
class _Stretch:
    """Positions at which a rule applies: first, last, how many; the change with which it began; and the rule's measure."""

    began: Change
    first: int
    last: int
    count: int
    measured: np.ndarray


EXACT = ("zero_gradient", "reward_constant")
"""Rules of a quantity that stays exactly the same; they begin where it begins to."""


FALSE_ALARMS: dict[str, dict[str, list[int]]] = package_yaml(
    "sharpscope.diagnose", "false_alarms.json"
)
"""Rule -> kind of healthy runs -> [runs in which it applied, runs that it could judge]."""


def find(log: Log, changes: Sequence[Change]) -> list[Finding]:
    """The rules that apply in a log, most severe first, then by the step at which they began."""
    history: dict[str, np.ndarray] = {
        str(name): log.frame[name].to_numpy(float) for name in log.frame
    }
    steps = log.frame.index.to_numpy()
    judged = [rule for rule in RULES.values() if set(rule.quantities) & set(history)]
    seen = {rule.name: _stretch(rule, history, steps, changes) for rule in judged}
    fall = seen.get("reward_collapse")
    fallen = fall.began.step if fall is not None and fall.last >= len(steps) - WINDOW else None
    findings = [
        _finding(RULES[name], one, history, steps, fallen)
        for name, one in seen.items()
        if one is not None
    ]
    # then as in the table
    return sorted(findings, key=lambda found: (SEVERITIES.index(found.severity), found.step))


def order_of(findings: Sequence[Finding], changes: Sequence[Change]) -> list[Change]:
    """All changes by step: those given, and the beginnings of findings whose quantity has none in that direction nearby."""
    known = list(changes)
    for began in (
        finding.began for finding in findings if finding.severity != "info" and finding.rule.window
    ):
        near = (c for c in known if (c.quantity, c.direction) == (began.quantity, began.direction))
        if began.quantity in ORDERED and not any(abs(c.step - began.step) <= WINDOW for c in near):
            known.append(began)
    return sorted(known, key=lambda change: (change.step, change.quantity))


def _stretch(
    rule: Rule, history: History, steps: np.ndarray, changes: Sequence[Change]
) -> _Stretch | None:
    """The stretch with the most steps at which a rule applies, without gaps of more than WINDOW steps; None without any."""
    measured = rule.measure(history)
    holds = np.flatnonzero(applies(rule, measured))
    if not len(holds):
        return None
    if (
        rule.worse is not None
        and (worse := np.flatnonzero(applies(rule, measured, rule.worse[0]))).size
    ):
        holds = worse
    parts = np.split(holds, np.flatnonzero(np.diff(holds) > WINDOW) + 1)
    at = max(range(len(parts)), key=lambda index: len(parts[index]))
    if at and np.ptp(history[_shown(rule, history)[0]][parts[at - 1][-1] : parts[at][0] + 1]) == 0:
        # between them the quantity did not change
        parts[at] = np.concatenate([parts[at - 1], parts[at]])
    part = parts[at]
    first, last = int(part[0]), int(part[-1])
    name = next(
        name
        for name in _shown(rule, history)
        if rule.name != "non_finite" or np.isinf(history[name][first])
    )
    if rule.window == 0:
        step = int(steps[0])
        return _Stretch(
            Change(name, step, step, step, "flat", np.nan, np.nan), first, last, len(part), measured
        )
    before, inside, start = _onset(history[name], first, rule.window)
    if rule.name in EXACT:
        start = (
            first
            - int(np.argmin(np.append(history[name][first::-1] == history[name][first], False)))
            + 1
        )
    way: Literal["up", "down"] = "down" if inside < before else "up"
    began = Change(
        name, int(steps[start]), int(steps[start]), int(steps[first]), way, before, inside
    )
    if rule.window > 1 and rule.name not in EXACT:
        earlier = [c for c in changes if c.quantity == name and c.low <= steps[first]]
        late = itertools.dropwhile(lambda c: c.direction == "flat", reversed(earlier))
        same = list(
            itertools.takewhile(
                lambda c: c.direction == way and (c.after > c.before) == (way == "up"), late
            )
        )
        began = same[-1] if same else began  # the first of those in its direction
    return _Stretch(began, first, last, len(part), measured)


def _onset(values: np.ndarray, at: int, window: int) -> tuple[float, float, int]:
    """Level before a measure's window that ends at `at`, level at its end, and the position from which on most are nearer to the latter."""
    known = np.flatnonzero(np.isfinite(values[: at + 1]))
    recent, earlier = known[-window:], known[:-window]
    if not len(recent):
        return np.nan, np.nan, at
    before = float(np.median(values[earlier[-WINDOW:] if len(earlier) else recent[:1]]))
    inside = float(values[recent[-min(3, window) :]].mean())
    near = np.abs(values[recent] - inside) <= np.abs(values[recent] - before)
    shares = np.cumsum(near[::-1])[::-1] / np.arange(len(near), 0, -1)  # of the steps from each on
    return (
        before,
        inside,
        at if window == 1 else int(recent[int(np.argmax(near & (shares >= 0.6)))]),
    )


def _shown(rule: Rule, history: History) -> list[str]:
    """The quantities of a rule that a history has, those with a finite value first."""
    there = (name for name in rule.quantities if name in history)
    return sorted(there, key=lambda name: not len(finite(history, name)))


def _finding(
    rule: Rule, stretch: _Stretch, history: History, steps: np.ndarray, fallen: int | None
) -> Finding:
    """A rule's finding; `fallen`: the step from which on the reward falls for good."""
    soon = stretch.began.step + max(20, len(steps) // 5) if rule.window == 1 else int(steps[-1])
    harmed = fallen is not None and stretch.began.step - WINDOW <= fallen <= soon
    outcome = 0 if harmed else 2 if fallen is None and _rose(history) else 1
    severity = rule.level(
        float(np.nanmax(stretch.measured[stretch.first : stretch.last + 1])), outcome
    )
    passed = rule.window > 1 and stretch.last < len(steps) - max(WINDOW, len(steps) // 10)
    if passed and severity != "info":
        severity = SEVERITIES[SEVERITIES.index(severity) + 1]
    change, value = _evidence(rule, stretch, history, steps)
    if harmed and rule.name != "reward_collapse":
        change += f"; reward falls from step {fallen}"
    elif outcome == 2 and rule.severity[2] != rule.severity[1]:
        change += "; reward rose"
    return Finding(rule, severity, stretch.began, change, value, _certainty(rule, stretch, passed))


def _evidence(
    rule: Rule, stretch: _Stretch, history: History, steps: np.ndarray
) -> tuple[str, str]:
    """How the quantity of a finding changed, and what the rule measured."""
    began = stretch.began
    quantity, values = BY_NAME[began.quantity], history[began.quantity]
    if rule.name == "non_finite":
        return f"{quantity.title} is not a finite number", ""
    known = np.isfinite(values)
    inside = values[known & (steps >= began.step) & (steps <= steps[stretch.last])]
    unit = f" {quantity.unit}" if quantity.unit else ""
    now = f"{inside[0] if rule.window == 1 else inside[-WINDOW:].mean():.3g}{unit}"
    if np.isfinite(began.before) and (steps < began.step).any():
        now = f"{began.before:.3g} → {now}"
    worst = stretch.measured[stretch.first : stretch.last + 1]
    value = float(np.nanmin(worst) if rule.below else np.nanmax(worst))
    limit = f"reported {'to' if rule.below else 'from'} {rule.threshold:g}"
    return f"{quantity.title} {now}", f"measured: {value:.3g} ({rule.statistic}; {limit})"


def _certainty(rule: Rule, stretch: _Stretch, passed: bool) -> str:
    """Where a rule applies, when it began, and how often it applies in healthy runs."""
    judged = int(np.isfinite(stretch.measured[stretch.first :]).sum())
    parts = []
    if rule.window > 1 and stretch.began.high > stretch.began.low:
        parts.append(f"began between steps {stretch.began.low} and {stretch.began.high}")
    if rule.window != 0 and judged > 1:
        parts.append(
            f"at {stretch.count} of the {judged} steps from then on"
            + (", and over since" if passed else "")
        )
    runs = [sum(counts) for counts in zip(*FALSE_ALARMS.get(rule.name, {}).values(), strict=True)]
    if runs and runs[1]:
        parts.append(f"in {runs[0]} of {runs[1]} healthy runs")
    return "; ".join(parts) or "certain"


def _rose(history: History) -> bool:
    """Whether the reward's last tenth is above its first by three standard errors."""
    y = finite(history, "reward")
    if len(y) < 2 * EARLY:
        return False
    n = max(EARLY, len(y) // 10)
    return bool(y[-n:].mean() - y[:n].mean() > 3 * step_noise(y)[-1] * np.sqrt(2 / n))


ORDERED = (
    *("reward", "grad_norm", "update_norm", "entropy", "kl", "kl_step"),
    *("length", "truncated", "dead_groups", "clipped", "mismatch", "mismatch_kl"),
)
"""Quantities whose changes are listed."""

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


def changes(log: Log, quantities: tuple[str, ...] = ORDERED) -> list[Change]:
    """Changes of level or trend of the quantities of a log, sorted by step.

    A change splits a part of a series in two if two straight lines fit it much better than one, judged by their F statistic
    with the autocorrelation of the residuals taken into account; the parts are split again. Quantities that vary by
    factors are judged by their logarithm, and single outliers count no more than four standard deviations.
    """
    found = [change for name in quantities for change in _of_series(name, log.finite(name))]
    return sorted(found, key=lambda change: (change.step, change.quantity))


def _of_series(name: str, series: pd.Series) -> list[Change]:
    values, steps = series.to_numpy(float), series.index.to_numpy()
    if len(values) > _LONGEST:  # means over equal numbers of steps
        edges = np.linspace(0, len(values), _LONGEST + 1).astype(int)[:-1]
        values, steps = (
            np.add.reduceat(values, edges) / np.diff(np.append(edges, len(values))),
            steps[edges],
        )
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
        if after == before or (
            name != "reward" and not BY_NAME[name].log and abs(after - before) < 0.02
        ):
            continue  # two points of a share, or 0.02 nats
        if name.startswith(("mismatch", "kl_step")) and max(before, after) < 1e-3:
            continue  # rounding
        found.append(
            Change(
                name, int(steps[at]), int(steps[low]), int(steps[high]), direction, before, after
            )
        )
    return found


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
