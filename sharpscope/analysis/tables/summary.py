"""Numbers of a study: one for each run, then mean and 95 % t-interval over the seeds of a setting."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from sharpscope.analysis.frames import with_pooled
from sharpscope.analysis.statistics import mean_interval
from sharpscope.analysis.study import Study
from sharpscope.analysis.text import sampling
from sharpscope.traces import Run

SUMMARY = ["study", "setting", "method", "metric", "unit", "runs", "mean", "low", "high", "interval", "step"]
_LAST_THIRD = "last third"


def run_metrics(run: Run, horizon: int) -> dict[tuple[str, str], float]:
    """(metric, unit) -> value of one run over its steps up to `horizon`; a metric that was not recorded is left out.

    "last third" is the mean over the steps in (2/3 horizon, horizon]. A step that is not a number makes the metric so.
    """
    steps = run.steps[run.steps["step"] <= horizon]
    late = steps[steps["step"] > 2 * horizon / 3]
    seconds = steps[["generation_s", "training_s", "recording_s"]].sum(axis=1, min_count=1)
    clipped = late["clip_fraction_low"] + late["clip_fraction_high"]
    result: dict[tuple[str, str], float] = {}
    for column, name in (("reward_mean", ("reward", "reward")), ("accuracy", ("training accuracy", "share"))):
        if run.steps[column].notna().any():
            result[f"{name[0]}, {_LAST_THIRD}", name[1]] = _mean(late[column])
    result |= _eval_metrics(run, horizon)
    optional = {
        (f"entropy, {_LAST_THIRD}", "nats"): late["entropy_mean"],
        (f"clipped tokens, {_LAST_THIRD}", "share"): clipped,
        (f"truncated completions, {_LAST_THIRD}", "share"): late["truncated_fraction"],
        (f"mean weight, {_LAST_THIRD}", "1"): late["weight_mean"],
        ("time of a step", "seconds"): seconds,
    }
    updates = run.updates[(run.updates["step"] > 2 * horizon / 3) & (run.updates["step"] <= horizon)]
    if (updates["update"] > 0).any():  # with one update a step it is 0
        optional[f"KL of an update to the step's first policy, {_LAST_THIRD}", "nats"] = updates["kl_old_k3"]
    norms = pd.to_numeric(steps["grad_norm"], errors="coerce").dropna()
    if len(norms):
        result["median gradient norm", "L2, parameters"] = float(norms.median())
    return result | {key: _mean(values) for key, values in optional.items() if values.notna().any()}


def _eval_metrics(run: Run, horizon: int) -> dict[tuple[str, str], float]:
    """Pooled accuracy of each split and temperature at the last evaluation up to `horizon`."""
    rows = run.eval[(run.eval["task"] == run.task) & (run.eval["step"] <= horizon)]
    if rows.empty:
        return {}
    pooled = with_pooled(rows, "accuracy")
    pooled = pooled[pooled["level"] == "all"].sort_values("step")
    last = pooled.groupby(["split", "temperature"], as_index=False).last()
    return {
        (f"accuracy {split}, {sampling(temperature)}", "share"): float(value)
        for split, temperature, value in zip(last["split"], last["temperature"], last["value"], strict=True)
    }


def _mean(values: pd.Series) -> float:
    # without skipping: a reward that is not a number must not vanish in a mean
    return float(np.mean(pd.to_numeric(values, errors="coerce").to_numpy(dtype=float))) if len(values) else math.nan


def summary(study: Study) -> pd.DataFrame:
    """One row for each setting and metric: SUMMARY columns; all settings at the study's common last step."""
    horizon = study.horizon
    values: dict[str, dict[tuple[str, str], list[float]]] = {}
    for label, _, run in study.each():
        for key, value in run_metrics(run, horizon).items():
            values.setdefault(label, {}).setdefault(key, []).append(value)
    methods = {setting.label: setting.method for setting in study.settings}
    rows = []
    for label, metrics in values.items():
        for (metric, unit), numbers in metrics.items():
            interval = mean_interval(numbers, "t")
            ends = (math.nan, math.nan, "") if interval is None else (interval.low, interval.high, interval.kind)
            mean = float(np.mean(numbers))
            rows.append((study.name, label, methods[label], metric, unit, len(numbers), mean, *ends, horizon))
    return pd.DataFrame(rows, columns=SUMMARY)


def method_table(table: pd.DataFrame) -> pd.DataFrame:
    """A summary as a table to read: settings down, metrics across, cells "mean ± half-width of the 95 % interval"."""
    cells = table.assign(
        cell=[interval_text(mean, high - mean) for mean, high in zip(table["mean"], table["high"], strict=True)]
    )
    wide = cells.pivot(index="setting", columns="metric", values="cell")
    ordered = wide[list(dict.fromkeys(table["metric"]))].fillna("–")
    ordered.insert(0, "runs", table.groupby("setting")["runs"].max().astype(str))
    return ordered.reset_index()


def interval_text(mean: float, half: float) -> str:
    """`0.431 ± 0.012`, or the mean alone where there is no interval."""
    if math.isnan(mean):
        return "not a number"
    digits = 3 if 1e-3 <= abs(mean) < 1e4 or mean == 0 else None
    middle = f"{mean:.{digits}f}" if digits is not None else f"{mean:.2e}"
    if math.isnan(half):
        return middle
    return f"{middle} ± {half:.{digits}f}" if digits is not None else f"{middle} ± {half:.1e}"
