"""From a study's runs to the small frames that figures draw. A frame of values has a row for each seed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from sharpscope.analysis.study import Study
from sharpscope.traces import Run

KEYS = ["setting", "seed"]
SLICE = "slice_"
PLACE = ["functional", "probe_set", "direction"]
MEASURES = ("sam", "asam")
"""Sharpness measures that are drawn along training, at the middle radius of their grid."""


def step_values(study: Study, columns: Sequence[str]) -> pd.DataFrame:
    """setting, seed, step, quantity, value of the `steps` columns; steps that every seed of the setting has.

    A value that is null or not a number in every step of every run is left out: it was not recorded.
    """
    pieces = []
    for setting in study.settings:
        common = _common([run.steps["step"] for run in setting.runs.values()])
        for seed, run in setting.runs.items():
            steps = run.steps[run.steps["step"].isin(common)].sort_values("step")
            for column in [name for name in columns if name in steps]:
                values = pd.to_numeric(steps[column], errors="coerce").to_numpy(dtype=float)
                pieces.append(
                    pd.DataFrame(
                        {
                            "setting": setting.label,
                            "seed": seed,
                            "step": steps["step"].to_numpy(),
                            "quantity": column,
                            "value": values,
                        }
                    )
                )
    return _recorded(_join(pieces, [*KEYS, "step", "quantity", "value"]), ["quantity"])


def eval_values(study: Study, column: str = "accuracy") -> pd.DataFrame:
    """setting, seed, step, split, level, temperature, value of an `eval` column; evaluations that every seed has.

    Level "all" is the split's pooled value, weighted by completions; it is computed if the trace has none.
    """
    pieces = []
    for setting in study.settings:
        each = {seed: with_pooled(run.eval[run.eval["task"] == run.task], column) for seed, run in setting.runs.items()}
        cell = ["step", "split", "level", "temperature"]
        common = _common([pd.Series(list(map(tuple, frame[cell].to_numpy().tolist()))) for frame in each.values()])
        for seed, frame in each.items():
            kept = frame[_in(frame[cell], common)]
            pieces.append(kept.assign(setting=setting.label, seed=seed)[[*KEYS, *cell, "value"]])
    return _recorded(_join(pieces, [*KEYS, "step", "split", "level", "temperature", "value"]), ["split", "level"])


def with_pooled(rows: pd.DataFrame, column: str) -> pd.DataFrame:
    """Rows of `eval` with `column` as `value`, one row a place (the last written), and a level "all" for each split."""
    cell = ["step", "split", "level", "temperature"]
    frame = rows.drop_duplicates(cell, keep="last")
    value = pd.to_numeric(frame[column], errors="coerce").astype(float)
    frame = frame.assign(value=value, weight=frame["n"] * frame["k"])[[*cell, "value", "weight"]]
    parts = frame[frame["level"] != "all"]
    pooled = [
        (step, split, "all", temperature, float(np.average(g["value"], weights=g["weight"])), g["weight"].sum())
        for (step, split, temperature), g in parts.groupby(["step", "split", "temperature"])
    ]
    made = pd.DataFrame(pooled, columns=[*cell, "value", "weight"])
    there = set(map(tuple, frame.loc[frame["level"] == "all", ["step", "split", "temperature"]].to_numpy().tolist()))
    made = made[~_in(made[["step", "split", "temperature"]], there)]
    return pd.concat([frame, made], ignore_index=True) if len(made) else frame.reset_index(drop=True)


def probe_values(study: Study, quantities: Sequence[str]) -> tuple[pd.DataFrame, int]:
    """setting, seed, step, quantity, functional, probe_set, parameters, rho, value; how many rows had not converged.

    Estimates that did not converge, or have no value, are left out. Several rows of one place (other seeds of the
    estimate) are averaged.
    """
    cell = ["step", "quantity", "functional", "probe_set", "parameters", "rho"]
    pieces, unconverged = [], 0
    for setting in study.settings:
        for seed, run in setting.runs.items():
            rows = run.probes[run.probes["quantity"].isin(list(quantities))]
            bad = rows["converged"].isin([False])
            unconverged += int(bad.sum())
            good = rows[~bad & rows["value"].notna()]
            means = good.groupby(cell, dropna=False, as_index=False)["value"].mean()
            pieces.append(means.assign(setting=setting.label, seed=seed))
    return _join(pieces, [*KEYS, *cell, "value"])[[*KEYS, *cell, "value"]], unconverged


def density_nodes(study: Study) -> pd.DataFrame:
    """setting, seed, step, functional, probe_set, node, weight of spectral densities, at each run's last such step."""
    pieces = []
    for setting in study.settings:
        for seed, run in setting.runs.items():
            rows = run.probes[(run.probes["quantity"] == "density") & (run.probes["parameters"] == "all")]
            if rows.empty:
                continue
            rows = rows[rows["step"] == rows["step"].max()]
            renamed = rows.rename(columns={"rho": "node", "value": "weight"})
            pieces.append(renamed.assign(setting=setting.label, seed=seed))
    columns = [*KEYS, "step", "functional", "probe_set", "node", "weight"]
    return _join(pieces, columns)[columns]


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
    seeds is drawn as one, since the length of a filter-normalized direction differs a little from run to run.
    """
    return _of_every_run(study, lambda run: slices_of(run.probes))


def slices_of(probes: pd.DataFrame) -> pd.DataFrame:
    """`slice_values` of one table of probes, without setting and seed."""
    rows = probes[probes["quantity"].str.startswith(SLICE) & probes["value"].notna()]
    rows = rows[rows["step"] == rows["step"].max()]
    rows = rows.assign(direction=rows["quantity"].str.removeprefix(SLICE), distance=rows["rho"].astype(float))
    rows = rows.sort_values([*PLACE, "distance"])
    rows = rows.assign(point=rows.groupby(PLACE).cumcount())
    center = rows[rows["distance"] == 0].groupby(PLACE)["value"].first().rename("center")
    joined = rows.merge(center, on=PLACE)
    return joined.assign(value=joined["value"] - joined["center"])[["step", *PLACE, "point", "distance", "value"]]


def stability_values(study: Study) -> pd.DataFrame:
    """setting, seed, step, quantity, functional, probe_set, value, threshold: sharpness as the optimizer sees it.

    Quantities: `preconditioned_largest`, the largest eigenvalue of the preconditioned Hessian, with AdamW's threshold
    (2 + 2β₁)/((1 − β₁)·lr) (Cohen et al., arXiv 2207.14484); `critical_sharpness`, 2/η_c along the optimizer's update,
    with 2/lr (arXiv 2601.16979). lr is the step's learning rate; the threshold is NaN where it is 0.
    """
    return _of_every_run(study, _stability)


def _stability(run: Run) -> pd.DataFrame:
    probes = run.probes
    good = probes["value"].notna() & ~probes["converged"].isin([False]) & (probes["parameters"] == "all")
    rows = probes[probes["quantity"].isin(["preconditioned_largest", "critical_sharpness"]) & good]
    beta = float((run.config.get("optimizer") or {}).get("beta1", 0.9))
    # Before the first step, the rate of the first.
    rates = run.steps.drop_duplicates("step").set_index("step")["lr"].astype(float).sort_index()
    lr = rates.reindex(rows["step"], method="nearest").to_numpy(dtype=float) if len(rates) else np.full(len(rows), 0.0)
    factor = np.where(rows["quantity"] == "critical_sharpness", 2.0, (2 + 2 * beta) / (1 - beta))
    threshold = np.full(len(rows), np.nan)
    np.divide(factor, lr, out=threshold, where=lr > 0)
    rows = rows.fillna({"functional": "", "probe_set": ""})  # an update has no probe set
    return rows[["step", "quantity", "functional", "probe_set", "value"]].assign(threshold=threshold)


def _of_every_run(study: Study, frame_of: Callable[[Run], pd.DataFrame]) -> pd.DataFrame:
    pieces = [frame_of(run).assign(setting=label, seed=seed) for label, seed, run in study.each()]
    pieces = [piece for piece in pieces if len(piece)]
    return pd.concat(pieces, ignore_index=True) if pieces else pd.DataFrame()


def natural(levels: Iterable[str]) -> list[str]:
    """Levels in natural order: numbers by size, then text; "all" last."""
    return sorted(set(levels), key=_natural_key)


def _natural_key(level: str) -> tuple[int, float, str]:
    try:
        return (0, float(level), level)
    except ValueError:
        return (2 if level == "all" else 1, 0.0, level)


def _common(series: Sequence[pd.Series]) -> set[Any]:
    sets = [set(one.tolist()) for one in series]
    return set.intersection(*sets) if sets else set()


def _in(frame: pd.DataFrame, keys: set[Any]) -> np.ndarray:
    """Which rows are in `keys`, as a mask (also of no rows)."""
    return np.array([tuple(row) in keys for row in frame.to_numpy().tolist()], dtype=bool)


def _join(pieces: Sequence[pd.DataFrame], columns: Sequence[str]) -> pd.DataFrame:
    filled = [piece for piece in pieces if len(piece)]
    return pd.concat(filled, ignore_index=True) if filled else pd.DataFrame(columns=list(columns))


def _recorded(frame: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    if frame.empty:
        return frame
    return frame[frame.groupby(by)["value"].transform(lambda values: values.notna().any())].reset_index(drop=True)
