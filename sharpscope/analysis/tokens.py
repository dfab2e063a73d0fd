"""The tokens tables, streamed once for all claims: whole steps, only the columns asked for, a bounded number of
rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

if TYPE_CHECKING:
    from sharpscope.analysis.study import RunLike

Columns = Mapping[str, NDArray[Any]]

BATCH_ROWS = 400_000
"""Token rows held at once [tokens]; a step is never divided."""


@dataclass(frozen=True)
class Reducer:
    """What a claim makes of the tokens of one step.

    Attributes:
        name: key of its results.
        columns: of the tokens table; float columns hold NaN where nothing was recorded.
        of: whether a run is of interest.
        reduce: columns (n,) of one step's tokens, run → numbers, or None if the step has nothing for this claim.
        needs: a column that must not be empty in a step; a step without it is not passed on.
    """

    name: str
    columns: tuple[str, ...]
    of: Callable[[RunLike], bool]
    reduce: Callable[[Columns, RunLike], dict[str, Any] | None]
    needs: str | None = None


@dataclass(frozen=True)
class Reduced:
    """What a reducer made of one step of one run, `tokens` rows long."""

    run: str
    method: str
    seed: Any
    step: int
    tokens: int
    values: dict[str, Any]


def scan(runs: Mapping[str, RunLike], reducers: Sequence[Reducer]) -> dict[str, list[Reduced]]:
    """Results of each reducer, in the order of runs and steps; every row group is read at most once, column by
    column.
    """
    found: dict[str, list[Reduced]] = {reducer.name: [] for reducer in reducers}
    for name, run in runs.items():
        wanted = [reducer for reducer in reducers if reducer.of(run)]
        columns = sorted({column for reducer in wanted for column in reducer.columns})
        if not columns:
            continue
        if run.reductions is not None:
            for reducer in wanted:
                found[reducer.name] += _kept(name, run, reducer)
            continue
        for step, tokens in steps_of(run, columns):
            recorded = {column: _recorded(tokens[column]) for column in {r.needs for r in wanted if r.needs}}
            for reducer in wanted:
                if reducer.needs is not None and not recorded[reducer.needs]:
                    continue
                values = reducer.reduce(tokens, run)
                if values is not None:
                    rows = len(next(iter(tokens.values())))
                    found[reducer.name].append(Reduced(name, run.method, run.seed, step, rows, values))
    return found


def _kept(name: str, run: RunLike, reducer: Reducer) -> list[Reduced]:
    """What was made of a token table before it was left out."""
    rows = run.reductions or ()
    return [Reduced(name, run.method, run.seed, r.step, r.tokens, r.values) for r in rows if r.name == reducer.name]


def steps_of(run: RunLike, columns: Sequence[str]) -> Iterator[tuple[int, Columns]]:
    """(step, columns (n,)) of each step of a run, reading batches of whole steps of about BATCH_ROWS rows."""
    steps = run.token_steps
    if not steps:
        return
    size = max(1, int(BATCH_ROWS * len(steps) / max(1, run.rows("tokens"))))
    for start in range(0, len(steps), size):
        frame = run.tokens(steps[start : start + size], ["step", *(c for c in columns if c != "step")])
        yield from _split(frame, columns)


def _split(frame: pd.DataFrame, columns: Sequence[str]) -> Iterator[tuple[int, Columns]]:
    step = frame["step"].to_numpy()
    if (np.diff(step) < 0).any():  # a step that was written in several parts
        frame = frame.iloc[np.argsort(step, kind="stable")]
        step = frame["step"].to_numpy()
    arrays = {column: frame[column].to_numpy() for column in columns}
    starts = np.flatnonzero(np.concatenate([[True], step[1:] != step[:-1]])) if len(step) else np.array([], dtype=int)
    for start, end in zip(starts, [*starts[1:], len(step)], strict=True):
        yield int(step[start]), {column: values[start:end] for column, values in arrays.items()}


def _recorded(values: NDArray[Any]) -> bool:
    return bool(np.isfinite(values).any()) if values.dtype.kind == "f" else bool(len(values))
