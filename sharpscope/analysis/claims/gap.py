"""C6: sharpness predicts the generalization gap, over a declared grid of settings and given the learning rate."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from sharpscope.analysis.claims.base import Claim, Estimate, Evidence, Finding, unfinished
from sharpscope.analysis.measures import (
    FUNCTIONAL,
    UNKNOWN_NOISE,
    gap,
    gap_noise,
    last_step,
    probe_rows,
    reliability,
    shared_sharpness,
    unreliable,
)
from sharpscope.analysis.statistics import (
    contrast_interval,
    granulated_kendall,
    kendall,
    sign_flip_p,
    smallest_sign_flip_p,
)
from sharpscope.analysis.statistics.permutation import Granulated
from sharpscope.analysis.study import GRID, Study, grid_settings, most_common

if TYPE_CHECKING:
    from sharpscope.traces import Run

HELD = "learning rate"
FLOOR = 0.5
"""Reliability of the gap below which no sharpness can predict it."""
LEAST_SHRINKAGE = 0.05
"""Share of the weights that decay must take off in a run for weight decay to be an axis of the grid."""
MEASURES = ("sam", "asam")


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
        step = last_step(run)
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


def granulated(frame: pd.DataFrame, quantity: str, axes: list[str], held: list[str]) -> Granulated | None:
    """Granulated Kendall coefficient of sharpness and gap over `axes`, runs compared within equal `held` only."""
    return granulated_kendall(
        frame[quantity].to_numpy(),
        frame["gap"].to_numpy(),
        {axis: frame[axis].tolist() for axis in axes},
        list(frame[["method", "seed", *held]].itertuples(index=False, name=None)),
    )


def measure(study: Study) -> Finding:
    """Ψ of adaptive sharpness and gap over group size and weight decay, at fixed learning rate, method and seed."""
    frame = grid_frame(study)
    if not len(frame):
        why = f"no run has a gap and sam and asam sharpness of {FUNCTIONAL}, at a radius and on a probe set that all share"
        return Finding(missing=why)
    varied = [axis for axis in GRID if axis in frame and frame[axis].nunique() > 1]
    axes, why = [axis for axis in varied if axis != HELD], ""
    shrunk = max((shrinkage(study.finished[name]) for name in frame["run"]), default=0.0)
    if "weight decay" in axes and shrunk < LEAST_SHRINKAGE:
        axes.remove("weight decay")
        why = f"; weight decay takes off at most {shrunk:.1%} of a weight, too little for an axis"
    if not axes:
        names = ", ".join(varied) or "no setting"
        missing = f"no grid: the runs vary {names}{why}; group size or weight decay must vary at a fixed learning rate"
        return Finding(missing=missing)
    held = [name for name in varied if name not in axes]
    # Runs that no other run can be compared with (more seeds of one setting, other learning rates) are not in the grid.
    alone = frame.groupby(["method", "seed", *held])["run"].transform("size") == 1
    frame = frame[~alone].reset_index(drop=True)
    main, plain = granulated(frame, "asam", axes, held), granulated(frame, "sam", axes, held)
    if main is None or plain is None:
        return Finding(missing="no two runs of the grid differ in one setting alone")
    noise = [gap_noise(study.finished[row["run"]], int(row["step"])) for _, row in frame.iterrows()]
    if any(value is None for value in noise):
        return Finding(missing=UNKNOWN_NOISE, frames={"grid": frame})
    known, gaps = np.array(noise, dtype=float), frame["gap"].to_numpy()
    reliable = reliability(gaps, known, list(frame[["method", "seed", *held]].itertuples(index=False, name=None)))
    if reliable < FLOOR:
        return Finding(missing=unreliable(reliable, FLOOR, gaps, known) + why, frames={"grid": frame})
    whole = kendall(frame["asam"].to_numpy(), gaps)
    smallest = smallest_sign_flip_p(len(main.strata), "less")
    refuted = sign_flip_p(main.strata, "less", shift=study.terms.margin(C6.key, C6.margin))
    return Finding(
        effect=_estimate("Ψ of adaptive sharpness and gap", main, ""),
        n=len(frame),
        evidence=(Evidence(main.p_value, main.value > 0, refuted, main.smallest_p, smallest),),
        conditions=tuple((f"τ over {a} alone is not negative", v >= 0) for a, v in main.axes.items()),
        others=(
            _estimate("Ψ of sam", plain, "given the learning rate"),
            *(Estimate(f"τ over {axis} alone", value, "Kendall τ") for axis, value in main.axes.items()),
            Estimate(
                "plain Kendall τ over all runs", whole, "Kendall τ", n=len(frame), note="includes any common cause"
            ),
            Estimate("reliability of the gap within strata", reliable, "1"),
        ),
        notes=(
            f"{main.pairs} compared pairs in {len(main.strata)} strata; axes: {', '.join(axes)}{why}",
            *unfinished(study),
        ),
        frames={"grid": frame},
    )


def _estimate(name: str, result: Granulated, note: str) -> Estimate:
    interval = contrast_interval(result.strata)
    return Estimate(name, result.value, "granulated Kendall τ", interval, result.p_value, result.pairs, note)


C6 = Claim(
    name="C6",
    title="sharpness predicts the generalization gap",
    source="flat minima; tested after arXiv 1912.02178",
    rule="supported: the granulated Kendall coefficient of adaptive sharpness and gap at fixed learning rate is above 0 "
    "(permutation of the gap within learning rate, method and seed) and no axis alone is negative; refuted: it is "
    f"shown to be below {{margin}} (sign-flip test over strata); untestable where the gap's reliability is below {FLOOR:g}",
    measure=measure,
    margin=0.2,
    unit="runs of the grid",
    minimal_n=8,
    figures=(("scatter", "grid", "asam", "gap", "gap against adaptive sharpness"),),
)
