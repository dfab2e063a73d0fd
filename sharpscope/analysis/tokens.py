"""The token tables: one streaming pass whose reducers feed the claims."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from sharpscope.analysis.statistics import Doubles
from sharpscope.errors import UserError
from sharpscope.traces import Run

Columns = Mapping[str, Doubles]
"""Columns (n,) of the tokens of a step, NaN where nothing was recorded."""
Found = dict[str, Any] | None
"""What a reducer makes of a step; None if the step has nothing for it."""

BATCH_ROWS = 400_000
"""Token rows held at once [tokens]; a step is never divided."""
MOST_ROWS = 20_000_000
"""Token rows that a pass over a run for `show` or a page reads; of a run of more it reads steps that are spread over it."""
DECILES = 10
INCLUSION = "inclusion_probability"
ROW = "row_probability"


@dataclass(frozen=True)
class Reducer:
    """A computation on the tokens of one step.

    Attributes:
        name: key of its results.
        columns: of the tokens table.
        reduce: columns (n,) of one step's tokens, run → values, or None if the step has nothing for it.
        needs: a column that must have a value in a step; steps without one are not passed on.
    """

    name: str
    columns: tuple[str, ...]
    reduce: Callable[[Columns, Run], Found]
    needs: str | None = None


@dataclass(frozen=True)
class Reduced:
    """Result of a reducer for one step of one run with `tokens` tokens."""

    run: str
    method: str
    seed: int
    step: int
    tokens: int
    values: dict[str, Any]


def scan(runs: Mapping[str, Run], reducers: Sequence[Reducer]) -> dict[str, list[Reduced]]:
    """Results of each reducer, in the order of runs and steps; every row group is read at most once."""
    result: dict[str, list[Reduced]] = {reducer.name: [] for reducer in reducers}
    columns = sorted({column for reducer in reducers for column in reducer.columns})
    for name, run in runs.items() if columns else ():
        if run.reductions is not None:  # computed before the token table was left out
            for row in run.reductions:
                if row.name in result and row.step >= 0:
                    one = Reduced(name, run.method, run.seed, row.step, row.tokens, row.values)
                    result[row.name].append(one)
            continue
        needed = {reducer.needs for reducer in reducers if reducer.needs}
        for step, tokens in steps_of(run, columns):
            recorded = {None, *(column for column in needed if np.isfinite(tokens[column]).any())}
            count = len(tokens[columns[0]])
            for reducer in reducers:
                if reducer.needs not in recorded:
                    continue
                values = reducer.reduce(tokens, run)
                if values is not None:
                    one = Reduced(name, run.method, run.seed, step, count, values)
                    result[reducer.name].append(one)
    return result


def steps_of(run: Run, columns: Sequence[str]) -> Iterator[tuple[int, Columns]]:
    """(step, columns (n,)) of each step of a run, reading batches of whole steps of about BATCH_ROWS rows."""
    steps = run.token_steps
    if not steps:
        return
    rows_of_step = max(1, run.rows("tokens")) / len(steps)
    size = max(1, int(BATCH_ROWS / rows_of_step))  # steps of a batch
    for start in range(0, len(steps), size):
        read = dict.fromkeys(["step", *columns])
        frame = run.tokens(steps[start : start + size], list(read))
        for step, rows in frame.groupby("step"):  # also a step that was written in several parts
            yield int(str(step)), {column: rows[column].to_numpy(float) for column in columns}


def passed_steps(run: Run) -> list[int] | None:
    """The steps whose tokens a pass over a run reads; None: all. See MOST_ROWS."""
    rows = run.step_rows("tokens")
    total, steps = sum(rows.values()), list(rows)
    if total <= MOST_ROWS:
        return None
    count = max(2, len(steps) * MOST_ROWS // total)
    places = np.linspace(0, len(steps) - 1, count).round().astype(int)
    return [steps[place] for place in places]


def passed_text(run: Run) -> str:
    """Which steps a pass over a run reads, as the end of a note; empty for all."""
    steps = passed_steps(run)
    if steps is None:
        return ""
    return f" Of {len(steps):,} of {len(run.token_steps):,} steps, spread over the run."


def sampled_by(run: Run) -> str:
    """The column of what a run draws where it measures a sample of tokens: `rollout` in a recorded training, else `group`."""
    return "rollout" if run.info.get("sampled") == "rows" else "group"


def sampling_error(values: Doubles, units: pd.Series, chance: Doubles) -> float:
    """Standard error of Σ value/chance over the tokens (n,) of units that are a simple random sample, each drawn with one chance.

    √(m·(1 − f)·s²)/f of m units, a share f of all, whose sums have the variance s² (Cochran, Sampling Techniques, theorem 2.2);
    NaN of a single unit.
    """
    of_units = pd.Series(values).groupby(units.to_numpy()).sum()
    share = float(np.mean(chance))
    return math.sqrt(len(of_units) * max(1 - share, 0.0) * of_units.var(ddof=1)) / share


def sample_text(run: Run, tokens: pd.DataFrame) -> str:
    """Which completions the measured `tokens` are of, where not all were: `a random 25 % of each update's groups`; else empty."""
    shares = tokens[INCLUSION].dropna().astype(float)
    shares = shares[shares < 1]
    if shares.empty:
        return ""
    least = f"{100 * shares.min():.3g}"
    most = f"{100 * shares.max():.3g}"
    share = least if least == most else f"{least} to {most}"
    which = "completions" if sampled_by(run) == "rollout" else "groups"
    return f"a random {share} % of each update's {which}"


def inverse_inclusion(tokens: Columns | pd.DataFrame) -> Doubles:
    """(n,) inverse probability that a token's group was drawn to be measured; 1 where none is recorded: all groups were.

    Sums weighted by it are unbiased for the sums over all tokens (Horvitz and Thompson 1952).
    """
    chance = np.asarray(tokens[INCLUSION], float)
    return np.asarray(1.0 / np.where(chance > 0, chance, 1.0))


def held_by_largest(size: np.ndarray, count: np.ndarray, at: float | Doubles) -> Doubles:
    """Share of Σ size that the largest members hold, at shares `at` of the members: a Lorenz curve from its upper end.

    Args:
        size: of each member, (n,) ≥ 0.
        count: how many members each stands for, (n,).
        at: shares of the members, in [0, 1].
    """
    order = np.argsort(-size, kind="stable")
    members = np.concatenate([[0.0], np.cumsum(count[order])])
    held = np.concatenate([[0.0], np.cumsum((count * size)[order])])
    return np.asarray(np.interp(at, members / members[-1], held / max(held[-1], 1e-300)))


def sums_by(key: NDArray[Any], values: Mapping[str, Doubles]) -> pd.DataFrame:
    """The sum of each of `values` (n,) over the rows of each key (n,), which is the index."""
    codes, keys = pd.factorize(key)
    sums = {name: np.bincount(codes, each, len(keys)) for name, each in values.items()}
    return pd.DataFrame(sums, index=keys)


def check_recorded(by: str, step: int | None, recorded: Sequence[int]) -> None:
    """Check that tokens have at a step what `--by` asks for."""
    if step not in recorded:
        there = ", ".join(map(str, recorded[:12]))
        raise UserError(f"--by {by}: not recorded at step {step}; recorded at steps {there}")


def row_probability(tokens: pd.DataFrame) -> Doubles:
    """(n,) probability that a token's row was written; 1 where none is recorded: all were."""
    return np.asarray(tokens[ROW].astype(float).fillna(1.0), float)


def complement(logp: np.ndarray) -> Doubles:
    """1 − π = −expm1(ln π), without cancellation."""
    return np.asarray(-np.expm1(np.asarray(logp, float)))


def deciles(logp: np.ndarray) -> NDArray[np.int_]:
    """(n,) decile of each token by rank of ln π, 1 = least likely; ties by order."""
    rank = np.argsort(np.argsort(logp, kind="stable"), kind="stable")
    return np.asarray(rank * DECILES // max(1, len(rank)) + 1)
