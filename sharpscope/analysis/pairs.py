"""Paired comparisons of runs: the same seed and prompts, one method against another, quantity by quantity."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from sharpscope.analysis.measures import (
    FUNCTIONAL,
    by_step,
    clipped_updates,
    evaluations,
    known,
    probe_rows,
    shared_sharpness,
    splits_of,
    temperatures,
)
from sharpscope.analysis.statistics import (
    Interval,
    mean_interval,
    series_mean,
    sign_flip_p,
    to_halve,
)
from sharpscope.analysis.study import Setting, Study, ground_of, last_step, per_run, studies
from sharpscope.analysis.text import sampling
from sharpscope.traces import MAX_SATURATION, Row, Run

COLUMNS = [
    "baseline",
    "treatment",
    "quantity",
    "unit",
    "n",
    "paired_by",
    "baseline_value",
    "treatment_value",
    "difference",
    "low",
    "high",
    "p",
    "median",
    "worst",
    "worst_pair",
    "to_halve",
    "note",
]
STEPS = (
    ("reward_mean", "reward", "reward", 1),
    ("accuracy", "training accuracy", "share", 1),
    ("accuracy_completed", "training accuracy, completed only", "share", 1),
    ("entropy_mean", "entropy", "nats", 0),
    ("completion_length_mean", "completion length", "tokens", 0),
    ("truncated_fraction", "completions cut at the limit", "share", -1),
    ("kl_step", "KL of a step", "nats", 0),
    ("kl", "KL to the reference policy", "nats", 0),
    ("grad_norm", "gradient norm", "L2 norm", 0),
    ("update_norm", "update norm", "L2 norm", 0),
    ("update_rotation", "rotation of the update", "degrees", 0),
    ("clipped", "updates with a clipped gradient", "share", 0),
)
"""Column of `steps`, name, unit, whether more is better (1), worse (−1) or neither (0)."""
EVALUATED = {
    "accuracy": ("accuracy", 1),
    "pass_at_k": ("pass@k", 1),
    "accuracy_completed": ("accuracy, completed only", 1),
    "truncated": ("completions cut at the limit", -1),
}


class Difference(NamedTuple):
    """One quantity of one pair: both values, and the standard error of their difference within the pair."""

    quantity: str
    unit: str
    better: int
    baseline: float
    treatment: float
    error: float
    by: str
    note: str = ""
    comparable: bool = True


def compare_runs(
    runs: Iterable[Run] | Mapping[str, Run], baseline: str | None = None
) -> pd.DataFrame:
    """Paired differences, treatment − baseline, of any two settings that have runs with a seed in common.

    Step quantities are means over the last third of the steps that both runs have (the rotation: over all of them); evaluations
    and sharpness are of the last step that both have. With several pairs intervals are Student's t over pairs; with one pair they
    are over steps (autocorrelation at lag 1 taken out), or for evaluations over prompts, as if the runs had been asked
    different ones. Sharpness that is saturated, or at no shared radius, is not compared and says so in `note`.

    Args:
        runs: two runs are compared whatever their settings; more are grouped into settings that differ in the seed alone.
        baseline: label of a setting, or name of a method; None: `grpo`, or else the first setting.

    Returns:
        COLUMNS, a row for each pair of settings and quantity: means of both, mean difference with its 95 % interval, p of the
        sign-flip test from 6 pairs on, median, worst pair (for the treatment, or the one furthest against the median where more
        is neither better nor worse), and the number of seeds that would halve the interval. Empty where nothing can be
        paired.
    """
    named = runs if isinstance(runs, Mapping) else dict(enumerate(runs))
    names = {str(name): run for name, run in named.items()}
    rows: list[Row] = []
    if len(names) == 2:
        a, b = names.values()
        first, second = a.method, b.method
        if first == second:
            # two runs may have one name in different folders, by which a mapping tells them apart
            first, second = names if isinstance(runs, Mapping) else (a.name, b.name)
        if ground_of(a) == ground_of(b):
            rows += _compared(first, second, [(a.seed, a, b)])
        return pd.DataFrame(rows, columns=COLUMNS)
    for study in studies(Study(names)):
        if not study.settings:  # its runs have no step
            continue
        base = _baseline_of(study, baseline)
        for setting in study.settings:
            pairs = [
                (seed, base.runs[seed], run)
                for seed, run in setting.runs.items()
                if seed in base.runs
            ]
            if setting.label != base.label and pairs:
                rows += _compared(base.label, setting.label, pairs)
    return pd.DataFrame(rows, columns=COLUMNS)


def _baseline_of(study: Study, asked: str | None) -> Setting:
    """The setting that the others are compared with: the one asked for, else of `grpo`, else the first."""
    for name in (asked, "grpo"):
        for setting in study.settings:
            if name in (setting.label, setting.method):
                return setting
    return study.settings[0]


def _compared(first: str, second: str, pairs: Sequence[tuple[int, Run, Run]]) -> Iterator[Row]:
    """A row for each quantity that at least one pair has."""
    found: dict[str, list[tuple[int, Difference]]] = {}
    for seed, a, b in pairs:
        differences = [
            *_evaluated(a, b),
            *_over_steps(a, b),
            *_sharpness(a, b, FUNCTIONAL),
            *_sharpness(a, b, "nll"),
        ]
        for one in differences:
            found.setdefault(one.quantity, []).append((seed, one))
    for quantity, several in found.items():
        fit = {seed: one for seed, one in several if one.comparable}
        every = [one for _, one in several]
        shown = list(fit.values()) or every  # the means are those of the pairs that are compared
        yield {
            "baseline": first,
            "treatment": second,
            "quantity": quantity,
            "unit": every[0].unit,
            "n": len(fit),
            "paired_by": "seed" if len(fit) > 1 else every[0].by,
            "baseline_value": np.mean([one.baseline for one in shown]),
            "treatment_value": np.mean([one.treatment for one in shown]),
            "note": "; ".join(dict.fromkeys(one.note for one in every if one.note)),
            **(_summary(fit) if fit else {"to_halve": math.nan}),
        }


def _summary(parts: Mapping[int, Difference]) -> Row:
    """Mean difference with its interval, p of the sign-flip test, median, worst pair, and the seeds that would halve it."""
    n = len(parts)
    one = next(iter(parts.values()))
    data = np.array([part.treatment - part.baseline for part in parts.values()])
    mean = float(data.mean())
    median = float(np.median(data))
    half = 1.959964 * one.error
    # of one pair the error is that within it, over steps or prompts
    interval = mean_interval(data) if n > 1 else Interval(mean - half, mean + half, "t")
    # where more is neither better nor worse, the pair furthest against the median is the worst
    sign = one.better or (1 if median >= 0 else -1)
    worst = int(np.argmin(sign * data))
    return {
        "difference": mean,
        "low": interval.low if interval else math.nan,
        "high": interval.high if interval else math.nan,
        "median": median,
        "worst": float(data[worst]),
        "worst_pair": f"seed {list(parts)[worst]}",
        "p": sign_flip_p(data) if n >= 6 else math.nan,  # with fewer it can reject nothing at 5 %
        "to_halve": to_halve(n) if n > 1 else math.nan,
    }


def _evaluated(first: Run, second: Run) -> Iterator[Difference]:
    """Accuracies at the last step at which both were evaluated; the error is over prompts."""
    places = itertools.product(splits_of(first), temperatures(first), EVALUATED.items())
    for split, heat, (column, (name, better)) in places:
        a = evaluations(first, split, heat, column)
        b = evaluations(second, split, heat, column)
        shared = set(a) & set(b)
        if not shared:
            continue
        step = max(shared)
        errors = [standard_error(run, split, heat, step, column) for run in (first, second)]
        most = int(first.eval[first.eval["split"] == split]["k"].max())
        named = name.replace("@k", f"@{most}")
        yield Difference(
            quantity=f"{split.replace('heldout', 'held-out')} {named}, {sampling(heat)}",
            unit="share",
            better=better,
            baseline=a[step][0],
            treatment=b[step][0],
            error=math.hypot(*errors),
            by="prompt",
        )


def standard_error(run: Run, split: str, heat: float, step: int, column: str) -> float:
    """Standard error of a pooled share over prompts; binomial over prompts where none is recorded for the column."""
    value, prompts = evaluations(run, split, heat, column)[step]
    name = {"accuracy": "std_error", "pass_at_k": "pass_std_error"}.get(column, "")
    recorded = evaluations(run, split, heat, name).get(step)
    return math.sqrt(value * (1 - value) / prompts) if recorded is None else recorded[0]


@per_run
def _step_numbers(run: Run) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The steps, and the columns of STEPS as float64."""
    frame = by_step(run)
    values = {name: known(frame[name]) for name, *_ in STEPS if name in frame}
    clipped = known(clipped_updates(run).reindex(frame.index))
    return frame.index.to_numpy(), values | {"clipped": clipped}


def _over_steps(first: Run, second: Run) -> Iterator[Difference]:
    """Means over the last third of the steps that both have; the error is over steps."""
    horizon = min(last_step(first), last_step(second))
    a_steps, a = _step_numbers(first)
    b_steps, b = _step_numbers(second)
    steps, in_a, in_b = np.intersect1d(a_steps, b_steps, return_indices=True)
    for column, name, unit, better in STEPS:
        if column not in a or column not in b:
            continue
        x = a[column][in_a]
        y = b[column][in_b]
        # rotations are of the methods, not of the progress of training
        start = 0 if column == "update_rotation" else 2 * horizon / 3
        inside = (steps > start) & (steps <= horizon)
        both = inside & ~np.isnan(x) & ~np.isnan(y)
        if both.any():
            yield Difference(
                quantity=name,
                unit=unit,
                better=better,
                baseline=x[both].mean(),
                treatment=y[both].mean(),
                error=series_mean(y[both] - x[both])[1],
                by="step",
            )


def _sharpness(first: Run, second: Run, functional: str) -> Iterator[Difference]:
    per_unit = functional == FUNCTIONAL
    name = f"SAM sharpness of {functional}" + (" per unit of 1 − loss" if per_unit else "")
    unit, column = ("1", "saturation") if per_unit else ("nats", "rise")
    shared = shared_sharpness([first, second], "sam", functional)
    if shared is None:
        if all(len(probe_rows(run, "sam", functional)) for run in (first, second)):
            note = "not compared: no radius, probe set and number of prompts in common"
            yield Difference(
                quantity=name,
                unit=unit,
                better=-1,
                baseline=math.nan,
                treatment=math.nan,
                error=math.nan,
                by="prompt",
                note=note,
                comparable=False,
            )
        return
    rho, curves = shared
    steps = curves[0].index.intersection(curves[1].index)
    if not len(steps):
        return
    a, b = (curve.loc[steps.max()] for curve in curves)
    note = f"radius {rho:g}"
    if a["estimated"] or b["estimated"]:
        note += ", ceiling estimated by training accuracy"
    fit = not per_unit or max(a[column], b[column]) <= MAX_SATURATION
    if not fit:
        note = f"not compared: saturated, or of unknown ceiling ({note}, at most {MAX_SATURATION:g} of the ceiling)"
    yield Difference(
        quantity=name,
        unit=unit,
        better=-1,
        baseline=a[column],
        treatment=b[column],
        error=math.nan,
        by="prompt",
        note=note,
        comparable=fit,
    )
