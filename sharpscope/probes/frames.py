"""What the figures of curvature and perturbation draw, as frames from the `probes` table; nothing here needs torch.

Every function takes the table of one run or of several (`run`, `method`, `seed_run` and other columns are kept as keys
where they are named in `by`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

BY = ("step", "probe_set", "functional", "parameters")


def along_training(
    probes: pd.DataFrame, quantity: str, by: Sequence[str] = ("probe_set", "functional", "parameters")
) -> pd.DataFrame:
    """One quantity by step: columns `by`, step, value, std_error, converged; only finite values."""
    rows = probes[(probes["quantity"] == quantity) & probes["value"].notna()]
    return rows[[*by, "step", "value", "std_error", "converged"]].sort_values([*by, "step"], ignore_index=True)


def spectral_curves(
    probes: pd.DataFrame,
    by: Sequence[str] = BY,
    *,
    quantity: str = "density",
    points: int = 512,
    width: float | None = None,
) -> pd.DataFrame:
    """Smoothed spectral densities: columns `by`, eigenvalue, density (per unit of eigenvalue).

    The nodes and weights of the quadrature are smoothed with Gaussians of standard deviation `width`, 1 % of the nodes'
    range if not given.
    """
    rows = probes[(probes["quantity"] == quantity) & probes["value"].notna()]
    frames = []
    for key, group in rows.groupby(list(by), dropna=False):
        nodes, weights = group["rho"].to_numpy(float), group["value"].to_numpy(float)
        span = float(nodes.max() - nodes.min())
        scale = width or max(0.01 * span, 1e-9 * float(np.abs(nodes).max()), 1e-300)
        grid = np.linspace(nodes.min() - 3 * scale, nodes.max() + 3 * scale, points)
        kernel = np.exp(-0.5 * ((grid[:, None] - nodes) / scale) ** 2) / (scale * np.sqrt(2 * np.pi))
        frames.append(_keyed(by, key, {"eigenvalue": grid, "density": kernel @ weights}))
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=[*by, "eigenvalue", "density"])


def rho_curves(probes: pd.DataFrame, by: Sequence[str] = BY) -> pd.DataFrame:
    """Sharpness against radius: columns `by`, kind, rho, value, std_error, first_order, ratio, converged."""
    rows = probes[probes["probe"] == "perturbation"]
    main = rows[~rows["quantity"].str.endswith(("_first_order", "_ratio"))].rename(columns={"quantity": "kind"})
    kept = main[[*by, "kind", "rho", "value", "std_error", "converged"]]
    for suffix in ("first_order", "ratio"):
        beside = rows[rows["quantity"].str.endswith("_" + suffix)]
        beside = beside.assign(kind=beside["quantity"].str.removesuffix("_" + suffix))[[*by, "kind", "rho", "value"]]
        kept = kept.merge(beside.rename(columns={"value": suffix}), how="left", on=[*by, "kind", "rho"])
    return kept.sort_values([*by, "kind", "rho"], ignore_index=True)


def slice_curves(probes: pd.DataFrame, by: Sequence[str] = BY) -> pd.DataFrame:
    """Loss slices: columns `by`, direction, distance [parameters' L2 norm], loss."""
    rows = probes[probes["probe"] == "slice"]
    rows = rows.assign(direction=rows["quantity"].str.removeprefix("slice_"))
    named = rows.rename(columns={"rho": "distance", "value": "loss"})
    return named[[*by, "direction", "distance", "loss"]].sort_values([*by, "direction", "distance"], ignore_index=True)


def stability(
    probes: pd.DataFrame, lr: pd.DataFrame, beta1: float, by: Sequence[str] = ("probe_set", "functional")
) -> pd.DataFrame:
    """Preconditioned top eigenvalue beside AdamW's threshold (2 + 2β₁)/((1 − β₁)·lr).

    Args:
        probes: the probes table.
        lr: columns step and lr (the steps table).
        beta1: of the optimizer.

    Returns:
        Columns `by`, step, value, converged, threshold.
    """
    rows = along_training(probes, "preconditioned_largest", by)
    rate = lr.drop_duplicates("step").set_index("step")["lr"]
    rates = rows["step"].map(rate).to_numpy(float)
    with np.errstate(divide="ignore"):
        threshold = (2 + 2 * beta1) / ((1 - beta1) * rates)
    return rows.drop(columns="std_error").assign(threshold=threshold)


def _keyed(by: Sequence[str], key: object, columns: dict[str, np.ndarray]) -> pd.DataFrame:
    values = key if isinstance(key, tuple) else (key,)
    return pd.DataFrame({**dict(zip(by, values, strict=True)), **columns})
