"""Numbers of one run that several claims use: accuracies, gap, sharpness, informative groups, reward reached."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pandas as pd
from numpy.typing import NDArray

if TYPE_CHECKING:
    from sharpscope.traces import Run

TEMPERATURE = 1.0
"""Sampling temperature of the accuracies compared; where a run was not evaluated at it, its highest is taken."""
SMOOTHING = 10
"""Steps over which a reward or a training accuracy is averaged [steps]."""
FUNCTIONAL = "nll"
"""The functional whose sharpness is compared between methods."""
MEASURES = {"sam": "plain", "asam": "adaptive"}
"""Sharpness measures: quantity in the probes table → what it is."""


Value = TypeVar("Value")
_MEMORY: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()


def per_run(function: Callable[..., Value]) -> Callable[..., Value]:
    """Cache the results of a function of (run, …) for the lifetime of the run."""

    @functools.wraps(function)
    def remembering(run: Run, *arguments: Any) -> Value:
        known = _MEMORY.setdefault(run, {})
        key = (function.__qualname__, *arguments)
        if key not in known:
            known[key] = function(run, *arguments)
        found: Value = known[key]
        return found

    return remembering


@per_run
def evaluations(run: Run, split: str) -> dict[int, tuple[float, int]]:
    """Step → (accuracy, prompts) of one split at the temperature compared, levels weighted by their prompts.

    Rows of level `all` count only if there are no others.
    """
    rows = run.eval[["split", "step", "level", "n", "accuracy", "temperature"]].to_dict("list")
    found = [
        (step, level, n, accuracy, heat)
        for s, step, level, n, accuracy, heat in zip(*rows.values(), strict=True)
        if s == split and math.isfinite(accuracy)
    ]
    if not found:
        return {}
    heats = {row[4] for row in found}
    heat = min(heats, key=lambda value: (abs(value - TEMPERATURE) > 1e-6, -value))
    found = [row for row in found if row[4] == heat]
    single = [row for row in found if row[1] != "all"] or found
    pooled: dict[int, tuple[float, int]] = {}
    for step, _, n, accuracy, _ in single:
        hits, prompts = pooled.get(int(step), (0.0, 0))
        pooled[int(step)] = (hits + n * accuracy, prompts + int(n))
    return {step: (hits / prompts, prompts) for step, (hits, prompts) in sorted(pooled.items())}


def accuracy(run: Run, split: str, step: int) -> tuple[float, int] | None:
    """Share of correct completions at `step`, levels pooled by their number of prompts; and that number of prompts."""
    return evaluations(run, split).get(step)


def last_step(*runs: Run, split: str = "heldout") -> int | None:
    """The last step at which all `runs` were evaluated on `split`."""
    return max(set.intersection(*(set(evaluations(run, split)) for run in runs)), default=None)


def train_accuracy(run: Run, step: int) -> tuple[float, int] | None:
    """Accuracy on training prompts at `step`, and the number of completions behind it.

    From the split `train` where it was evaluated at that step; otherwise from the training rollouts of the SMOOTHING
    steps up to it, drawn while the policy changed.
    """
    evaluated = accuracy(run, "train", step)
    if evaluated is not None:
        return evaluated
    steps = run.steps
    rows = steps[(steps["step"] > step - SMOOTHING) & (steps["step"] <= step)]
    if not len(rows):
        return None
    each = run.config.get("rollout", {})
    count = int(each.get("prompts_per_step", 1)) * int(each.get("group_size", 1))
    return float(rows["accuracy"].mean()), count * len(rows)


def gap(run: Run, step: int) -> float | None:
    """Generalization gap at `step`: training accuracy − held-out accuracy, both at the temperature compared."""
    inside, outside = train_accuracy(run, step), accuracy(run, "heldout", step)
    return None if inside is None or outside is None else inside[0] - outside[0]


def repeats(run: Run) -> float | None:
    """Number of passes through the finite training set; None if the configuration does not tell."""
    config = run.config
    per_step = config.get("rollout", {}).get("prompts_per_step")
    task = config.get("task", {})
    size, people = task.get("train_size"), task.get("people", 1)
    if per_step is None or size is None or not len(run.steps):
        return None
    levels = len(people) if isinstance(people, list | tuple) else 1
    return float(len(run.steps) * per_step / (size * levels))


@per_run
def _probed(run: Run) -> dict[tuple[str, str], pd.DataFrame]:
    """(quantity, functional) → rows with a value that converged, over all parameters where they are named so."""
    rows = run.probes[["step", "probe_set", "functional", "parameters", "quantity", "value", "rho", "converged"]]
    rows = rows[rows["value"].notna() & ~rows["converged"].eq(False)]
    found = {}
    for key, group in rows.groupby(["quantity", "functional"]):
        whole = group["parameters"] == "all"
        found[(str(key[0]), str(key[1]))] = group[whole] if whole.any() else group
    return found


def probe_rows(run: Run, quantity: str, functional: str = FUNCTIONAL, probe_set: str = "train") -> pd.DataFrame:
    """Rows (step, value, rho, …) of the probes table for one quantity, on the probe set whose name holds `probe_set`.

    Where no set's name holds it, all rows are taken if there is only one set. Rows without a value, and iterations that
    did not converge, are left out; of parameter groups only `all` counts.
    """
    rows = _probed(run).get((quantity, functional))
    if rows is None:
        return pd.DataFrame({"step": [], "value": [], "rho": []}, dtype=float)
    named = rows["probe_set"].str.contains(probe_set, regex=False)
    if named.any():
        return rows[named]
    return rows if rows["probe_set"].nunique() == 1 else rows.iloc[:0]


@per_run
def sharpness_curve(
    run: Run, quantity: str, functional: str = FUNCTIONAL, radii: tuple[float, ...] | None = None
) -> pd.Series:
    """Step → sharpness. Of several radii the middle one is taken, the same at every step: of `radii`, or of the run's own."""
    rows = probe_rows(run, quantity, functional)
    grid = _radii(rows) if radii is None else radii
    if len(grid):
        rows = rows[np.isclose(rows["rho"], grid[(len(grid) - 1) // 2], rtol=1e-6)]
    return rows.groupby("step")["value"].mean()


def shared_curves(runs: Sequence[Run], quantity: str, functional: str = FUNCTIONAL) -> list[pd.Series] | None:
    """`sharpness_curve` of each run at one radius, the middle one of those that all have, on one probe set.

    None where a run has no value, where no radius is everyone's, or where the probe sets differ: these values are not comparable.
    """
    found = [probe_rows(run, quantity, functional) for run in runs]
    if any(not len(rows) for rows in found) or len({frozenset(rows["probe_set"]) for rows in found}) > 1:
        return None
    own = [_radii(rows) for rows in found]
    shared = tuple(sorted(set(own[0]).intersection(*own[1:])))
    if any(own) and not shared:
        return None
    return [sharpness_curve(run, quantity, functional, shared) for run in runs]


def _radii(rows: pd.DataFrame) -> tuple[float, ...]:
    return tuple(sorted({float(f"{rho:.9g}") for rho in rows["rho"].dropna()}))  # as float32 or not, one number


@per_run
def smooth_reward(run: Run) -> pd.Series:
    """Step → mean reward of the SMOOTHING steps up to it."""
    steps = run.steps.sort_values("step")
    return steps.set_index("step")["reward_mean"].rolling(SMOOTHING, min_periods=1).mean()


@per_run
def informative_groups(run: Run) -> pd.Series | None:
    """Step → number of groups whose rewards differed, up to and with it; None if the batch size is not known."""
    per_step = run.config.get("rollout", {}).get("prompts_per_step")
    if per_step is None:
        return None
    steps = run.steps.sort_values("step").set_index("step")
    return (per_step - steps["zero_std_groups"]).cumsum()


def relative_difference(baseline: float, treatment: float) -> float:
    """2(b − a)/(|a| + |b|), in [−2, 2]: close to ln(b/a) where both are positive and near, and defined for any sign."""
    size = abs(baseline) + abs(treatment)
    return 0.0 if size == 0 else 2 * (treatment - baseline) / size


def log_steps(values: NDArray[np.floating]) -> NDArray[np.float64]:
    """Ln v_{t+1} − ln v_t of the positive, finite ones among `values` (T,), gaps skipped."""
    data = np.asarray(values, dtype=np.float64)
    good = np.isfinite(data) & (data > 0)
    logs = np.log(np.where(good, data, 1.0))
    both = good[1:] & good[:-1]
    return np.asarray((logs[1:] - logs[:-1])[both])
