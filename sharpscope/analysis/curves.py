"""Curves of the page: the data of its charts, as JSON values that `html/assets/curves.js` draws."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd
from scipy.special import stdtrit

from sharpscope.analysis.measures import STEPS, Quantity, eval_values, sharpness_values, step_values
from sharpscope.analysis.spikes import find_spikes
from sharpscope.analysis.statistics import FEWEST
from sharpscope.analysis.study import Setting, Study
from sharpscope.analysis.text import method_label, short, shown
from sharpscope.traces import Runs

COLORS = (
    *("#0173b2", "#de8f05", "#029e73", "#d55e00", "#cc78bc"),
    *("#ca9161", "#fbafe4", "#949494", "#ece133", "#56b4e9"),
)
"""Palette `colorblind` of seaborn, of every chart and figure."""
POINTS = 1500
"""Points of a curve, at most; of longer runs each point is a mean over several steps."""
MARKED = 12
"""Spikes that a chart marks, at most."""


def in_order(labels: Iterable[str]) -> list[str]:
    """Labels in the order of their colors: grpo first, then by name."""
    return sorted(set(labels), key=lambda label: (label != "grpo", label))


def study_charts(study: Study, settings: Sequence[Setting], runs: Runs) -> dict[str, Any]:
    """The charts of a study: `name`, `settings`, `charts`, `events`, and `still`, quantities that never vary.

    A chart has `title`, `log`, the steps `x`, and for each setting `y` (the mean over its seeds), `low` and `high` (95 %
    interval: Student's t over seeds, from FEWEST on; over prompts of a run alone, where a table has it), `seeds` (of fewer seeds,
    each), and `hollow` (indices of saturated estimates).

    Args:
        study: whose runs are drawn.
        settings: of it, those that are shown.
        runs: names of the runs.
    """
    labels = [setting.label for setting in settings]
    part = study.only(labels)
    steps = step_values(part, list(STEPS))
    frames = [selected for name in STEPS if len(selected := steps[steps["quantity"] == name])]
    for frame in (eval_values(part), sharpness_values(part)):
        frames += [selected for _, selected in frame.groupby("quantity", sort=False)] if len(frame) else []
    frames = [selected for selected in frames if selected["step"].nunique() > 1]
    tables = [run.steps for _, _, run in part.each()]
    columns = {name for table in tables for name in STEPS if name in table and table[name].notna().any()}
    order = in_order(labels)
    names = {id(run): name for name, run in runs.by_name.items()}
    described = [
        {
            "label": shown(method_label(label)),
            "color": COLORS[order.index(label) % len(COLORS)],
            "runs": [shown(names[id(run)]) for _, _, run in part.only([label]).each()],
        }
        for label in labels
    ]
    return {
        "name": shown(study.name) if study.slug else "",
        "settings": described,
        "charts": [chart_of(selected, labels) for selected in sorted(frames, key=_rank)],
        "events": _events(part),
        "still": [STEPS[name].name for name in STEPS if name in columns - set(steps["quantity"])],
    }


def _rank(frame: pd.DataFrame) -> int:
    """Place of a chart: reward, accuracies, then the other quantities by step, sharpness last."""
    name = str(frame["quantity"].iloc[0])
    return {"reward_mean": 0, "accuracy": 2}.get(name, 3 if name in STEPS else 1 if "accuracy" in name else 4)


def chart_of(frame: pd.DataFrame, labels: Sequence[str]) -> dict[str, Any]:
    """One chart of the rows (setting, seed, step, value, …) of one quantity, see `study_charts`."""
    name = str(frame["quantity"].iloc[0])
    quantity = STEPS.get(name, Quantity(name))
    frame = frame.assign(value=quantity.factor * frame["value"])
    steps = np.sort(frame["step"].unique())
    at = np.arange(len(steps)) // -(-len(steps) // POINTS)
    x, block = pd.Series(steps).groupby(at).mean(), dict(zip(steps, at, strict=True))
    frame = frame.assign(at=frame["step"].map(block))
    positive = frame["value"].dropna()
    log = quantity.log and bool((positive > 0).all() and positive.max() > 5 * positive.min())
    series = [_series(frame[frame["setting"] == label], range(len(x))) for label in labels]
    return {"title": shown(quantity.name), "log": log, "x": _list(x), "series": series}


def _series(part: pd.DataFrame, points: range) -> dict[str, list[Any]]:
    """`y`, `low`, `high`, `seeds` and `hollow` of one setting's rows, by `at`."""
    table = part.pivot_table(index="at", columns="seed", values="value").reindex(points)
    mean, count = table.mean(axis=1), table.count(axis=1)
    made: dict[str, list[Any]] = {"y": _list(mean)}
    if table.shape[1] >= FEWEST:
        half = stdtrit(np.maximum(count - 1, 1), 0.975) * table.std(axis=1, ddof=1) / np.sqrt(count)
        made |= {"low": _list(mean - half), "high": _list(mean + half)}
    elif table.shape[1] > 1:
        made["seeds"] = [_list(table[seed]) for seed in table]
    elif "low" in part and part["low"].notna().any():
        ends = part.groupby("at")[["low", "high"]].mean().reindex(points)
        made |= {"low": _list(ends["low"]), "high": _list(ends["high"])}
    if "saturated" in part and part["saturated"].any():
        made["hollow"] = sorted(set(map(int, part.loc[part["saturated"], "at"])))
    return made


def _events(study: Study) -> list[tuple[int, str]]:
    """(step, text) of what happened: the first time of each warning or worse, and the largest spikes of the gradient norm."""
    rows, spikes = [], []
    for label, seed, run in study.each():
        who = f" ({method_label(label)}, seed {seed})" if len(study.each()) > 1 else ""
        loud = run.events[run.events["severity"] != "info"]
        rows += [(str(rule), int(step), who) for rule, step in zip(loud["rule"], loud["step"], strict=True)]
        for row in find_spikes(run.steps).to_dict("records"):
            times = row["grad_norm"] / row["typical"]
            spikes.append((times, int(row["step"]), f"gradient spike, {times:.1f} × typical{who}"))
    found: dict[int, list[str]] = {}
    for rule, part in pd.DataFrame(rows, columns=["rule", "step", "who"]).groupby("rule", sort=False):
        runs = part["who"].unique()
        times = f", first of {len(part)} times" if len(part) > 1 else ""
        where = f" in {len(runs)} runs" if len(runs) > 1 else runs[0]
        found.setdefault(int(part["step"].min()), []).append(str(rule).replace("_", " ") + times + where)
    for _, step, text in sorted(spikes, reverse=True)[:MARKED]:
        found.setdefault(step, []).append(text)
    return [(step, shown(" · ".join(found[step][:4]))[:300]) for step in sorted(found)]


def _list(values: pd.Series) -> list[Any]:
    """The values for JSON; None for what is not a finite number."""
    return [short(value, 5) for value in values.where(np.isfinite(values.astype(float)))]
