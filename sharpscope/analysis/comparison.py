"""Two runs side by side: what differs in their settings, and in their results with intervals."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd
from rich.console import RenderableType

from sharpscope.analysis.frames import with_pooled
from sharpscope.analysis.statistics import accuracy_interval
from sharpscope.analysis.study import flat, ground_of, last_step
from sharpscope.analysis.text import sampling
from sharpscope.traces import Run

Z = 1.959964  # 97.5 % quantile of the normal distribution
INTERVALS = (
    "Steps: intervals over steps, corrected for autocorrelation at lag 1; accuracies: over prompts (Wilson, ± the longer arm). "
    "One run each says nothing about other seeds: `sharpscope sweep` gives them."
)
"""What the intervals of `compare` are, and what they are not."""
RESULTS = ["quantity", "unit", "a", "a_half", "b", "b_half", "difference", "difference_half"]
STEP_QUANTITIES = {
    "reward_mean": ("reward, last third", "reward"),
    "accuracy": ("training accuracy, last third", "share"),
    "entropy_mean": ("entropy, last third", "nats"),
    "grad_norm": ("gradient norm, last third", "L2, parameters"),
    "truncated_fraction": ("truncated completions, last third", "share"),
}


@dataclass(frozen=True)
class Comparison:
    """Settings and results of two runs.

    Attributes:
        names: of a and b.
        settings: rows setting, a, b: only those that differ.
        results: rows RESULTS; `_half` is half of a 95 % interval, the difference is b − a.
        notes: how the intervals were made, and what they do not say.
        warnings: those of the notes that tell of a run: damaged parts, not finished.
        horizon: the step at which the results are; None where there are none.
    """

    names: tuple[str, str]
    settings: pd.DataFrame
    results: pd.DataFrame
    notes: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    horizon: int | None = None

    def __rich__(self) -> RenderableType:
        from sharpscope.analysis.terminal import render_comparison

        return render_comparison(self)


def compare(run_a: Run, run_b: Run) -> Comparison:
    """What differs between two runs. Results are taken at the last step that both have; b − a where both have a number.

    Intervals of step quantities: over the steps of the last third, with as many independent steps as the series'
    autocorrelation at lag 1 leaves. Intervals of accuracies: 1.96 standard errors over prompts, as if the two runs were
    asked different prompts. Neither says anything about other seeds.

    Runs of different tasks, task settings or initial policies: settings only, and a note.
    """
    settings = _settings(run_a, run_b)
    said = [f"{run.name}: {part} is set aside: {why}" for run in (run_a, run_b) for part, why in run.damaged.items()]
    said += [f"{run.name} is not finished ({run.status})." for run in (run_a, run_b) if run.status != "finished"]
    warnings = tuple(said)
    names = (run_a.name, run_b.name) if run_a.name != run_b.name else (str(run_a.path), str(run_b.path))
    nothing = pd.DataFrame(columns=RESULTS)
    if ground_of(run_a) != ground_of(run_b):
        why_not = "Their tasks, task settings or initial policies differ, so their results are not compared."
        return Comparison(names, settings, nothing, (*warnings, why_not), warnings)
    horizon = min(last_step(run_a), last_step(run_b))
    if horizon == 0:
        why_not = "At least one of them has no step yet, so there are no results to compare."
        return Comparison(names, settings, nothing, (*warnings, why_not), warnings)
    results = pd.DataFrame(
        [*_step_results(run_a, run_b, horizon), *_eval_results(run_a, run_b, horizon)], columns=RESULTS
    )
    notes = (*warnings, f"At step {horizon}, the last that both have. {INTERVALS}")
    return Comparison(names, settings, results, notes, warnings, horizon)


def _settings(run_a: Run, run_b: Run) -> pd.DataFrame:
    a, b = (facts_of(run) for run in (run_a, run_b))
    keys = [key for key in {**a, **b} if a.get(key) != b.get(key) and key not in ("name", "out")]
    return pd.DataFrame([(key, a.get(key, "–"), b.get(key, "–")) for key in keys], columns=["setting", "a", "b"])


def facts_of(run: Run) -> dict[str, object]:
    """Method, configuration, resolved constants, machine and versions of a run as one flat mapping."""
    config = flat(run.config)
    machine = {key: run.info.get(key) for key in ("device", "parameters", "commit")}
    resolved = flat(run.info.get("calibration") or {}, "calibration.")
    # Constants that the configuration already gives are not repeated.
    resolved = {k: v for k, v in resolved.items() if config.get(k.replace("calibration", "method.weight", 1)) != v}
    versions = flat(run.info.get("versions") or {}, "versions.")
    return {"method": run.method} | config | resolved | machine | versions


def mean_over_steps(values: np.ndarray) -> tuple[float, float]:
    """Mean of a series and its standard error with n·(1 − r)/(1 + r) independent values, r its lag-1 autocorrelation.

    r below 0 counts as 0. The error is NaN for fewer than 4 values; a value that is not a number makes both so.
    """
    x = np.asarray(values, dtype=float)
    if x.size == 0:
        return math.nan, math.nan
    mean = float(x.mean())
    if x.size < 4 or not np.isfinite(x).all():
        return mean, math.nan
    centered = x - mean
    total = float(centered @ centered)
    r = min(max(float(centered[1:] @ centered[:-1]) / total, 0.0), 0.99) if total > 0 else 0.0
    effective = max(1.0, x.size * (1 - r) / (1 + r))
    return mean, math.sqrt(total / (x.size - 1) / effective)


def _step_results(run_a: Run, run_b: Run, horizon: int) -> list[tuple[object, ...]]:
    rows = []
    for column, (name, unit) in STEP_QUANTITIES.items():
        matches = []
        for run in (run_a, run_b):
            steps = run.steps.sort_values("step")
            steps = steps[(steps["step"] <= horizon) & (steps["step"] > 2 * horizon / 3)]
            matches.append(pd.to_numeric(steps[column], errors="coerce").to_numpy(dtype=float))
        if all(np.isfinite(values).any() for values in matches):
            (a, a_error), (b, b_error) = map(mean_over_steps, matches)
            rows.append(_row(name, unit, a, Z * a_error, b, Z * b_error))
    return rows


def _eval_results(run_a: Run, run_b: Run, horizon: int) -> list[tuple[object, ...]]:
    a, b = (run.eval[(run.eval["task"] == run.task) & (run.eval["step"] <= horizon)] for run in (run_a, run_b))
    common = set(a["step"]) & set(b["step"])
    if not common:
        return []
    step = max(common)
    first, second = (_accuracies(rows[rows["step"] == step]) for rows in (a, b))
    return [
        _row(f"accuracy {split}, {sampling(t)}, step {step}", "share", *first[split, t], *second[split, t])
        for split, t in sorted(first.keys() & second.keys())
    ]


def _accuracies(rows: pd.DataFrame) -> dict[tuple[str, float], tuple[float, float]]:
    """(split, temperature) -> pooled accuracy and the longer arm of its 95 % interval over prompts."""
    pooled = with_pooled(rows, "accuracy")
    result = {}
    for _, group in pooled[pooled["level"] == "all"].groupby(["split", "temperature"]):
        split, temperature = str(group["split"].iloc[0]), float(group["temperature"].iloc[0])
        here = rows[(rows["split"] == split) & (rows["temperature"] == temperature)]
        levels = here[here["level"] != "all"]
        parts = levels if len(levels) else here
        weight = parts["n"] * parts["k"] / (parts["n"] * parts["k"]).sum()
        error = math.sqrt(float(((weight * parts["std_error"]) ** 2).sum(skipna=False)))
        accuracy, prompts = float(group["value"].iloc[-1]), int(parts["n"].sum())
        samples = float((parts["n"] * parts["k"]).sum() / prompts)
        ends = accuracy_interval(accuracy, error, prompts, samples)
        result[split, temperature] = (accuracy, max(accuracy - ends.low, ends.high - accuracy))
    return result


def _row(name: str, unit: str, a: float, a_half: float, b: float, b_half: float) -> tuple[object, ...]:
    return (name, unit, a, a_half, b, b_half, b - a, math.hypot(a_half, b_half))
