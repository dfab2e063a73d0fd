"""From runs to the small frames that tables and figures show: a row for each setting, seed and step, with half of an interval."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from sharpscope.analysis.measures import EVALUATED, evaluations, sharpness, temperatures
from sharpscope.analysis.statistics import accuracy_interval
from sharpscope.analysis.study import Study
from sharpscope.analysis.text import sampling
from sharpscope.analysis.token_values import mismatch_by_step
from sharpscope.traces import MAX_SATURATION, Run

Z = 1.959964  # 97.5 % quantile of the normal distribution
ROUNDING = 0.05
"""Rotations that are all smaller are rounding: the method's gradient is the reference's [degrees]."""
ROUNDED = 1e-6
"""Relative changes, and mismatches of sampler and trainer [nats], that float32 arithmetic explains."""


@dataclass(frozen=True)
class Quantity:
    """How a quantity by step is shown: its name with the unit, a factor, and whether its axis is logarithmic."""

    name: str
    factor: float = 1.0
    log: bool = False


STEPS = {
    "reward_mean": Quantity("reward"),
    "accuracy": Quantity("accuracy on the training prompts [%]", 100),
    "accuracy_completed": Quantity("accuracy of the completed [%]", 100),
    "grad_norm": Quantity("gradient norm before clipping", log=True),
    "update_norm": Quantity("norm of the update", log=True),
    "entropy_mean": Quantity("entropy of a token [nats]"),
    "kl_step": Quantity("KL divergence of a step [nats]", log=True),
    "kl": Quantity("KL divergence to the reference [nats]"),
    "mismatch": Quantity("mismatch of sampler and trainer, KL by k3 [nats]", log=True),
    "completion_length_mean": Quantity("length of a completion [tokens]"),
    "truncated_fraction": Quantity("completions cut at the limit [%]", 100),
    "grad_clipped": Quantity("updates with a clipped gradient [%]", 100),
    "gradient_rotation": Quantity("rotation of the gradient [°]"),
    "update_rotation": Quantity("rotation of the optimizer's step [°]"),
    "noise_rotation": Quantity("angle of a batch's noise [°]"),
    "weight_mean": Quantity("token weight"),
}
"""Columns of `steps`, and `mismatch` (from the tokens), in the order in which they are shown."""
SHARPNESS = {
    "sam": "SAM sharpness",
    "largest": "largest Hessian eigenvalue",
    "critical_sharpness": "critical sharpness",
}
"""Measures of the loss surface that are shown along training."""


def split_of(probe_set: str) -> str:
    """`train` of `task-hash/train@policy`; the whole name if it names no split."""
    return probe_set.rpartition("@")[0].rpartition("/")[2] or probe_set


def known(values: pd.Series | np.ndarray) -> np.ndarray:
    """Values as float64; what is null is NaN."""
    return pd.to_numeric(pd.Series(values), errors="coerce").to_numpy(dtype=np.float64)


def rotates(run: Run) -> bool:
    """Whether a run's gradient was measured to differ from the reference's by more than rounding."""
    angles = known(run.steps["gradient_rotation"])
    return bool(np.isfinite(angles).any()) and float(np.nanmax(angles)) > ROUNDING


def step_values(study: Study, columns: Sequence[str]) -> pd.DataFrame:
    """setting, seed, step, quantity, value of STEPS. A quantity that never varies, or is rounding, is left out."""
    pieces = [pd.DataFrame(columns=["quantity", "step", "value"])]
    for label, seed, run in study.each():
        steps = run.steps.sort_values("step")
        if "mismatch" in columns:
            steps = steps.assign(mismatch=steps["step"].map(mismatch_by_step(run)))
        for column in (column for column in columns if column in steps and len(steps)):
            values = known(steps[column])
            rounding = column == "mismatch" and not (values > ROUNDED).any()
            rounding |= column in ("gradient_rotation", "update_rotation") and not rotates(run)
            if not rounding:
                place = {"setting": label, "seed": seed, "quantity": column}
                pieces.append(pd.DataFrame({"step": steps["step"], "value": values}).assign(**place))
    frame = pd.concat(pieces[1:], ignore_index=True) if pieces[1:] else pieces[0]
    grouped = frame.groupby("quantity")["value"]
    there = frame.dropna(subset=["value"]).groupby("quantity")["step"].nunique()
    low, high = grouped.transform("min"), grouped.transform("max")
    varies = (high - low > ROUNDED * high.abs()) & (frame["quantity"].map(there).fillna(0) > 1)
    return frame[varies].reset_index(drop=True)


def accuracy_values(run: Run) -> pd.DataFrame:
    """step, split, temperature, prompts, k, EVALUATED, and low, high of the 95 % interval over prompts (Wilson); levels pooled.

    `half`: its longer arm.
    """
    made = []
    for split in sorted(set(run.eval["split"]), key=lambda name: (name != "heldout", name)):
        for heat in temperatures(run, split):
            columns = {name: evaluations(run, split, heat, name) for name in EVALUATED}
            rows = run.eval[(run.eval["split"] == split) & (run.eval["temperature"] == heat)]
            for step, (accuracy, prompts) in columns["accuracy"].items():
                row = {name: at.get(step, (math.nan, 0))[0] for name, at in columns.items()}
                k = int(rows.loc[rows["step"] == step, "k"].max())
                interval = accuracy_interval(accuracy, row["std_error"], prompts, k)
                low, high = interval.low, interval.high
                place = {"step": step, "split": split, "temperature": heat, "prompts": prompts, "k": k}
                made.append(place | row | {"low": low, "high": high, "half": max(accuracy - low, high - accuracy)})
    names = ["step", "split", "temperature", "prompts", "k", *EVALUATED, "low", "high", "half"]
    return pd.DataFrame(made, columns=names)


def eval_values(study: Study) -> pd.DataFrame:
    """setting, seed, step, quantity, value, low, high: accuracy in percent at each evaluation, by split and temperature."""

    def _of(run: Run) -> pd.DataFrame:
        rows = accuracy_values(run)
        splits, how = rows["split"].str.replace("heldout", "held-out"), rows["temperature"].map(sampling)
        shares = 100 * rows[["accuracy", "low", "high"]].rename(columns={"accuracy": "value"})
        return shares.assign(step=rows["step"], quantity=splits + " accuracy, " + how + " [%]")

    return _of_each(study, _of)


def sharpness_values(study: Study) -> pd.DataFrame:
    """setting, seed, step, quantity (the measure), value, low, high, saturated of every estimate that is shown."""

    def _of(run: Run) -> pd.DataFrame:
        rows = sharpness_rows(run).drop_duplicates(["measure", "step"])
        ends = {"low": rows["value"] - rows["half"], "high": rows["value"] + rows["half"], "quantity": rows["measure"]}
        return rows[["step", "value"]].assign(**ends, saturated=known(rows["saturation"]) > MAX_SATURATION)

    return _of_each(study, _of)


def _of_each(study: Study, of: Callable[[Run], pd.DataFrame]) -> pd.DataFrame:
    """The frame `of` each run, with its setting and seed; an empty frame where none has rows."""
    pieces = [of(run).assign(setting=label, seed=seed) for label, seed, run in study.each()]
    pieces = [piece for piece in pieces if len(piece)]
    return pd.concat(pieces, ignore_index=True) if pieces else pd.DataFrame()


def sharpness_rows(run: Run) -> pd.DataFrame:
    """The estimates of SHARPNESS that are shown: all parameters, training half of the probe set, converged, one radius.

    Rows of `probes` in order, with `measure` (the quantity with its functional and radius), `half` of its 95 % interval over
    prompts, and `saturation`. A run has one radius; of one that was probed at several, the largest at which no SAM estimate is
    saturated is shown, or else the smallest.
    """
    rows = run.probes
    good = rows["value"].notna() & ~rows["converged"].isin([False]) & (rows["parameters"] == "all")
    rows = rows[good & rows["quantity"].isin(list(SHARPNESS)) & ~rows["probe_set"].fillna("").str.contains("/heldout@")]
    rows = rows.assign(measure="", half=Z * known(rows["prompt_std_error"]), saturation=math.nan, rank=0)
    pieces = []
    for (quantity, functional), group in rows.groupby(["quantity", rows["functional"].fillna("")]):
        part, rho = group, known(group["rho"])
        if quantity == "sam":
            table = sharpness(run, quantity, functional)["saturation"]
            keys = zip(part["step"], (float(f"{one:.9g}") for one in rho), strict=True)
            part = part.assign(saturation=np.array([table.get(key, math.nan) for key in keys], dtype=float))
            worst = part["saturation"].groupby(rho).max().sort_index()
            fit = worst.index[(worst <= MAX_SATURATION) | worst.isna()]
            kept = np.isclose(rho, fit[-1] if len(fit) and worst.notna().any() else worst.index[0], rtol=1e-6)
            part, rho = part[kept], rho[kept]
        name = SHARPNESS[str(quantity)] + ("" if quantity == "critical_sharpness" else f" of {functional}")
        name += f", radius {rho[0]:.3g}" if len(rho) and math.isfinite(rho[0]) else ""
        pieces.append(part.assign(measure=name, rank=list(SHARPNESS).index(str(quantity))))
    return (pd.concat(pieces) if pieces else rows).sort_values(["rank", "measure", "step"], kind="stable")


def critical_text(estimates: pd.DataFrame) -> str:
    """The newest critical sharpness of the table `probes` with its threshold 2 / learning rate; empty without one."""
    valued = estimates.dropna(subset=["value"])
    pairs = valued.pivot_table(index="step", columns="quantity", values="value", aggfunc="last")
    both = pairs.reindex(columns=["critical_sharpness", "critical_threshold"]).dropna()
    return f"step {both.index[-1]}, {critical_sentence(*map(float, both.iloc[-1]))}" if len(both) else ""


def critical_sentence(sharpness: float, threshold: float) -> str:
    """What a critical sharpness says about its threshold 2 / learning rate."""
    factor = threshold / sharpness
    longer = f"could be {factor:.3g} times longer before it raised"
    means = longer if factor >= 1 else f"was {1 / factor:.3g} times too long: it raised"
    return f"critical sharpness {sharpness:.3g}, threshold 2/lr = {threshold:.3g}: the update {means} the loss of its batch"
