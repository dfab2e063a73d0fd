"""Read the logs of a path into frames of canonical quantities by step."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, SupportsFloat

import numpy as np
import pandas as pd

from sharpscope.diagnose.bars import BAR_KEY
from sharpscope.diagnose.names import Named, Naming, name_columns
from sharpscope.diagnose.quantities import BY_NAME, QUANTITIES, listed
from sharpscope.diagnose.runs import Source, chosen, sources
from sharpscope.diagnose.steps import (
    EPOCH_KEYS,
    LOGGER_KEYS,
    attempts,
    gathered,
    group_words,
    per_step,
    resumed_at,
    step_keys,
    steps_of,
    with_evaluations_apart,
    without_summaries,
)
from sharpscope.diagnose.tables import Table
from sharpscope.diagnose.trainers import SHARPSCOPE
from sharpscope.errors import UserError
from sharpscope.rules.measures import Flags, Values

Training = Literal["rewards", "distillation", "preference", "reward model", "supervised"]
"""What kind of training a log is of."""

LONGEST = 20_000
"""Steps above which neighbors are joined before they are judged."""
_EXTREME = frozenset({"grad_norm", "update_norm", "ratio_max", "mismatch_max"})
_EPISODES = frozenset(
    listed("reward, length, kl, truncated, dead_groups, reward_std, clipped, mismatch, mismatch_kl")
)
"""Quantities that only a training by rewards has."""


@dataclass(frozen=True)
class Log:
    """The log of one run."""

    path: Path  # file or folder that was read
    framework: str | None  # the trainer that wrote it, if known
    frame: pd.DataFrame  # index: the steps; columns: the quantities that were found
    # canonical quantity -> keys of the log
    sources: dict[str, tuple[str, ...]] = field(default_factory=dict)
    unmapped: tuple[str, ...] = ()  # numeric keys that no quantity uses
    format: str = ""  # in words
    run: str = ""  # name of the run, where the path holds several
    training: Training = "rewards"
    guesses: dict[str, str] = field(default_factory=dict)  # quantity -> why its key was taken
    notes: tuple[str, ...] = ()  # how the rows were read, in sentences
    rows: int = 0  # that were read
    announced: int = 0  # steps that the training was to have, 0 if the log does not say
    error: str = ""  # what was printed after the last row when the training failed
    # means of the reward's components by step; columns: "rewards/NAME", as TRL writes them
    components: pd.DataFrame = field(default_factory=pd.DataFrame)

    def finite(self, name: str) -> pd.Series:
        """Recorded values of a quantity that are finite, by step; empty if there are none."""
        values = self.frame[name] if name in self.frame else pd.Series(dtype=float)
        return values[np.isfinite(values)]


def read_log(
    path: str | Path,
    mapping: Mapping[str, str] | None = None,
    run: str | None = None,
) -> Log:
    """Read the log of one run (`read_logs`).

    Raises:
        UserError: as `read_logs`, or the path holds several runs and none is named.
    """
    found = read_logs(path, mapping, run)
    if len(found) > 1:
        names = ", ".join(log.run for log in found[:8])
        raise UserError(f"{path}: holds {len(found)} runs ({names}): name one of them (--run NAME)")
    return found[0]


def read_logs(
    path: str | Path,
    mapping: Mapping[str, str] | None = None,
    run: str | None = None,
) -> list[Log]:
    """Read the runs of a path (`formats.READS`) and name their quantities.

    Args:
        path: a file, a folder, or a recorded run.
        mapping: quantity -> key of the log, for keys that are not recognized; the key "none" leaves a quantity out.
        run: the name of the run to read; default: all.

    Raises:
        UserError: nothing can be read, no key is known, a mapped key is missing, or there is no run of that name.
    """
    path = Path(path)
    logs: list[Log] = []
    problems: list[UserError] = []
    found = [piece for source in sources(path) for piece in _attempts(source)]
    kept = chosen(found, run, path)
    for source in kept:
        try:
            logs.append(_log(source, mapping or {}, several=len(found) > 1))
        except UserError as error:
            problems.append(error)
    if not logs:
        raise problems[0]
    return logs


def _attempts(source: Source) -> list[Source]:
    """The attempts of a run that were appended to one file."""
    if source.framework == SHARPSCOPE.name:
        return [source]
    table = with_evaluations_apart(without_summaries(source.table))
    naming = name_columns(table, trainer=source.framework)
    used = _keys(naming)
    parts = [table.part(r) for r in attempts(steps_of(table, used or table.columns).values)]
    if not any(sum(key in part.columns for part in parts) > 1 for key in used):
        return [replace(source, table=table)]  # also of a file that has one quantity after another
    return [
        replace(source, table=part, name=f"{source.name} (attempt {number})")
        for number, part in enumerate(parts, 1)
    ]


def _keys(naming: Naming) -> list[str]:
    """Keys of the training's quantities, else of all."""
    of_training = [
        key
        for name, named in naming.quantities.items()
        if not BY_NAME[name].held_out
        for key in named.keys
    ]
    return of_training or [key for named in naming.quantities.values() for key in named.keys]


def _log(source: Source, mapping: Mapping[str, str], several: bool) -> Log:
    """Name the quantities of a run and make one row a step."""
    table = source.table
    naming = name_columns(table, mapping, source.framework)
    used = _keys(naming)
    if not used:
        counted = set(step_keys(table))
        keys = ", ".join(key for key in list(table.columns)[:12] if key not in counted)
        unknown = f"none of its keys is known: {keys}; name them, for example --map reward=KEY"
        raise UserError(f"{source.path}: {unknown if keys else 'has no numbers'}")
    steps = steps_of(table, used)
    notes = [*source.notes, *table.notes]
    if not steps.key:
        notes.append("No key is the step: rows are counted.")
    elif steps.key == BAR_KEY:
        notes.append("The rows have no step: it is that of the progress bar beside them.")
    elif steps.key in EPOCH_KEYS:
        notes.append("The step is the epoch.")
    elif steps.key in LOGGER_KEYS:
        notes.append(f"The step is the logger's ({steps.key}), which counts its calls.")
    notes.extend(_row_notes(table, steps.values, used[0]))
    known = np.isfinite(steps.values)
    lost = int((~known & table.rows_with(used)).sum())
    if lost:
        table.left_out["rows without a step"] += lost
    frame = _frame(
        table,
        naming,
        steps.values,
        known & _latest(table, steps.values, used[0]),
    )
    notes.extend(f"{count} {reason} left out." for reason, count in table.left_out.items())
    notes.extend(f"Key {key} is {why}." for key, why in list(naming.refused.items())[:5])
    frame, joined = _shortened(frame)
    if joined:
        notes.append(joined)
    mapped = {key for named in naming.quantities.values() for key in named.keys}
    others = [k for k in table.columns if k not in mapped and k not in step_keys(table)]
    framework = naming.trainer.name if naming.trainer else None
    return Log(
        source.path,
        framework,
        frame,
        {name: named.keys for name, named in naming.quantities.items() if name in frame},
        tuple(others),
        format=source.format,
        run=source.name if several else "",
        training=_training(frame, table, framework),
        guesses={n: named.reason for n, named in naming.quantities.items() if named.reason},
        notes=tuple(notes),
        rows=int((known & table.rows_with(mapped)).sum()),
        components=_components(table, steps.values),
        announced=_announced(table) if steps.key and steps.key not in EPOCH_KEYS else 0,
        error=table.error,
    )


def _announced(table: Table) -> int:
    """The steps that a training was to have: LLaMA-Factory writes the same number beside each step, others count something there."""
    column = table.columns.get("total_steps")
    planned = column.values[-1] if column and len(set(column.values)) == 1 else table.announced
    return int(planned) if np.isfinite(planned) else 0


def _components(table: Table, steps: Values) -> pd.DataFrame:
    """The means of a reward's components by step, from TRL's keys "rewards/NAME/mean"."""
    pattern = re.compile(r"(?:train/)?(rewards/.+)/mean")
    matches = [match for key in table.columns if (match := pattern.fullmatch(key))]
    known = np.isfinite(steps)
    index, groups = np.unique(np.round(steps[known]).astype(np.int64), return_inverse=True)
    columns = {
        match[1]: gathered(
            table.dense(match[0])[known],
            groups,
            len(index),
            "mean",
        )
        for match in matches
    }
    return pd.DataFrame(columns, index=pd.Index(index, name="step")).dropna(how="all")


def _latest(table: Table, steps: Values, key: str) -> Flags:
    """Which rows (rows,) a resumed training did not write again."""
    of_key = np.where(table.rows_with([key]), steps, np.nan)
    if per_step(of_key) > 1 or not resumed_at(of_key):
        return np.ones(table.count, dtype=bool)
    # the lowest step that comes later: rows at or above it were written again
    later = np.append(np.fmin.accumulate(of_key[::-1])[::-1][1:], np.nan)
    return ~(steps >= np.nan_to_num(later, nan=np.inf))


def _frame(table: Table, naming: Naming, steps: Values, known: Flags) -> pd.DataFrame:
    """The quantities by step; a step that lacks all of them has no row."""
    rounded = np.round(steps[known]).astype(np.int64)
    index, groups = np.unique(rounded, return_inverse=True)
    columns: dict[str, Values] = {}
    filled = np.zeros(len(index), dtype=bool)
    for quantity in QUANTITIES:
        named = naming.quantities.get(quantity.name)
        if named is None:
            continue
        values = _values(table, named, average=quantity.held_out)[known]
        by_step = gathered(
            values,
            groups,
            len(index),
            quantity.gather,
        )
        there = ~np.isnan(by_step)
        if there.any():
            columns[quantity.name] = by_step
            filled |= there
    frame = pd.DataFrame(
        columns,
        index=pd.Index(index, name="step"),
        copy=False,
    )
    return frame if filled.all() else frame[filled]


def _values(table: Table, named: Named, average: bool) -> Values:
    """The values of a quantity in each row (rows,): the sum or mean of its keys, of those that the row has."""
    total = np.zeros(table.count)
    count = np.zeros(table.count)
    for key in named.keys:
        values = table.dense(key)
        there = ~np.isnan(values)
        total[there] += values[there]
        count += there
    found = total / np.maximum(count, 1) if average else total
    found[count == 0] = np.nan
    return 1 - found if named.complement else found


def _row_notes(table: Table, steps: Values, key: str) -> list[str]:
    """What became of several rows of one step, and of steps that were repeated; `key`: of the rows that are counted."""
    notes = []
    steps = np.where(table.rows_with([key]), steps, np.nan)
    rows = per_step(steps)
    if table.texts:
        count = int(np.isfinite(steps).sum())
        notes.append(f"It is a dump of {count} completions: a step has the mean of its rows.")
    elif rows > 1:
        notes.append(f"A step has {rows} rows: their means count.")
    for step in resumed_at(steps)[:3] if rows <= 1 else []:
        notes.append(
            f"The training was resumed: steps from {step} on are there twice, the later ones count."
        )
    return notes


def _shortened(frame: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    """At most `LONGEST` rows: neighbors are averaged, of gradient norms and ratios the largest is kept."""
    if len(frame) <= LONGEST:
        return frame, ""
    size = -(-len(frame) // LONGEST)
    starts = np.arange(0, len(frame), size)
    blocks = np.arange(len(frame)) // size
    columns = {
        str(name): gathered(
            frame[name].to_numpy(),
            blocks,
            len(starts),
            "max" if name in _EXTREME else BY_NAME[str(name)].gather,
        )
        for name in frame
    }
    made = pd.DataFrame(columns, index=frame.index[starts])
    return made, f"{len(frame):,} steps are judged in {len(made):,} blocks of {size}."


def _training(frame: pd.DataFrame, table: Table, framework: str | None) -> Training:
    """What kind of training a log is of, by its quantities and keys."""
    names = set(frame.columns)
    if framework == "TRL reward":
        return "reward model"
    if {"chosen", "rejected", "margin"} & names:
        return "preference"
    if "preference_accuracy" in names and not {"reward", "reward_std"} & names:
        return "preference"  # with a reward, it is a component of that name
    if "teacher_kl" in names:
        return "distillation"
    if _EPISODES & names:
        return "rewards"
    words = group_words(table.columns)
    if {"reward", "rewards", "advantage", "advantages", "rollout"} & words:
        return "rewards"
    return "supervised"


def own_values(row: Mapping[str, object]) -> dict[str, float]:
    """Canonical quantities of a row of our steps table, without those that it lacks."""
    found: dict[str, float] = {}
    for name, alternatives in SHARPSCOPE.keys.items():
        values = [row.get(key) for key in alternatives[0]]
        known = [float(value) for value in values if isinstance(value, SupportsFloat)]
        if known:
            found[name] = sum(known)
    return found
