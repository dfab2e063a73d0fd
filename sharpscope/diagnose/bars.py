"""Progress bars between the rows that a terminal shows: which are the training's, and the step that they give a row."""

from __future__ import annotations

import itertools
import re
from array import array
from collections import Counter
from collections.abc import Mapping

import numpy as np

from sharpscope.diagnose.names import is_evaluation
from sharpscope.diagnose.tables import Positions, Table
from sharpscope.rules.measures import Flags

BAR_KEY = "progress bar"
"""Key under which a row has the step that the progress bar showed."""
BAR = re.compile(r"(?:^|\s)\d+%\|[^|]*\|\s*(\d+)/(\d+)\s*\[")
"""How much of a progress bar is done, and its total."""
STEPS = frozenset({"step", "global_step", "global_step/max_steps", "current_steps", "iteration"})
"""Keys of rows that need no bar."""


def with_steps_of_bars(table: Table, places: array[int], bars: list[tuple[int, int]]) -> Table:
    """A table whose rows without a step have that of the training's progress bar, whose length is announced.

    Args:
        table: the rows.
        places: bars that were printed before each row.
        bars: what is done and the total of each bar.
    """
    beside: Counter[int] = Counter()
    for place in places:
        beside.update({total for _, total in bars[max(0, place - 1) : place + 1]})
    if not beside:
        return table
    # bars of evaluations and downloads have other totals than the training's, which most rows stand beside
    most = max(beside.values())
    found = [_bars_of(bars, total) for total, count in beside.items() if 2 * count >= most]
    at, done = max(found, key=lambda drawn: (_rises(drawn[1]), len(set(drawn[1].tolist()))))
    steps = [table.columns[key] for key in STEPS & table.columns.keys()]
    if not steps:
        for row, step in sorted(
            _bar_steps(
                table,
                places,
                at,
                done,
            ).items()
        ):
            table.put(BAR_KEY, row, float(step))
    if _rises(done) and all(abs(done[-1] - column.values[-1]) <= 1 for column in steps):
        table.announced = bars[at[-1]][1]
    return table


def _bars_of(bars: list[tuple[int, int]], total: int) -> tuple[Positions, Positions]:
    """The number of each bar with a total, and how much of it was done."""
    drawn = [(at, done) for at, (done, of) in enumerate(bars) if of == total]
    at, done = np.array(drawn).T
    return at, done


def _rises(done: Positions) -> bool:
    """Whether bars are those of one whole training, not of each epoch or rollout."""
    return not (np.diff(done) < 0).any()


def _bar_steps(
    table: Table,
    places: array[int],
    at: Positions,
    done: Positions,
) -> Mapping[int, int]:
    """Row -> step of the bar after it, which trainers draw again below what they print; else of the bar before it.

    The bar before counts if it tells more rows apart, as where bars are not drawn again. `at`, `done`: number of each bar of the training,
    and its step.
    """
    upcoming = np.searchsorted(at, places)  # the first bar that was drawn after each row
    after = done[np.minimum(upcoming, len(done) - 1)]
    before = done[np.maximum(upcoming - 1, 0)]
    chosen = before if len(set(before)) > len(set(after)) else after
    found = dict(enumerate(chosen.tolist()))
    if not _rises(done):
        return found
    return _spread(found, table.rows_with(key for key in table.columns if not is_evaluation(key)))


def _spread(steps: Mapping[int, int], trained: Flags) -> dict[int, int]:
    """Steps (by row) of which several rows that print a training have the same: they lie evenly up to it.

    Output that is buffered brings such rows in bunches, after the bars of all their steps.
    """
    found = dict(steps)
    before = 0
    rows = [row for row in steps if trained[row]]
    for step, bunch in itertools.groupby(rows, key=steps.__getitem__):
        for number, row in enumerate(members := list(bunch), 1):
            if step > before:
                found[row] = round(before + (step - before) * number / len(members))
        before = step
    return found
