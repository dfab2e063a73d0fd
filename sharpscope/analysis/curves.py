"""Curves: the numbers by step that page, figures and tables show, and the data of the charts that `html/assets/curves.js` draws."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from scipy.special import stdtrit

from sharpscope.analysis.events import events_of
from sharpscope.analysis.frames import stacked
from sharpscope.analysis.measures import (
    ROUNDED,
    STEPS,
    accuracy_values,
    known,
    rotates,
    sharpness_rows,
)
from sharpscope.analysis.statistics import FEWEST
from sharpscope.analysis.study import Setting, Study, per_run
from sharpscope.analysis.text import method_label, sampling, short, shown
from sharpscope.analysis.token_values import mismatch_by_step
from sharpscope.traces import MAX_SATURATION, Run, Runs

COLORS = (
    "#0173b2",
    "#de8f05",
    "#029e73",
    "#d55e00",
    "#cc78bc",
    "#ca9161",
    "#fbafe4",
    "#949494",
    "#ece133",
    "#56b4e9",
)
"""Palette `colorblind` of seaborn, of every chart and figure."""
POINTS = 1500
"""Points of a curve, at most; of longer runs each point is a mean over several steps."""
TURNS = ("gradient_rotation", "update_rotation")
NAMED = {quantity.name: quantity for quantity in STEPS.values()}
"""Quantities by step by their names."""


@per_run
def run_values(run: Run) -> pd.DataFrame:
    """step, quantity, value, low, high, saturated of one run: reward, accuracies [%], other columns of STEPS, measures of sharpness.

    Intervals are over prompts. Rotations and mismatches that are rounding are left out.
    """
    steps = run.steps.sort_values("step")
    steps = steps.assign(mismatch=steps["step"].map(mismatch_by_step(run)))
    parts = []
    for name, quantity in STEPS.items():
        if name not in steps:
            continue
        values = quantity.factor * known(steps[name])
        rounding = name in TURNS and not rotates(run)
        if name == "mismatch":
            rounding = not (values > ROUNDED).any()
        if not rounding:
            columns = {
                "step": steps["step"],
                "quantity": quantity.name,
                "value": values,
            }
            parts.append(pd.DataFrame(columns))
    evaluated = accuracy_values(run)
    split = evaluated["split"].str.replace("heldout", "held-out")
    how = evaluated["temperature"].map(sampling)
    accuracies = {
        "step": evaluated["step"],
        "quantity": split + " accuracy, " + how + " [%]",
        "value": 100 * evaluated["accuracy"],
        "low": 100 * evaluated["low"],
        "high": 100 * evaluated["high"],
    }
    parts.insert(1, pd.DataFrame(accuracies))  # after the reward
    sharp = sharpness_rows(run).drop_duplicates(["measure", "step"])
    columns = {
        "step": sharp["step"],
        "quantity": sharp["measure"],
        "value": sharp["value"],
        "low": sharp["value"] - sharp["half"],
        "high": sharp["value"] + sharp["half"],
        "saturated": known(sharp["saturation"]) > MAX_SATURATION,
    }
    parts.append(pd.DataFrame(columns))
    return stacked(parts, ["step", "quantity", "value", "low", "high", "saturated"])


def study_values(study: Study) -> pd.DataFrame:
    """setting, seed and `run_values` of every run of a study."""
    pieces = [run_values(run).assign(setting=label, seed=seed) for label, seed, run in study.each()]
    frame = pd.concat(pieces, ignore_index=True)
    frame["saturated"] = frame["saturated"].eq(True)
    return frame.astype(
        {
            "step": int,
            "value": float,
            "low": float,
            "high": float,
        }
    )


def varying(values: pd.DataFrame) -> pd.DataFrame:
    """The rows of `study_values` whose quantity has values at two steps or more and, if it is one of STEPS, varies beyond rounding."""
    frame = values.dropna(subset=["value"])
    # a chart of a constant says less than its name in a line of text
    grouped = frame.groupby("quantity")
    low = grouped["value"].transform("min")
    high = grouped["value"].transform("max")
    still = (high - low <= ROUNDED * high.abs()) & frame["quantity"].isin(NAMED)
    return frame[(grouped["step"].transform("nunique") > 1) & ~still]


def study_charts(study: Study, settings: Sequence[Setting], runs: Runs) -> dict[str, object]:
    """The charts of a study: `name`, `settings`, `charts`, `events`, and `still`, quantities that never vary.

    A chart has `title`, `log`, the steps `x`, and for each setting `y` (the mean over its seeds), `low` and `high` (95 %
    interval: Student's t over seeds, from FEWEST on; over prompts of a run alone, where a table has it), `seeds` (of fewer seeds,
    each), and `hollow` (indices of saturated estimates).
    """
    labels = [setting.label for setting in settings]
    part = study.only(labels)
    values = study_values(part)
    drawn = varying(values)
    colored = sorted(labels, key=lambda label: (label != "grpo", label))
    # by identity: runs of different folders may have one name
    names = {id(run): name for name, run in runs.by_name.items()}
    described = []
    for setting in settings:
        at = colored.index(setting.label)
        look = {
            "label": shown(method_label(setting.label)),
            "color": COLORS[at % len(COLORS)],
            "runs": [shown(names[id(run)]) for run in setting.runs.values()],
        }
        described.append(look)
    recorded = values.dropna(subset=["value"])["quantity"]
    still = set(recorded) - set(drawn["quantity"])
    return {
        "name": shown(study.name) if study.slug else "",
        "settings": described,
        "charts": [chart_of(rows, labels) for _, rows in drawn.groupby("quantity", sort=False)],
        "events": [list(event) for event in events_of(part)],
        "still": [name for name in NAMED if name in still],
    }


def chart_of(frame: pd.DataFrame, labels: Sequence[str]) -> dict[str, object]:
    """One chart of the rows (setting, seed, step, value, …) of one quantity, see `study_charts`."""
    name = str(frame["quantity"].iloc[0])
    steps = np.sort(frame["step"].unique())
    together = -(-len(steps) // POINTS)  # steps of a point
    at = np.arange(len(steps)) // together
    x = pd.Series(steps).groupby(at).mean()
    frame = frame.assign(at=frame["step"].map(dict(zip(steps, at, strict=True))))
    least, most = frame["value"].agg(["min", "max"])
    wide = bool(least > 0 and most > 5 * least)
    log = wide and name in NAMED and NAMED[name].log
    series = [_series(frame[frame["setting"] == label], range(len(x))) for label in labels]
    return {
        "title": shown(name),
        "log": log,
        "x": _list(x),
        "series": series,
    }


def _series(part: pd.DataFrame, points: range) -> dict[str, Sequence[object]]:
    """`y`, `low`, `high`, `seeds` and `hollow` of one setting's rows, by `at`."""
    table = part.pivot_table(index="at", columns="seed", values="value").reindex(points)
    mean = table.mean(axis=1)
    count = table.count(axis=1)
    made: dict[str, Sequence[object]] = {"y": _list(mean)}
    seeds = table.shape[1]
    if seeds >= FEWEST:
        half = stdtrit(np.maximum(count - 1, 1), 0.975) * table.sem(axis=1)
        made["low"] = _list(mean - half)
        made["high"] = _list(mean + half)
    elif seeds > 1:
        made["seeds"] = [_list(table[seed]) for seed in table]
    elif part["low"].notna().any():
        ends = part.groupby("at")[["low", "high"]].mean().reindex(points)
        made["low"] = _list(ends["low"])
        made["high"] = _list(ends["high"])
    if part["saturated"].any():
        made["hollow"] = sorted({int(at) for at in part.loc[part["saturated"], "at"]})
    return made


def _list(values: pd.Series) -> list[float | int | str | None]:
    """The values for JSON; None for what is not a finite number."""
    return [short(value, 5) for value in values.where(np.isfinite(values.astype(float)))]
