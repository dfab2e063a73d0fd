"""C4 and C6: the treatment lowers sharpness, and sharpness predicts the generalization gap.

C4 compares sharpness per unit of 1 − loss; C6 is over a declared grid of settings and given the learning rate.

The rise of `expected_failure` cannot exceed the share of correct completions. Near that ceiling it is accuracy under another name:
saturated estimates enter no verdict.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.stats import kendalltau

from sharpscope.analysis.claims import one_update
from sharpscope.analysis.claims.base import ClaimData, Statistic, declared, mean_estimate, pairing_notes
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
from sharpscope.analysis.statistics import sign_flip_p
from sharpscope.analysis.study import GRID, Pair, Study, grid_settings, most_common
from sharpscope.traces import MAX_SATURATION, Run

MEASURES = {"sam": "SAM", "asam": "adaptive (ASAM)"}
UNIT = "ln(treatment / baseline)"
Matching = Callable[["Run", "Run", pd.DataFrame, pd.DataFrame], tuple[int, int] | None]


def _same_step(first: Run, second: Run, a: pd.DataFrame, b: pd.DataFrame) -> tuple[int, int] | None:
    shared = a.index.intersection(b.index)
    return (int(shared.max()), int(shared.max())) if len(shared) else None


def _same_reward(first: Run, second: Run, a: pd.DataFrame, b: pd.DataFrame) -> tuple[int, int] | None:
    """The probed steps at which each run first reached the highest reward that both reached."""
    rewards = [
        by_step(run)["reward_mean"].rolling(SMOOTHING, min_periods=1).mean().reindex(curve.index).dropna()
        for run, curve in ((first, a), (second, b))
    ]
    if any(not len(reward) for reward in rewards):
        return None
    level = min(reward.max() for reward in rewards)
    steps = [int(reward.index[int(np.argmax(reward.to_numpy() >= level))]) for reward in rewards]
    return steps[0], steps[1]


MATCHED: dict[str, Matching] = {"step": _same_step, "reward": _same_reward}


def compared(study: Study, pairs: list[Pair], quantity: str, matching: Matching) -> tuple[pd.DataFrame, float | None]:
    """(seed, and of both runs rise, per unit of 1 − loss, whether the ceiling is estimated), at the radius that all runs share."""
    both = itertools.product(("baseline", "treatment"), ("rise", "unit", "estimated"))
    columns = ["seed", *(f"{name}_{which}" for which, name in both)]
    names = [name for pair in pairs for name in (pair.baseline, pair.treatment)]
    shared = shared_sharpness([study.finished[name] for name in names], quantity, one_set=False) if pairs else None
    if shared is None:
        return pd.DataFrame(columns=columns), None
    radius, found = shared
    curves, rows = dict(zip(names, found, strict=True)), []
    for pair in pairs:
        a, b = curves[pair.baseline], curves[pair.treatment]
        steps = matching(study.finished[pair.baseline], study.finished[pair.treatment], a, b)
        if steps is not None:
            ends = [curve.loc[step] for curve, step in zip((a, b), steps, strict=True)]
            rows.append([pair.seed, *(end[name] for end in ends for name in ("rise", "saturation", "estimated"))])
    return pd.DataFrame(rows, columns=columns), radius


def ratios(frame: pd.DataFrame, what: str = "unit") -> pd.DataFrame:
    """Seed, baseline, treatment and their log ratio, of unsaturated pairs; `what`: unit or rise."""
    fit = (frame[["unit_baseline", "unit_treatment"]] <= MAX_SATURATION).all(axis=1)
    values = frame.rename(columns={f"{what}_baseline": "baseline", f"{what}_treatment": "treatment"})
    return log_ratios(values.loc[fit | (what == "rise"), ["seed", "baseline", "treatment"]])


def measure(study: Study) -> ClaimData:
    """Log ratio of SAM sharpness per unit of 1 − loss at the last probed step of both."""
    pairing = study.pairing()
    if pairing.missing:
        return ClaimData(missing=pairing.missing)
    found = study.finished
    sets = {name: probe_sets(found[name]) for pair in pairing.pairs for name in (pair.baseline, pair.treatment)}
    pairs = [pair for pair in pairing.pairs if sets[pair.baseline] and sets[pair.baseline] == sets[pair.treatment]]
    frames = {(q, name): compared(study, pairs, q, matching) for q in MEASURES for name, matching in MATCHED.items()}
    frame, radius = frames["sam", "step"]
    if radius is None or not len(frame):
        return ClaimData(missing=f"no pair has sam sharpness of {FUNCTIONAL} at one step, radius and probe set")
    main = ratios(frame)
    others, conditions = [], []
    for (q, name), (rows, _) in frames.items():
        text = f"{MEASURES[q]} sharpness at matched {name}"
        tested = ratios(rows)
        if (q, name) != ("sam", "step"):
            others.append(mean_estimate(f"{text}, per unit of 1 − loss", tested, UNIT, "", "log"))
        if (q, name) in (("asam", "step"), ("sam", "reward")):
            higher = len(tested) and sign_flip_p(tested["difference"].to_numpy(), "greater") <= study.terms.level
            conditions.append((f"{text} is not shown to be higher", not higher))
        if name == "step":
            others.append(mean_estimate(f"{text}, the rise itself", ratios(rows, "rise"), UNIT, "", "log"))
    units = frame[["unit_baseline", "unit_treatment"]].to_numpy(dtype=float)
    known = np.isfinite(units).any()
    most = f"{np.nanmedian(units):.2f} of the largest possible rise" if known else "of unknown ceiling"
    estimated = " (ceiling: training accuracy at that step)" if frame.filter(like="estimated").any(axis=None) else ""
    left_out = len(frame) - len(main)
    notes = [f"radius {radius:g}, shared by all runs; sharpness is {most}{estimated}"]
    if left_out:
        notes.append(f"{left_out} of {len(frame)} pairs are saturated or have no positive sharpness and are left out")
    why = f"sharpness at radius {radius:g} is saturated: {most}{estimated}, and the limit is {MAX_SATURATION:g}; probe a smaller"
    missing = "" if len(main) else f"{why} radius (probes.rho: auto)"
    if len(pairs) < len(pairing.pairs):
        notes.append(f"{len(pairing.pairs) - len(pairs)} pairs were not probed, or not on one probe set")
    return ClaimData(
        parts={"": main},
        missing=missing,
        conditions=tuple(conditions),
        others=tuple(others),
        notes=(*notes, *pairing_notes(study, pairing)),
    )


C4 = declared("C4", measure, other=one_update.C4)

# -- C6

HELD = "learning rate"
FLOOR = 0.5
"""Reliability of the gap below which no sharpness can predict it."""
LEAST_SHRINKAGE = 0.05
"""Share of the weights that decay must take off in a run for weight decay to be an axis of the grid."""
TAU = "Kendall τ"


def grid_frame(study: Study) -> pd.DataFrame:
    """One row a run of the grid: run, method, seed, its settings, gap, and the rise by each measure at one radius.

    Left out: runs that differ in anything else than the grid's settings, method and seed from the greatest such family;
    and a second run of one method, seed and setting, which would count a comparison twice.
    """
    keys = list(GRID.values())
    runs = study.of(study.baseline, study.treatment)
    family = {name: study.setting_key(run, keys) for name, run in runs.items()}
    if not family:
        return pd.DataFrame()
    common = most_common(sorted(family.values()))
    inside = {name: run for name, run in sorted(runs.items()) if family[name] == common}
    measured = {name: run for name, run in inside.items() if all(len(probe_rows(run, q)) for q in MEASURES)}
    curves = {q: shared_sharpness(list(measured.values()), q) for q in MEASURES} if measured else {}
    found = {q: shared[1] for q, shared in curves.items() if shared is not None}
    rows: list[dict[str, Any]] = []
    for key, (name, run) in enumerate(measured.items()):
        step = last_evaluation(run)
        value = None if step is None else gap(run, step)
        if step is None or value is None or len(found) < len(MEASURES):
            continue
        row = {"run": name, "step": step, "method": run.method, "seed": run.seed, **grid_settings(run), "gap": value}
        for q, each in found.items():  # of the steps probed, the one nearest to the evaluation
            row[q] = float(each[key]["rise"].iloc[int(np.argmin(np.abs(each[key].index.to_numpy() - step)))])
        rows.append(row)
    frame = pd.DataFrame(rows)
    same = [name for name in ("method", "seed", *GRID) if name in frame]
    return frame.drop_duplicates(same, ignore_index=True) if rows else frame


def shrinkage(run: Run) -> float:
    """Share of a weight that AdamW's decay takes off over the run, 1 − Π(1 − lr·decay)."""
    decay = grid_settings(run).get("weight decay", 0.0)
    return 1 - math.exp(-float((run.steps["lr"] * run.steps["updates"]).sum()) * decay)


def agreement(frame: pd.DataFrame, quantity: str, axes: Sequence[str], stratum: Sequence[str]) -> pd.DataFrame:
    """Kendall's τ of a quantity and the gap in each stratum, over pairs of runs that differ in one axis alone, as `difference`.

    The granulated coefficient (Jiang et al. 2020): τ is averaged over groups of runs that differ in one axis, then over axes, so that
    settings which move both count for nothing. Also a column for each axis, and the number of pairs.
    """
    rows: list[dict[str, Any]] = []
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
                taus += [np.mean(np.sign(pairs)[:, 1] * np.sign(pairs)[:, 2])] if pairs else []
            row |= {axis: float(np.mean(taus))} if taus else {}
        known = [row[axis] for axis in axes if axis in row]
        rows += [row | {"difference": float(np.mean(known))}] if known else []
    return pd.DataFrame(rows, columns=["seed", "pairs", *axes, "difference"])


def gap_noise(run: Run, step: int) -> float | None:
    """Variance of the generalization gap from sampling answers: held-out answers plus training answers; None without either.

    Where the split `train` was not evaluated, the training rollouts are taken as independent answers, which gives an upper bound.
    """
    outside, inside = answer_noise(run, "heldout", step), answer_noise(run, "train", step)
    if inside is None:
        trained = train_accuracy(run, step)
        inside = None if trained is None else trained[0] * (1 - trained[0]) / trained[1]
    return None if outside is None or inside is None else outside + inside


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


def _unreliable(result: float, values: NDArray[np.floating], noise: NDArray[np.floating]) -> str:
    """Why a gap of reliability `result` < FLOOR cannot be predicted, and how many times as many answers would do."""
    sampled = float(np.mean(noise))
    total = sampled / (1 - result) if result > 0 else float(np.var(values, ddof=1))
    text = (
        f"the gap's reliability is {result:.2f}, below {FLOOR:g}: its standard deviation over the runs compared is "
        f"{100 * total**0.5:.2g} points, that of sampling answers {100 * sampled**0.5:.2g} points"
    )
    if result <= 0:
        return text + "; evaluate more prompts and samples"
    more = sampled / (total - sampled) * FLOOR / (1 - FLOOR)
    return text + f"; {math.ceil(10 * more) / 10:g} times as many answers would do"


def prediction(study: Study) -> ClaimData:
    """τ of adaptive sharpness and gap over group size and weight decay, at fixed learning rate, method and seed."""
    frame = grid_frame(study)
    if not len(frame):
        why = f"no run has a gap and sam and asam sharpness of {FUNCTIONAL}, at a radius and on a probe set that all share"
        return ClaimData(missing=why)
    varied = [axis for axis in GRID if axis in frame and frame[axis].nunique() > 1]
    axes, why = [axis for axis in varied if axis != HELD], ""
    shrunk = max((shrinkage(study.finished[name]) for name in frame["run"]), default=0.0)
    if "weight decay" in axes and shrunk < LEAST_SHRINKAGE:
        axes.remove("weight decay")
        why = f"; weight decay takes off at most {shrunk:.1%} of a weight, too little for an axis"
    if not axes:
        named = f"{', '.join(varied) or 'no setting'}{why}"
        return ClaimData(
            missing=f"no grid: the runs vary {named}; group size or weight decay must vary at a fixed learning rate"
        )
    stratum = ["method", "seed", *(name for name in varied if name not in axes)]
    # Runs that no other run can be compared with (more seeds of one setting, other learning rates) are not in the grid.
    frame = frame[frame.groupby(stratum)["run"].transform("size") > 1].reset_index(drop=True)
    main, plain = (agreement(frame, quantity, axes, stratum) for quantity in ("asam", "sam"))
    if not len(main):
        return ClaimData(missing="no two runs of the grid differ in one setting alone")
    noise = [gap_noise(study.finished[row["run"]], int(row["step"])) for _, row in frame.iterrows()]
    if any(value is None for value in noise):
        why = "the sampling noise of the gap is not known, so neither is its reliability: no training answers to count"
        return ClaimData(missing=why)
    known, gaps = np.array(noise, dtype=float), frame["gap"].to_numpy()
    reliable = reliability(gaps, known, list(frame[stratum].itertuples(index=False, name=None)))
    if reliable < FLOOR:
        return ClaimData(missing=_unreliable(reliable, gaps, known) + why)
    whole = float(kendalltau(frame["asam"], gaps).statistic)
    common = "includes any common cause"
    return ClaimData(
        parts={"": main},
        conditions=tuple((f"{TAU} over {axis} alone is not negative", bool(main[axis].mean() >= 0)) for axis in axes),
        others=(
            mean_estimate(f"{TAU} of sam and gap", plain, TAU),
            *(mean_estimate(f"{TAU} over {axis} alone", main[axis].dropna(), TAU) for axis in axes),
            Statistic("plain Kendall τ over all runs", whole, TAU, n=len(frame), note=common),
            Statistic("reliability of the gap within strata", reliable, "1"),
        ),
        notes=(f"{main['pairs'].sum()} compared pairs of {len(frame)} runs; axes: {', '.join(axes)}{why}",),
    )


C6 = declared("C6", prediction)
