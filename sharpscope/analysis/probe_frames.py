"""Frames of the loss surface that the figures draw: slices, and the preconditioned eigenvalue beside its threshold."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd

from sharpscope.analysis.frames import runs_of
from sharpscope.analysis.studies import Study
from sharpscope.traces.reader import Run

SLICE = "slice_"
PLACE = ["functional", "probe_set", "direction"]
MEASURES = ("sam", "asam")
"""Sharpness measures that are drawn along training, at the middle radius of their grid."""


def middle_radius(values: pd.DataFrame) -> pd.DataFrame:
    """Rows of sharpness measures at the middle radius of the grid, which claims read too; others as they are."""
    keep = ~values["quantity"].isin(MEASURES)
    for _, rows in values[~keep].groupby(["setting", "seed", "quantity"]):
        radii = np.sort(rows["rho"].dropna().unique())
        chosen = rows.index[np.isclose(rows["rho"], radii[(len(radii) - 1) // 2], rtol=1e-6)]
        keep.loc[chosen] = True
    return values[keep]


def slice_values(study: Study) -> pd.DataFrame:
    """setting, seed, step, functional, probe_set, direction, point, distance, value: L(θ + distance·direction) − L(θ).

    Of each run's last step with slices. `point` numbers the distances from the most negative: the same point of several
    seeds is drawn as one, since the length of a filter-normalised direction differs a little from run to run.
    """
    return _of_every_run(study, lambda run: slices_of(run.probes))


def slices_of(probes: pd.DataFrame) -> pd.DataFrame:
    """`slice_values` of one table of probes, without setting and seed."""
    rows = probes[probes["quantity"].str.startswith(SLICE) & probes["value"].notna()]
    rows = rows[rows["step"] == rows["step"].max()]
    rows = rows.assign(direction=rows["quantity"].str.removeprefix(SLICE), distance=rows["rho"].astype(float))
    rows = rows.sort_values([*PLACE, "distance"])
    rows = rows.assign(point=rows.groupby(PLACE).cumcount())
    centre = rows[rows["distance"] == 0].groupby(PLACE)["value"].first().rename("centre")
    joined = rows.merge(centre, on=PLACE)
    return joined.assign(value=joined["value"] - joined["centre"])[["step", *PLACE, "point", "distance", "value"]]


def stability_values(study: Study) -> pd.DataFrame:
    """setting, seed, step, functional, probe_set, value, threshold: the largest eigenvalue of the preconditioned Hessian.

    The threshold is AdamW's, (2 + 2β₁)/((1 − β₁)·lr) (Cohen et al., arXiv 2207.14484), with the step's learning rate; NaN
    where lr = 0. Gradient descent's is 2/lr.
    """
    return _of_every_run(study, _stability)


def _stability(run: Run) -> pd.DataFrame:
    probes = run.probes
    rows = probes[
        (probes["quantity"] == "preconditioned_largest")
        & probes["value"].notna()
        & ~probes["converged"].isin([False])
        & (probes["parameters"] == "all")
    ]
    beta = float((run.config.get("optimizer") or {}).get("beta1", 0.9))
    # Before the first step, the rate of the first.
    rates = run.steps.drop_duplicates("step").set_index("step")["lr"].astype(float).sort_index()
    lr = rates.reindex(rows["step"], method="nearest").to_numpy(dtype=float) if len(rates) else np.full(len(rows), 0.0)
    threshold = np.full(len(rows), np.nan)
    np.divide((2 + 2 * beta) / (1 - beta), lr, out=threshold, where=lr > 0)
    return rows[["step", "functional", "probe_set", "value"]].assign(threshold=threshold)


def _of_every_run(study: Study, frame_of: Callable[[Run], pd.DataFrame]) -> pd.DataFrame:
    pieces = [
        frame_of(run).assign(setting=label, seed=seed)  # type: ignore[arg-type]
        for label, seed, run in runs_of(study)
    ]
    pieces = [piece for piece in pieces if len(piece)]
    return pd.concat(pieces, ignore_index=True) if pieces else pd.DataFrame()
