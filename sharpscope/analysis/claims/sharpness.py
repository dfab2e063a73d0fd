"""C4 and C6: the treatment lowers sharpness, and sharpness predicts the generalization gap.

C4 compares sharpness per unit of 1 − loss; C6 is over a declared grid of settings and given the learning rate.

The rise of `expected_failure` cannot exceed the share of correct completions. Near that ceiling it is accuracy under another name:
saturated estimates enter no verdict.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import kendalltau

from sharpscope.analysis.claims import one_update
from sharpscope.analysis.claims.base import (
    ClaimData,
    Statistic,
    declared,
    is_shown,
    mean_estimate,
    paired,
)
from sharpscope.analysis.measures import (
    FUNCTIONAL,
    SMOOTHING,
    answer_noise,
    by_step,
    gap,
    last_evaluation,
    log_ratios,
    probe_rows,
    probe_sets,
    shared_sharpness,
    train_accuracy,
)
from sharpscope.analysis.study import GRID, Pair, Pairing, Study, grid_settings, most_common
from sharpscope.traces import MAX_SATURATION, Row, Run

MEASURES = {"sam": "SAM", "asam": "adaptive (ASAM)"}


def _same_reward(runs: Sequence[Run], curves: Sequence[pd.DataFrame]) -> list[int]:
    """The probed steps at which each of two runs first reached the highest reward that both reached; none without rewards."""
    rewards = [
        by_step(run)["reward_mean"]
        .rolling(SMOOTHING, min_periods=1)
        .mean()
        .reindex(curve.index)
        .dropna()
        for run, curve in zip(runs, curves, strict=True)
    ]
    if any(not len(reward) for reward in rewards):
        return []
    level = min(reward.max() for reward in rewards)
    return [int(reward.index[int(np.argmax(reward.to_numpy() >= level))]) for reward in rewards]


def compared(
    study: Study, pairs: Sequence[Pair], quantity: str, matched: str
) -> tuple[pd.DataFrame, float | None]:
    """(seed, and of both runs rise, per unit of 1 − loss, whether the ceiling is estimated), at the radius that all runs share.

    `matched`: both at the last `step` that both have, or at the same `reward`.
    """
    columns = [
        "seed",
        *(
            f"{n}_{side}"
            for side in ("baseline", "treatment")
            for n in ("rise", "unit", "estimated")
        ),
    ]
    runs = [study.finished[name] for pair in pairs for name in (pair.baseline, pair.treatment)]
    shared = shared_sharpness(runs, quantity, one_set=False) if pairs else None
    if shared is None:
        return pd.DataFrame(columns=columns), None
    radius, curves = shared
    rows = []
    for n, pair in enumerate(pairs):
        # the curves are in the order of `runs`: baseline and treatment of each pair
        both = curves[2 * n : 2 * n + 2]
        steps = [
            int(step) for step in both[0].index.intersection(both[1].index).sort_values()[-1:]
        ] * 2
        if matched == "reward":
            steps = _same_reward(runs[2 * n : 2 * n + 2], both)
        ends = [
            curve.loc[step, ["rise", "saturation", "estimated"]]
            for curve, step in zip(both, steps, strict=False)
        ]
        if ends:
            rows.append([pair.seed, *ends[0], *ends[1]])
    return pd.DataFrame(rows, columns=columns), radius


def ratios(frame: pd.DataFrame, what: str = "unit") -> pd.DataFrame:
    """Seed, baseline, treatment and their log ratio, of unsaturated pairs; `what`: unit or rise."""
    # near its ceiling sharpness is accuracy under another name; NaN, an unknown ceiling, does not fit either
    fit = (frame[["unit_baseline", "unit_treatment"]] <= MAX_SATURATION).all(axis=1)
    values = frame.rename(
        columns={f"{what}_baseline": "baseline", f"{what}_treatment": "treatment"}
    )
    return log_ratios(values.loc[fit | (what == "rise"), ["seed", "baseline", "treatment"]])


@paired
def less_sharp(study: Study, pairing: Pairing) -> ClaimData:
    """Log ratio of SAM sharpness per unit of 1 − loss at the last probed step of both."""
    sets = {name: probe_sets(study.finished[name]) for name in pairing.names}
    pairs = [
        pair
        for pair in pairing.pairs
        if sets[pair.baseline] and sets[pair.baseline] == sets[pair.treatment]
    ]
    frame, radius = compared(study, pairs, "sam", "step")
    if radius is None or not len(frame):
        return ClaimData(
            missing=f"no pair has sam sharpness of {FUNCTIONAL} at one step, radius, probe set and number of prompts"
        )
    main = ratios(frame)
    unit = C4.effect_unit
    rise = "SAM sharpness at matched step, the rise itself"
    others = [mean_estimate(rise, ratios(frame, "rise"), unit, "log")]
    conditions = []
    for measure, matched in (("sam", "reward"), ("asam", "step")):
        values = ratios(compared(study, pairs, measure, matched)[0])
        text = f"{MEASURES[measure]} sharpness at matched {matched}"
        others.append(mean_estimate(f"{text}, per unit of 1 − loss", values, unit, "log"))
        conditions.append(
            (f"{text} is not shown to be higher", not is_shown(study, values, "greater"))
        )
    units = frame[["unit_baseline", "unit_treatment"]].to_numpy(dtype=float)
    known = np.isfinite(units).any()
    most = (
        f"{np.nanmedian(units):.2f} of the largest possible rise" if known else "of unknown ceiling"
    )
    if frame.filter(like="estimated").any(axis=None):
        most += " (ceiling: training accuracy at that step)"
    notes = [f"radius {radius:g}, shared by all runs; sharpness is {most}"]
    for left_out, why in (
        (len(frame) - len(main), "are saturated or have no positive sharpness and are left out"),
        (len(pairing.pairs) - len(pairs), "were not probed, or not on one probe set"),
    ):
        if left_out:
            notes.append(f"{left_out} pairs {why}")
    limit = f"the limit is {MAX_SATURATION:g}; probe a smaller radius (probes.rho: auto)"
    missing = (
        "" if len(main) else f"sharpness at radius {radius:g} is saturated: {most}, and {limit}"
    )
    return ClaimData(
        {"": main},
        missing=missing,
        conditions=tuple(conditions),
        others=tuple(others),
        notes=tuple(notes),
    )


C4 = declared("C4", less_sharp, other=one_update.C4)

# -- C6

FLOOR = 0.5
"""Reliability of the gap below which no sharpness can predict it."""
LEAST_SHRINKAGE = 0.05
"""Share of the weights that decay must take off in a run for weight decay to be an axis of the grid."""
TAU = "Kendall τ"


def grid_frame(study: Study) -> pd.DataFrame:
    """One row a run of the grid: run, method, seed, its settings, gap, and the rise by each measure at one radius.

    Left out: runs that differ in anything else than the grid's settings, method and seed from the greatest such family; and a second
    run of one method, seed and setting.
    """
    runs = sorted(study.of(study.baseline, study.treatment).items())
    family = [study.setting_key(run, list(GRID.values())) for _, run in runs]
    # the grid is the largest family of runs that differ in nothing but its axes
    common = most_common(sorted(family)) if family else ""
    inside = {name: run for (name, run), key in zip(runs, family, strict=True) if key == common}
    measured = {
        name: run for name, run in inside.items() if all(len(probe_rows(run, q)) for q in MEASURES)
    }
    shared = (
        {q: shared_sharpness(list(measured.values()), q) for q in MEASURES}
        if measured
        else {"": None}
    )
    if None in shared.values():
        return pd.DataFrame()
    curves = {
        q: dict(zip(measured, found[1], strict=True))
        for q, found in shared.items()
        if found is not None
    }
    rows: list[Row] = []
    for name, run in measured.items():
        step = last_evaluation(run)
        if step is None or (value := gap(run, step)) is None:
            continue
        row = {
            "run": name,
            "step": step,
            "method": run.method,
            "seed": run.seed,
            **grid_settings(run),
            "gap": value,
        }
        for q, of_run in curves.items():  # of the steps probed, the one nearest to the evaluation
            rises = of_run[name]["rise"]
            row[q] = float(rises.iloc[int(np.argmin(np.abs(rises.index.to_numpy() - step)))])
        rows.append(row)
    frame = pd.DataFrame(rows)
    return frame.drop_duplicates(
        [c for c in ("method", "seed", *GRID) if c in frame] or None, ignore_index=True
    )


def agreement(
    frame: pd.DataFrame, quantity: str, axes: Sequence[str], stratum: Sequence[str]
) -> pd.DataFrame:
    """Kendall's τ of a quantity and the gap in each stratum, over pairs of runs that differ in one axis alone, as `difference`.

    The granulated coefficient (Jiang et al. 2020): τ is averaged over groups of runs that differ in one axis, then over axes, so that
    settings which move both count for nothing. Also a column for each axis, and the number of pairs.
    """
    rows: list[Row] = []
    for _, runs in frame.groupby(list(stratum), sort=True):
        row: dict[str, Any] = {"seed": runs["seed"].iloc[0], "pairs": 0}
        for axis in axes:
            others = [other for other in axes if other != axis]
            groups = [group for _, group in runs.groupby(others)] if others else [runs]
            taus = []
            for group in groups:
                values = group[[axis, quantity, "gap"]].to_numpy(dtype=float)
                pairs = [b - a for a, b in itertools.combinations(values, 2) if a[0] != b[0]]
                row["pairs"] += len(pairs)
                if pairs:
                    taus.append(np.mean(np.sign(pairs)[:, 1] * np.sign(pairs)[:, 2]))
            if taus:
                row |= {axis: np.mean(taus)}
        known = [row[axis] for axis in axes if axis in row]
        if known:
            rows.append(row | {"difference": np.mean(known)})
    return pd.DataFrame(rows, columns=["seed", "pairs", *axes, "difference"])


def gap_noise(run: Run, step: int) -> float | None:
    """Variance of the generalization gap from sampling answers: held-out answers plus training answers; None without either.

    Where the split `train` was not evaluated, the training rollouts are taken as independent answers, which gives an upper bound.
    """
    outside = answer_noise(run, "heldout", step)
    inside = answer_noise(run, "train", step)
    if inside is None:
        trained = train_accuracy(run, step)
        inside = None if trained is None else trained[0] * (1 - trained[0]) / trained[1]
    return None if outside is None or inside is None else outside + inside


def reliability(frame: pd.DataFrame, strata: Sequence[str], noise: float) -> float:
    """1 − noise/(variance of the gap within strata), at least 0: the share of the spread that is no sampling noise.

    `noise`: mean variance of the runs' gaps from sampling answers. A stratum of one run says nothing.
    """
    groups = frame.groupby(list(strata))["gap"]
    freedom = len(frame) - groups.ngroups
    total = (
        float(((frame["gap"] - groups.transform("mean")) ** 2).sum() / freedom)
        if freedom > 0
        else 0.0
    )
    return max(0.0, 1 - noise / total) if total > 0 else 0.0


def _unreliable(result: float, gaps: pd.Series, noise: float) -> str:
    """Why a gap of reliability `result` < FLOOR cannot be predicted, and how many times as many answers would do."""
    total = noise / (1 - result) if result > 0 else float(np.var(gaps.to_numpy(), ddof=1))
    spread, sampling = (f"{100 * math.sqrt(variance):.2g} points" for variance in (total, noise))
    more = math.ceil(10 * noise / (total - noise) * FLOOR / (1 - FLOOR)) / 10 if result > 0 else 0.0
    advice = (
        f"{more:g} times as many answers would do" if more else "evaluate more prompts and samples"
    )
    text = f"the gap's reliability is {result:.2f}, below {FLOOR:g}: its standard deviation over the runs compared is"
    return f"{text} {spread}, that of sampling answers {sampling}; {advice}"


def prediction(study: Study) -> ClaimData:
    """τ of adaptive sharpness and gap over group size and weight decay, at fixed learning rate, method and seed."""
    frame = grid_frame(study)
    if not len(frame):
        why = f"no run has a gap and sam and asam sharpness of {FUNCTIONAL}, at a radius and on a probe set that all share"
        return ClaimData(missing=why)
    varied = [axis for axis in GRID if axis in frame and frame[axis].nunique() > 1]
    axes = [axis for axis in varied if axis != "learning rate"]
    why = ""
    runs = [study.finished[name] for name in frame["run"]]
    rates = (
        grid_settings(run).get("weight decay", 0.0) * (run.steps["lr"] * run.steps["updates"]).sum()
        for run in runs
    )
    shrunk = 1 - math.exp(-float(max(rates)))  # by AdamW's decay over a run, 1 − Π(1 − lr·decay)
    if "weight decay" in axes and shrunk < LEAST_SHRINKAGE:
        axes.remove("weight decay")
        why = f"; weight decay takes off at most {shrunk:.1%} of a weight, too little for an axis"
    if not axes:
        vary = f"the runs vary {', '.join(varied) or 'no setting'}{why}"
        return ClaimData(
            missing=f"no grid: {vary}; group size or weight decay must vary at a fixed learning rate"
        )
    # within a stratum the runs differ in the axes alone
    strata = ["method", "seed", *(name for name in varied if name not in axes)]
    # Runs that no other run can be compared with (more seeds of one setting, other learning rates) are not in the grid.
    frame = frame[frame.groupby(strata)["run"].transform("size") > 1].reset_index(drop=True)
    main, plain = (agreement(frame, quantity, axes, strata) for quantity in ("asam", "sam"))
    if not len(main):
        return ClaimData(missing="no two runs of the grid differ in one setting alone")
    each = [
        gap_noise(study.finished[name], int(step))
        for name, step in zip(frame["run"], frame["step"], strict=True)
    ]
    if None in each:
        why = "the sampling noise of the gap is not known, so neither is its reliability: no training answers to count"
        return ClaimData(missing=why)
    # a gap that is mostly sampling noise can be predicted by nothing: no verdict about sharpness follows
    noise = float(np.mean(np.array(each, float)))
    reliable = reliability(frame, strata, noise)
    if reliable < FLOOR:
        return ClaimData(missing=_unreliable(reliable, frame["gap"], noise) + why)
    whole = float(kendalltau(frame["asam"], frame["gap"]).statistic)
    return ClaimData(
        parts={"": main},
        conditions=tuple(
            (f"{TAU} over {axis} alone is not negative", bool(main[axis].mean() >= 0))
            for axis in axes
        ),
        others=(
            mean_estimate(f"{TAU} of sam and gap", plain, TAU),
            *(mean_estimate(f"{TAU} over {axis} alone", main[axis].dropna(), TAU) for axis in axes),
            Statistic(
                "plain Kendall τ over all runs",
                whole,
                TAU,
                n=len(frame),
                note="includes any common cause",
            ),
            Statistic("reliability of the gap within strata", reliable, "1"),
        ),
        notes=(
            f"{main['pairs'].sum()} compared pairs of {len(frame)} runs; axes: {', '.join(axes)}{why}",
        ),
    )


C6 = declared("C6", prediction)
