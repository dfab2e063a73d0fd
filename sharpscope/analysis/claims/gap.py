"""C6: sharpness predicts the generalization gap, over a declared grid of settings and given the learning rate."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.stats import kendalltau

from sharpscope.analysis.claims.base import ClaimData, Statistic, declared, mean_estimate
from sharpscope.analysis.measures import (
    FUNCTIONAL,
    answer_noise,
    gap,
    last_evaluation,
    probe_rows,
    shared_sharpness,
    train_accuracy,
)
from sharpscope.analysis.study import GRID, Study, grid_settings, most_common

if TYPE_CHECKING:
    from sharpscope.traces import Run

HELD = "learning rate"
FLOOR = 0.5
"""Reliability of the gap below which no sharpness can predict it."""
LEAST_SHRINKAGE = 0.05
"""Share of the weights that decay must take off in a run for weight decay to be an axis of the grid."""
MEASURES = ("sam", "asam")
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
    rows: list[dict[str, Any]] = []
    for key, (name, run) in enumerate(measured.items()):
        step = last_evaluation(run)
        value = None if step is None else gap(run, step)
        if step is None or value is None or None in curves.values():
            continue
        row = {"run": name, "step": step, "method": run.method, "seed": run.seed, **grid_settings(run), "gap": value}
        for q, shared in curves.items():
            assert shared is not None
            curve = shared[1][key]["rise"]  # of the steps probed, the one nearest to the evaluation
            row[q] = float(curve.iloc[int(np.argmin(np.abs(curve.index.to_numpy() - step)))])
        rows.append(row)
    frame = pd.DataFrame(rows)
    return (
        frame.drop_duplicates(["method", "seed", *(a for a in GRID if a in frame)], ignore_index=True)
        if rows
        else frame
    )


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


def measure(study: Study) -> ClaimData:
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
        names = ", ".join(varied) or "no setting"
        missing = f"no grid: the runs vary {names}{why}; group size or weight decay must vary at a fixed learning rate"
        return ClaimData(missing=missing)
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


C6 = declared("C6", measure)
