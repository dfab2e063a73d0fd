"""The step of each row of a log, which rows are of an evaluation, where a run starts again, and one value a step."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from sharpscope.diagnose.bars import BAR_KEY
from sharpscope.diagnose.names import by_words, is_evaluation, words_of
from sharpscope.diagnose.quantities import Gather, listed
from sharpscope.diagnose.tables import Column, Positions, Table
from sharpscope.rules.measures import Flags, Values

STEP_KEYS = (
    *listed(
        "global_step/max_steps, train/global_step, training/global_step, trainer/global_step",
        "global_step, current_steps, step, Step, steps, training/step, train/step, iteration",
        "Iteration, iter, train/iteration, iterations, update, updates, rollout/step, train_step",
        "training_step, global step, Global Step, optimizer_step, Training Step, training step",
        "num_updates, rollout_id, episode, batch, training_iteration, time/iterations",
    ),
    BAR_KEY,
)
"""Keys of a trainer's step, in the order in which they are preferred."""
LOGGER_KEYS = ("_step", "wandb_step", "mlflow_step")
"""Keys of a logger's step, which counts calls of the logger and not updates."""
EPOCH_KEYS = ("epoch", "Epoch")
"""Keys of an epoch, which counts where nothing else does and it is a whole number."""
CLOCKS = frozenset({"Wall time", "timestamp", "Timestamp", "time", "_timestamp", "_runtime"})
"""Keys of the time, which is neither a step nor a quantity."""
_SUMMARY = frozenset({"train_runtime", "train/train_runtime", "total_flos", "train_dataset"})
_OF_TRAINING = frozenset({"loss", "grad_norm", "learning_rate", "lr", "train/loss"})

COVERED = 0.9
"""A trainer's step is preferred if it is in this share of the rows that the best key is in."""


@dataclass(frozen=True, kw_only=True)
class Steps:
    """The step of each row."""

    key: str  # of the log; empty if rows are counted
    values: Values  # (rows,), NaN where a row has none


MOST_FALLS = 0.1
"""Share of the rows whose step may be lower than the one before in a file that is in order."""


def step_keys(table: Table) -> list[str]:
    """The keys of a table that count steps, in the order of preference."""
    return [key for key in (*STEP_KEYS, *LOGGER_KEYS, *EPOCH_KEYS) if key in table.columns]


def steps_of(table: Table, named: Iterable[str]) -> Steps:
    """Choose the step: the key that most of the rows with the keys `named` have, a trainer's before a logger's.

    Args:
        table: the rows of a run.
        named: keys whose rows must have a step.

    Returns:
        The step of each row; counted rows, where no key can be one.
    """
    rows = table.rows_with(named)
    candidates = {key: table.dense(key) for key in step_keys(table)}
    covered = {
        key: int((np.isfinite(values) & rows).sum()) if _counts(values[rows]) else 0
        for key, values in candidates.items()
    }
    most = max(covered.values(), default=0)
    for key, values in candidates.items():
        if covered[key] and covered[key] >= COVERED * most:
            return Steps(key=key, values=values)
    counted = np.full(table.count, np.nan)
    counted[rows] = np.arange(1, rows.sum() + 1)
    return Steps(key="", values=counted)


def _counts(values: Values) -> bool:
    """Whether values can be steps: whole numbers that are not all the same, and no seconds since 1970."""
    known = values[np.isfinite(values)]
    if not len(known) or np.abs(known).max() > 2**53 or 1e9 < known.min() > known.max() / 2:
        return False
    whole = np.abs(known - np.round(known)) < 1e-6
    return bool(whole.mean() >= 0.8 and (len(known) == 1 or np.ptp(known) > 0))


def without_summaries(table: Table) -> Table:
    """A table without the rows that trainers write of a whole training."""
    summary = table.rows_with(_SUMMARY) & ~table.rows_with(_OF_TRAINING)
    return table.part(~summary) if summary.any() and not summary.all() else table


def with_evaluations_apart(table: Table) -> Table:
    """A table whose rows of an evaluation have keys of an evaluation.

    Such a row has a key like "eval_loss" and none of a training's; its other keys, such as "reward", are those of training rows.
    """
    marks = [key for key in table.columns if is_evaluation(key)]
    updates = [k for k in table.columns if by_words(k) in ("loss", "grad_norm", "lr", "entropy")]
    rows = table.rows_with(marks) & ~table.rows_with(updates)
    shared = [
        key
        for key, column in table.columns.items()
        if not is_evaluation(key) and key not in step_keys(table) and rows[column.rows()].any()
    ]
    moved = [key for key in shared if not rows[table.columns[key].rows()].all()]
    if not moved:
        return table
    made = replace(table, columns=dict(table.columns), notes=list(table.notes))
    for key in moved:
        positions = table.columns[key].rows()
        values = table.columns[key].numbers()
        there = rows[positions]
        made.columns[key] = _column(positions[~there], values[~there])
        if not {f"eval/{key}", f"eval_{key}"} & table.columns.keys():
            made.columns[f"eval/{key}"] = _column(positions[there], values[there])
    made.notes.append(f"{int(rows.sum())} rows are of an evaluation, by their keys.")
    return made


def _column(positions: Positions, values: Values) -> Column:
    return Column(array("I", positions.tolist()), array("d", values.tolist()))


def attempts(steps: Values) -> list[Flags]:
    """The rows of each attempt in a file to which several were appended, in their order.

    An attempt begins where the step falls back to the first tenth of what the one before had reached, and repeats most of its steps. A
    smaller fall is that of a training that was resumed from a checkpoint. Rows in no order are one attempt.
    """
    known = np.flatnonzero(np.isfinite(steps))
    values = steps[known]
    starts = [0]
    for at in _falls(values):
        before = values[starts[-1] : at]
        first = before[0]
        reached = before.max()
        again = values[at : at + len(before)]
        repeated = np.isin(again[again <= reached], before)
        if values[at] <= first + 0.1 * (reached - first) and repeated.mean() >= 0.5:
            starts.append(int(at))
    found = []
    for begin, end in zip(starts, [*starts[1:], len(values)], strict=True):
        rows = np.zeros(len(steps), dtype=bool)
        rows[known[begin] if begin else 0 : known[end] if end < len(known) else len(steps)] = True
        found.append(rows)
    return found


def _falls(values: Values) -> Positions:
    """Positions at which steps (n,) are lower than before; none if they are in no order at all."""
    falls = np.flatnonzero(np.diff(values) < 0) + 1
    return falls if len(falls) <= max(1, MOST_FALLS * len(values)) else falls[:0]


def gathered(values: Values, groups: Positions, count: int, how: Gather) -> Values:
    """One value for each of `count` steps (count,), from the values (rows,) whose step is number `groups` (rows,).

    Values that were not finite make their step's not finite.

    Args:
        values: (rows,), NaN where a row has none.
        groups: number of each row's step (rows,).
        count: steps.
        how: mean, last, largest or smallest value.
    """
    known = ~np.isnan(values)
    values = values[known]
    groups = groups[known]
    if how == "mean":
        infinite = np.isinf(values)
        sums = np.bincount(groups, np.where(infinite, 0.0, values), count)
        found = sums / np.bincount(groups, minlength=count).clip(1)
        found[np.bincount(groups, minlength=count) == 0] = np.nan
        found[groups[infinite]] = np.inf
        return found
    found = np.full(count, np.nan)
    if how == "last":
        found[groups] = values
    elif how == "max":
        np.fmax.at(found, groups, values)
    else:
        np.fmin.at(found, groups, values)
    return found


def per_step(steps: Values) -> int:
    """Rows of the median step.

    Args:
        steps: of each row (rows,), NaN where it is not known.
    """
    known = steps[np.isfinite(steps)]
    if not len(known):
        return 0
    return int(np.median(np.unique(known, return_counts=True)[1]))


def resumed_at(steps: Values) -> list[int]:
    """Steps from which a training was repeated after it had gone further.

    Args:
        steps: of each row (rows,), NaN where it is not known.
    """
    known = steps[np.isfinite(steps)]
    return [int(known[at]) for at in _falls(known) if known[at] in known[:at]]


def group_words(keys: Iterable[str]) -> set[str]:
    """All words of the keys of a log."""
    return {word for key in keys for word in words_of(key)}
