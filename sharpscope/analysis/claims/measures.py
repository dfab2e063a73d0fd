"""Numbers of one run that several claims use: accuracies, gap, sharpness, informative groups, reward reached."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from sharpscope.analysis.claims.base import Dose, Source
from sharpscope.analysis.study import per_run

if TYPE_CHECKING:
    from sharpscope.traces import Run

TEMPERATURE = 1.0
"""Sampling temperature of the accuracies compared; where a run was not evaluated at it, its highest is taken."""
SMOOTHING = 10
"""Steps over which a reward or a training accuracy is averaged [steps]."""
FUNCTIONAL = "expected_failure"
"""The functional whose sharpness is compared between methods and with the gap."""
MEASURES = {"sam": "plain", "asam": "adaptive"}
"""Sharpness measures: quantity in the probes table → what it is."""


@per_run
def evaluations(run: Run, split: str) -> dict[int, tuple[float, int]]:
    """Step → (accuracy, prompts) of one split at the temperature compared, levels weighted by their prompts.

    Rows of level `all` count only if there are no others.
    """
    rows = run.eval[["split", "step", "level", "n", "accuracy", "temperature"]].to_dict("list")
    result = [
        (step, level, n, accuracy, heat)
        for s, step, level, n, accuracy, heat in zip(*rows.values(), strict=True)
        if s == split and math.isfinite(accuracy)
    ]
    if not result:
        return {}
    heats = {row[4] for row in result}
    heat = min(heats, key=lambda value: (abs(value - TEMPERATURE) > 1e-6, -value))
    result = [row for row in result if row[4] == heat]
    single = [row for row in result if row[1] != "all"] or result
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
    columns = ["step", "probe_set", "functional", "parameters", "quantity", "value", "std_error", "rho", "converged"]
    rows = run.probes.reindex(columns=columns)
    rows = rows[rows["value"].notna() & ~rows["converged"].eq(False)]
    result = {}
    for key, group in rows.groupby(["quantity", "functional"]):
        whole = group["parameters"] == "all"
        result[(str(key[0]), str(key[1]))] = group[whole] if whole.any() else group
    return result


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
def prompt_values(run: Run, quantity: str, functional: str = FUNCTIONAL, probe_set: str = "train") -> pd.DataFrame:
    """step, probe_set, rho, prompt, value: the parts that the prompts have in the estimates of `probe_rows`, mean over seeds.

    Empty where no values by prompt were kept, as before version 0.2.
    """
    keys = ["step", "probe_set", "rho"]
    columns = [*keys, "prompt", "value"]
    rows, table = probe_rows(run, quantity, functional, probe_set), run.probe_prompts
    if not len(rows) or not len(table):
        return pd.DataFrame({name: [] for name in columns})
    own = table[(table["quantity"] == quantity) & (table["functional"] == functional)]
    own = own[own["parameters"] == "all"] if (own["parameters"] == "all").any() else own
    own = own.merge(rows[keys].drop_duplicates(), on=keys)
    means = own.groupby([*keys, "prompt"], dropna=False)["value"].mean()
    return means.reset_index()


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
    result = [probe_rows(run, quantity, functional) for run in runs]
    if any(not len(rows) for rows in result) or len({frozenset(rows["probe_set"]) for rows in result}) > 1:
        return None
    own = [_radii(rows) for rows in result]
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


def log_ratios(frame: pd.DataFrame) -> pd.DataFrame:
    """A paired frame with ln(treatment/baseline) as `difference`; rows with a value that is not positive are left out."""
    positive = frame[(frame["baseline"] > 0) & (frame["treatment"] > 0)]
    difference = np.log(positive["treatment"].to_numpy(dtype=float)) - np.log(
        positive["baseline"].to_numpy(dtype=float)
    )
    return positive.assign(difference=difference)


def dose_of(runs: Sequence[Run], method: str) -> Dose:
    """Mean rotation of the update and mean angle between halves of a batch over the steps of `runs` [degrees]."""
    return Dose(_mean_over_runs(runs, "update_rotation"), _mean_over_runs(runs, "noise_rotation"), method)


def _mean_over_runs(runs: Sequence[Run], column: str) -> float | None:
    """Mean over the runs that have it of a step quantity's mean; None if none has."""
    means = [float(run.steps[column].mean()) for run in runs if column in run.steps]
    known = [value for value in means if math.isfinite(value)]
    return float(np.mean(known)) if known else None


@per_run
def within_prompt_share(run: Run) -> float | None:
    """Share of the variance p(1 − p) of an answer that is left within a prompt, E[π(1 − π)]/(p(1 − p)); None if not known.

    From training groups in the last SMOOTHING steps: with π ~ Beta of mean p, the share of groups whose G rewards are all
    equal is E[π^G + (1 − π)^G], which fixes the Beta's spread. Not known without groups, or where all answers were correct or all
    wrong.
    """
    rollout = run.config.get("rollout", {})
    per_step, size = rollout.get("prompts_per_step"), rollout.get("group_size")
    rows = run.steps.sort_values("step").tail(SMOOTHING)
    if not per_step or not size or size < 2 or not len(rows):
        return None
    accuracy, equal = float(rows["accuracy"].mean()), float(rows["zero_std_groups"].mean() / per_step)
    if not 0 < accuracy < 1:
        return None
    low, high = 1e-6, 1 - 1e-6
    if _chance_equal(low, accuracy, size) >= equal:  # no more groups are alike than independent answers would give
        return 1.0
    if _chance_equal(high, accuracy, size) <= equal:
        return 0.0
    from scipy.optimize import brentq  # takes longer to import than most commands need

    return float(1 - brentq(lambda correlation: _chance_equal(correlation, accuracy, size) - equal, low, high))


def _chance_equal(correlation: float, accuracy: float, size: int) -> float:
    """Chance that `size` answers are all right or all wrong, π ~ Beta with mean `accuracy` and this intraclass correlation."""
    total = (1 - correlation) / correlation
    a, b = accuracy * total, (1 - accuracy) * total
    keys = np.arange(size)
    return float(np.prod((a + keys) / (total + keys)) + np.prod((b + keys) / (total + keys)))


ONE_ANSWER = "k = 1: spread within a prompt from the training groups"
AT_MOST = "upper bound: with one answer per prompt and no training groups that differ, the spread within a prompt is not known"


@per_run
def answer_noise(run: Run, split: str, step: int) -> Source | None:
    """Variance of an accuracy from sampling answers to its fixed prompts; its size is prompts × samples.

    With k > 1 samples a prompt: V_w/(n·k), V_w = (p(1 − p) − n·s²)·k/(k − 1) with s the standard error clustered by
    prompt. With k = 1: p(1 − p)/n times `within_prompt_share`, or p(1 − p)/n at most where that is not known; the source's note
    says which. None if the split was not evaluated.
    """
    rows = run.eval[(run.eval["split"] == split) & (run.eval["step"] == step)]
    heats = rows["temperature"].unique()
    if not len(heats):
        return None
    rows = rows[rows["temperature"] == min(heats, key=lambda heat: (abs(heat - TEMPERATURE) > 1e-6, -heat))]
    single = rows[rows["level"] != "all"]
    rows = single if len(single) else rows
    n, k = rows["n"].to_numpy(dtype=float), rows["k"].to_numpy(dtype=float)
    p = rows["accuracy"].to_numpy(dtype=float)
    if (k > 1).all() and "std_error" in rows and np.isfinite(rows["std_error"].to_numpy(dtype=float)).all():
        between = n * rows["std_error"].to_numpy(dtype=float) ** 2
        within, note = np.maximum(0.0, p * (1 - p) - between) * k / (k - 1), ""
    else:
        share = within_prompt_share(run)
        within, note = p * (1 - p) * (1.0 if share is None else share), AT_MOST if share is None else ONE_ANSWER
    variance = float(np.sum((n / n.sum()) ** 2 * within / (n * k)))
    return Source("answers", float((n * k).sum()), variance, note)


def paired_noise(runs: Sequence[tuple[Run, Run]], split: str) -> Source | str:
    """Variance of a difference of accuracies from sampling answers, mean over the pairs compared; or why it is not known."""
    result = []
    for pair in runs:
        step = last_step(*pair, split=split)
        parts = [answer_noise(run, split, step) for run in pair] if step is not None else []
        known = [part for part in parts if part is not None]
        if len(known) == 2:
            result.append(known)
    if not result:
        return f"no pair was evaluated on {split} prompts at one step: the share of sampling answers is not known"
    variance = float(np.mean([sum(part.variance for part in parts) for parts in result]))
    size = float(np.mean([part.size for parts in result for part in parts]))
    notes = {part.note for parts in result for part in parts}
    return Source("answers", size, variance, AT_MOST if AT_MOST in notes else min(notes))


def probe_noise(runs: Sequence[tuple[Run, Run]], quantity: str) -> Source | str:
    """Variance of ln(treatment/baseline) of a sharpness from the probe's prompts; or why it is not known.

    Both runs of a pair are probed on the same prompts. To first order prompt i changes the log ratio by r_i = t_i/T − b_i/B, its values
    over the estimates, so that what is common to the pair cancels; the variance of a pair is that of r over the prompts, by their
    number. Where all pairs have the same prompts, what is common to the pairs cancels in the spread over pairs too: then r is that
    of the interaction, the residuals of prompt and pair.
    """
    parts: list[pd.Series] = []
    sets: set[str] = set()
    for pair in runs:
        values = _last_prompts(pair, quantity)
        if values is None:
            continue
        sets |= values[0]
        first, second = values[1]
        parts.append(second / second.mean() - first / first.mean())
    if not parts:
        return "no values by prompt of sharpness (table probe_prompts, from version 0.2 on): the share of the probe's prompts is not known"
    table = pd.concat(parts, axis=1, join="inner")  # (prompts, pairs)
    prompts, pairs = table.shape
    if prompts < 2:
        return "one probe prompt: the share of the probe's prompts is not known"
    if pairs > 1 and len(sets) == 1:
        left = table.sub(table.mean(axis=1), axis=0)
        variance = float((left.sub(left.mean()) ** 2).to_numpy().sum() / ((prompts - 1) * (pairs - 1)))
        note = ""
    else:
        variance, note = (
            float(np.mean([part.var(ddof=1) for part in parts])),
            "upper bound: variance that the pairs share is included",
        )
    return Source("probe prompts", float(prompts), variance / prompts, note)


def _last_prompts(pair: tuple[Run, Run], quantity: str) -> tuple[set[str], list[pd.Series]] | None:
    """Probe sets of a pair, and each run's values by prompt of the sharpness that C4 compares; None where they are not known."""
    curves = shared_curves(pair, quantity)
    steps = set.intersection(*(set(curve.index) for curve in curves)) if curves is not None else set()
    both = [prompt_values(run, quantity) for run in pair]
    if not steps or any(not len(values) for values in both):
        return None
    shared = sorted(set(_radii(both[0])) & set(_radii(both[1])))
    result = []
    for values in both:
        own = values[values["step"] == max(steps)]
        if shared:
            own = own[np.isclose(own["rho"], shared[(len(shared) - 1) // 2], rtol=1e-6)]
        result.append(own.groupby("prompt")["value"].mean())
    if any(len(values) < 2 or not values.mean() > 0 for values in result):
        return None
    return {name for values in both for name in values["probe_set"]}, result


UNKNOWN_NOISE = (
    "the sampling noise of the gap is not known, so neither is its reliability: no training answers to count"
)


def gap_noise(run: Run, step: int) -> float | None:
    """Variance of the generalization gap from sampling answers: held-out answers plus training answers; None without either.

    Where the split `train` was not evaluated, the training rollouts are taken as independent answers, which gives an upper bound.
    """
    outside, inside = answer_noise(run, "heldout", step), answer_noise(run, "train", step)
    if outside is None:
        return None
    if inside is not None:
        return outside.variance + inside.variance
    trained = train_accuracy(run, step)
    return None if trained is None else outside.variance + trained[0] * (1 - trained[0]) / trained[1]


def reliability(values: NDArray[np.floating], noise: NDArray[np.floating], groups: Sequence[Any]) -> float:
    """1 − (mean noise variance)/(variance within groups), at least 0: the share of the spread that is no sampling noise.

    Args:
        values, noise: (n,) a number per run and its sampling variance.
        groups: (n,) only runs of one group are compared; a group of one run says nothing.
    """
    frame = pd.DataFrame({"value": values, "group": [repr(group) for group in groups]})
    centered = frame["value"] - frame.groupby("group")["value"].transform("mean")
    freedom = len(frame) - frame["group"].nunique()
    total = float((centered**2).sum() / freedom) if freedom > 0 else 0.0
    return max(0.0, 1 - float(np.mean(noise)) / total) if total > 0 else 0.0


def log_steps(values: NDArray[np.floating]) -> NDArray[np.float64]:
    """Ln v_{t+1} − ln v_t of the positive, finite ones among `values` (T,), gaps skipped."""
    data = np.asarray(values, dtype=np.float64)
    good = np.isfinite(data) & (data > 0)
    logs = np.log(np.where(good, data, 1.0))
    both = good[1:] & good[:-1]
    return np.asarray((logs[1:] - logs[:-1])[both])


def unreliable(result: float, floor: float, values: NDArray[np.floating], noise: NDArray[np.floating]) -> str:
    """Why a gap of reliability `found` < `floor` cannot be predicted, and how many times as many answers would do."""
    sampled = float(np.mean(noise))
    total = sampled / (1 - result) if result > 0 else float(np.var(values, ddof=1))
    text = (
        f"the gap's reliability is {result:.2f}, below {floor:g}: its standard deviation over the runs compared is "
        f"{100 * total**0.5:.2g} points, that of sampling answers {100 * sampled**0.5:.2g} points"
    )
    if result <= 0:
        return text + "; evaluate more prompts and samples"
    more = sampled / (total - sampled) * floor / (1 - floor)
    return text + f"; {math.ceil(10 * more) / 10:g} times as many answers would do"
