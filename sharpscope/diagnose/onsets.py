"""Where a rule applies in a log, and the step at which what it says began."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sharpscope.diagnose.changes import Change
from sharpscope.diagnose.tables import Positions
from sharpscope.rules.judging import applies
from sharpscope.rules.measures import WINDOW, History, Values, few_groups, finite
from sharpscope.rules.table import Rule

PERSISTENT = 3
"""Steps for which a rule must apply if its measure is over several: a mean of the first row alone says nothing."""
FEWEST_ROWS = 5
"""Rows from which on a mean of several steps is judged."""
LEVEL = 3
"""Values at the end of a window whose mean is the level there."""


@dataclass(frozen=True, kw_only=True)
class Course:
    """The quantities of a run and how they change."""

    history: History
    steps: Values
    changes: Sequence[Change]


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """Where a rule applies."""

    began: Change  # with which it began
    first: int  # position of the first step of the first stretch
    last: int  # position of the last step at which it applies
    count: int  # steps at which it applies
    measured: Values


def stretch_of(rule: Rule, course: Course) -> Stretch | None:
    """The first stretch of steps at which a rule applies, without gaps of more than WINDOW steps; None without any.

    Args:
        rule: the rule.
        course: the run's quantities and their changes.
    """
    with np.errstate(all="ignore"):
        measured = rule.measure(course.history)
    holds = np.flatnonzero(applies(rule, measured))
    if rule.worse is not None:
        severe = np.flatnonzero(applies(rule, measured, rule.worse[0]))
        holds = severe if len(severe) else holds
    part = _first_part(rule, holds, course)
    if part is None:
        return None
    first = int(part[0])
    name = _shown(rule, course.history, first)
    return Stretch(
        began=_beginning(rule, name, first, course),
        first=first,
        last=int(holds[-1]),
        count=len(holds),
        measured=measured,
    )


def _shown(rule: Rule, history: History, at: int) -> str:
    """The quantity of a rule that shows best what it says: the first with finite values; of a value that is none, that one."""
    there = [name for name in rule.quantities if name in history]
    if rule.name == "non_finite":
        there = [name for name in there if np.isinf(history[name][at])]
    with_values = (name for name in there if len(finite(history, name)))
    return next(with_values, there[0])


def _first_part(rule: Rule, holds: Positions, course: Course) -> Positions | None:
    """The positions of the first stretch that lasts long enough; of a reward that recovered, of the last stretch."""
    if not len(holds):
        return None
    count = len(course.steps)
    gaps = np.flatnonzero(np.diff(holds) > WINDOW)
    parts = np.split(holds, gaps + 1)
    # a stretch at the end of the log counts however short it is
    if rule.window > 1 or rule.name == "entropy_collapse":
        if count < FEWEST_ROWS:
            return None
        parts = [part for part in parts if len(part) >= PERSISTENT or part[-1] >= count - 1]
    if not parts:
        return None
    if rule.name == "reward_collapse":
        return _last_fall(parts, course.history["reward"])
    return parts[0]


def _last_fall(parts: Sequence[Positions], reward: Values) -> Positions:
    """The stretches of the last collapse of the reward: those between which it did not recover by half."""
    found = parts[-1]
    known = np.where(np.isfinite(reward), reward, np.nan)
    best = float(np.nanmax(known[: found[0] + 1]))
    for part in reversed(parts[:-1]):
        between = known[part[-1] : found[0] + 1]
        between = between[~np.isnan(between)]
        half_way = (float(np.nanmean(known[found])) + best) / 2
        if len(between) and between.mean() > half_way:
            break
        found = np.concatenate([part, found])
    return found


def _beginning(rule: Rule, name: str, first: int, course: Course) -> Change:
    """The change of a quantity with which a stretch began whose first step is at position `first`."""
    if rule.window == 0:  # it is of the whole run
        at = int(course.steps[0])
        return Change(name, at, at, at, "flat", np.nan, np.nan)
    values = course.history[name]
    before, inside, start = _onset(values, first, rule.window)
    if rule.begins == "best":
        best, start = _best_before(values, first, highest=rule.name == "reward_gap")
        before = float(values[best])
    elif rule.begins == "exact":
        start = _same_since(values, first)
    elif rule.begins == "first" and _from_the_first(rule, course.history):
        start = int(np.isfinite(values).argmax())
    step = int(course.steps[start])
    began = Change(
        quantity=name,
        step=step,
        low=step,
        high=int(course.steps[first]),
        direction="down" if inside < before else "up",
        before=before,
        after=inside,
    )
    if rule.window <= 1 or rule.begins in ("exact", "best") or start == 0:
        return began
    return _first_of_its_way(began, course.changes)


def _same_since(values: Values, at: int) -> int:
    """The position from which on a quantity has had the value that it has at a position."""
    differs = np.flatnonzero(values[:at] != values[at])
    return int(differs[-1]) + 1 if len(differs) else 0


def _from_the_first(rule: Rule, history: History) -> bool:
    """Whether a rule is of the whole run from its first step on; groups without a gradient are where a step has few of them."""
    return rule.name != "dead_groups" or bool(few_groups(history)[-1])


def _first_of_its_way(began: Change, changes: Sequence[Change]) -> Change:
    """The first of the last changes of a quantity that go as a beginning goes; the beginning itself without any."""
    found = began
    for change in reversed(changes):
        if change.quantity != began.quantity or change.low > began.high:
            continue
        rises = change.after > change.before
        if change.direction == began.direction and rises == (began.direction == "up"):
            found = change
        elif change.direction != "flat" or found is not began:
            break
    return found


def _best_before(values: Values, at: int, highest: bool) -> tuple[int, int]:
    """Position of the best value up to `at`, and from which on values are worse by a quarter of what the one at `at` is."""
    known = np.flatnonzero(np.isfinite(values[: at + 1]))
    goodness = values[known] if highest else -values[known]
    best = int(np.flatnonzero(goodness == goodness.max())[-1])  # the last of equal ones
    loss = goodness[best] - goodness
    start = len(known) - 1
    while start - 1 > best and loss[start - 1] >= loss[-1] / 4:
        start -= 1
    return int(known[best]), int(known[start])


def _onset(values: Values, at: int, window: int) -> tuple[float, float, int]:
    """Level before a measure's window that ends at `at`, level at its end, and the position from which on most are nearer to the latter."""
    known = np.flatnonzero(np.isfinite(values[: at + 1]))
    recent = known[-window:]
    if not len(recent):
        return np.nan, np.nan, at
    earlier = known[:-window]
    reference = earlier[-WINDOW:] if len(earlier) else recent[:1]
    before = float(np.median(values[reference]))
    last = recent[-min(LEVEL, window) :]
    inside = float(values[last].mean())
    if window == 1:
        return before, inside, at
    from_inside = np.abs(values[recent] - inside)
    from_before = np.abs(values[recent] - before)
    near = from_inside <= from_before
    # of the steps from each one on
    counts = np.arange(len(near), 0, -1)
    shares = np.cumsum(near[::-1])[::-1] / counts
    start = int(np.argmax(near & (shares >= 0.6)))
    return before, inside, int(recent[start])
