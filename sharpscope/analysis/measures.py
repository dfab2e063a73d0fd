"""Numbers of runs: accuracy by temperature, sharpness with its ceiling, clipping; and the frames that tables and figures show.

Such a frame has a row for each setting, seed and step, with half of an interval.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from sharpscope.analysis.statistics import accuracy_interval
from sharpscope.analysis.study import per_run
from sharpscope.analysis.text import WIDE, ends_text, number, real, value_text
from sharpscope.traces import MAX_SATURATION, Run

GREEDY, SAMPLED = 0.0, 1.0
"""Temperatures of the accuracies compared."""
SMOOTHING = 10
"""Steps over which a reward or a training accuracy is averaged [steps]."""
FUNCTIONAL = "expected_failure"
"""The functional whose sharpness is compared between methods and with the gap."""


@dataclass(frozen=True)
class Dose:
    """Mean angles by which `method`, and the batch's noise, turned the update [degrees]; None where it was not recorded."""

    method: str
    rotation: float | None
    noise: float | None = None

    @property
    def text(self) -> str:
        """The dose in one sentence."""
        if self.rotation is None:
            return (
                f"rotation of the update by {self.method} not recorded (steps.update_rotation); a method that changes the update "
                "little would look the same"
            )
        noise = "" if self.noise is None else f", the batch's noise by {self.noise:.3g}°"
        return f"the weights of {self.method} turned the update by {self.rotation:.3g}°{noise}"


@per_run
def _pooled(run: Run) -> dict[tuple[str, float, str], dict[int, tuple[float, int]]]:
    """(split, temperature, column) → step → (value, prompts), levels weighted by their prompts.

    Rows of level `all` count only if a split has no others; pass@k only with several completions a prompt.
    """
    columns = [name for name in EVALUATED if name in run.eval]
    rows = run.eval[["split", "temperature", "step", "level", "n", "k", *columns]].to_dict("list")
    levels: dict[tuple[str, float], set[str]] = {}
    # `all` is the mean over levels: beside them it would count twice
    for split, heat, level in zip(rows["split"], rows["temperature"], rows["level"], strict=True):
        levels.setdefault((split, heat), set()).add(level)
    # (split, temperature, column) → step → (Σ n·value, or Σ (n·error)² of a standard error; Σ n)
    sums: dict[tuple[str, float, str], dict[int, tuple[float, int]]] = {}
    for split, heat, step, level, n, k, *values in zip(*rows.values(), strict=True):
        if n < 1 or (level == "all" and levels[split, heat] != {"all"}):
            continue
        for column, value in zip(columns, values, strict=True):
            unknown = value is None or not math.isfinite(value)
            if unknown or (column == "pass_at_k" and k < 2):
                continue
            of_column = sums.setdefault((split, float(heat), column), {})
            total, prompts = of_column.get(int(step), (0.0, 0))
            power = 2 if "std_error" in column else 1
            of_column[int(step)] = (total + (n * value) ** power, prompts + int(n))
    pooled = {}
    for key, steps in sums.items():
        root = 0.5 if "std_error" in key[2] else 1
        pooled[key] = {
            step: (total**root / prompts, prompts)
            for step, (total, prompts) in sorted(steps.items())
        }
    return pooled


EVALUATED = (
    "accuracy",
    "std_error",
    "pass_at_k",
    "pass_std_error",
    "accuracy_completed",
    "truncated",
)
"""Columns of `eval` that are pooled over levels; standard errors as those of independent levels."""


def evaluations(
    run: Run, split: str = "heldout", temperature: float = SAMPLED, column: str = "accuracy"
) -> dict[int, tuple[float, int]]:
    """Step → (value, prompts) of one split at one temperature, levels weighted by their prompts; empty if not evaluated."""
    return _pooled(run).get((split, temperature, column), {})


def temperatures(run: Run, split: str = "heldout") -> list[float]:
    """Temperatures at which a split was evaluated, ascending."""
    return sorted({heat for name, heat, _ in _pooled(run) if name == split})


def splits_of(run: Run) -> list[str]:
    """The splits that were evaluated, held-out prompts first."""
    return sorted(set(run.eval["split"]), key=lambda name: (name != "heldout", name))


def last_evaluation(
    *runs: Run, split: str = "heldout", temperature: float = SAMPLED, column: str = "accuracy"
) -> int | None:
    """The last step at which all `runs` were evaluated on `split`."""
    steps = [set(evaluations(run, split, temperature, column)) for run in runs]
    return max(set.intersection(*steps), default=None)


def train_accuracy(run: Run, step: int) -> tuple[float, int] | None:
    """Accuracy on training prompts at `step`, and the number of completions behind it.

    From the split `train` where it was evaluated at that step; otherwise from the training rollouts of the SMOOTHING
    steps up to it, drawn while the policy changed.
    """
    evaluated = evaluations(run, "train").get(step)
    if evaluated is not None:
        return evaluated
    steps = run.steps
    rows = steps[(steps["step"] > step - SMOOTHING) & (steps["step"] <= step)]
    if not len(rows):
        return None
    rollout = run.config.get("rollout") or {}
    count = int(rollout.get("prompts_per_step", 1)) * int(rollout.get("group_size", 1))
    return float(rows["accuracy"].mean()), count * len(rows)


def gap(run: Run, step: int) -> float | None:
    """Generalization gap at `step`: training accuracy − held-out accuracy, both at temperature 1."""
    inside = train_accuracy(run, step)
    outside = evaluations(run).get(step)
    return None if inside is None or outside is None else inside[0] - outside[0]


PROBED = (
    "step",
    "probe_set",
    "functional",
    "parameters",
    "quantity",
    "value",
    "rho",
    "converged",
    "ceiling",
    "prompts",
)
"""Columns of `probe_rows`."""


@per_run
def probe_rows(run: Run, quantity: str, functional: str = FUNCTIONAL) -> pd.DataFrame:
    """Rows (step, value, rho, …) of the probes table for one quantity, on the probe set whose name contains `train`.

    Where no set's name contains it, all rows are taken if there is only one set. Rows without a value, and iterations that
    did not converge, are left out; of parameter groups only `all` counts.
    """
    rows = estimates_of(run.probes)
    kept = rows["quantity"].eq(quantity) & rows["functional"].eq(functional)
    rows = rows.loc[kept, list(PROBED)]
    whole = rows["parameters"] == "all"
    rows = rows[whole] if whole.any() else rows
    sets = rows["probe_set"]
    named = sets.isin([name for name in sets.unique() if "train" in str(name)])
    if named.any():
        return rows[named]
    return rows if sets.nunique() == 1 else rows.iloc[:0]


@per_run
def sharpness(run: Run, quantity: str = "sam", functional: str = FUNCTIONAL) -> pd.DataFrame:
    """Index (step, rho); rise (mean over seeds), ceiling, saturation = rise / ceiling, estimated.

    The ceiling is the largest rise that the functional allows on these prompts: for `expected_failure` the share of correct
    completions. Runs recorded before version 0.3 do not hold it; there the training accuracy at that step stands for it
    (`estimated`). NaN where the functional is not bounded or nothing is known.
    """
    rows = probe_rows(run, quantity, functional)
    rows = rows.assign(
        rho=rows["rho"].map(rounded).astype(float),
        rise=rows["value"],
        ceiling=pd.to_numeric(rows["ceiling"]),
    )
    means = rows.groupby(["step", "rho"])[["rise", "ceiling"]].mean()
    estimated = means["ceiling"].isna() & (functional == FUNCTIONAL)
    for step, rho in means.index[estimated]:
        accuracy = train_accuracy(run, int(step))
        if accuracy is not None:
            means.loc[(step, rho), "ceiling"] = accuracy[0]
    means["saturation"] = means["rise"] / means["ceiling"].where(means["ceiling"] > 0)
    return means.assign(estimated=estimated)


def rounded(radius: float) -> float:
    """A radius to nine digits: one number in all tables, whatever float it was stored as."""
    return float(f"{radius:.9g}")


@per_run
def _by_radius(run: Run, quantity: str, functional: str) -> dict[float, pd.DataFrame]:
    """Radius → `sharpness` by step."""
    frame = sharpness(run, quantity, functional)
    return {float(str(rho)): part.droplevel("rho") for rho, part in frame.groupby(level="rho")}


@per_run
def probe_sets(run: Run, quantity: str = "sam", functional: str = FUNCTIONAL) -> frozenset[str]:
    """Names of the probe sets of `probe_rows`; empty where the quantity was not measured."""
    return frozenset(probe_rows(run, quantity, functional)["probe_set"])


def shared_sharpness(
    runs: Sequence[Run], quantity: str = "sam", functional: str = FUNCTIONAL, one_set: bool = True
) -> tuple[float, list[pd.DataFrame]] | None:
    """(radius, `sharpness` of each run by step) at one radius that all runs share; None without one, and where numbers of prompts differ.

    Of several radii it is the largest at which no run's last estimate exceeds MAX_SATURATION, or else the smallest. With
    `one_set`, None also where the runs' probe sets differ.
    """
    if one_set and len({probe_sets(run, quantity, functional) for run in runs}) != 1:
        return None
    # SAM sharpness falls with the number of prompts; runs of earlier versions do not say theirs
    counts = {frozenset(probe_rows(run, quantity, functional)["prompts"].dropna()) for run in runs}
    if len(counts - {frozenset()}) > 1:
        return None
    each = [_by_radius(run, quantity, functional) for run in runs]
    radii = sorted(set.intersection(*map(set, each)))
    if not radii:
        return None
    chosen = radii[0]  # ascending
    for rho in radii:
        last = pd.concat([of_run[rho]["saturation"].iloc[-1:] for of_run in each])
        if not (last > MAX_SATURATION).any():
            chosen = rho
    return chosen, [of_run[chosen] for of_run in each]


@per_run
def by_step(run: Run) -> pd.DataFrame:
    """The table `steps` with the step as its index, ascending."""
    return run.steps.set_index("step").sort_index()


@per_run
def clipped_updates(run: Run) -> pd.Series:
    """Step → share of its updates in which clipping of the gradient norm binds; empty where that is not recorded."""
    if "grad_clipped" in run.steps and run.steps["grad_clipped"].notna().any():
        return by_step(run)["grad_clipped"].astype(float)
    updates = run.updates
    if not len(updates) or updates["clip_factor"].isna().all():
        return pd.Series(dtype=float)
    made = updates[~updates["skipped"].astype(bool)]
    return (made["clip_factor"] < 1).groupby(made["step"]).mean()


def log_ratios(frame: pd.DataFrame) -> pd.DataFrame:
    """A paired frame with ln(treatment/baseline) as `difference`; rows with a value that is not positive are left out."""
    positive = frame[(frame["baseline"] > 0) & (frame["treatment"] > 0)]
    logs = np.log(positive[["baseline", "treatment"]].to_numpy(float))
    return positive.assign(difference=logs[:, 1] - logs[:, 0])


def dose_of(runs: Iterable[Run], method: str) -> Dose:
    """Mean rotation of the update and mean angle between halves of a batch over the steps of `runs` [degrees]."""
    several = list(runs)
    found = list[float | None]()
    for column in ("update_rotation", "noise_rotation"):
        means = [run.steps[column].mean() for run in several if column in run.steps]
        recorded = [mean for mean in means if math.isfinite(mean)]
        found.append(float(np.mean(recorded)) if recorded else None)
    return Dose(method, *found)


def answer_noise(run: Run, split: str, step: int) -> float | None:
    """Variance of an accuracy at T = 1 from sampling k answers to each of its n fixed prompts; None if it was not evaluated.

    V_w/(n·k) with V_w = (p(1 − p) − n·s²)·k/(k − 1), s the standard error clustered by prompt; p(1 − p)/n, an upper bound, for
    one answer per prompt.
    """
    rows = run.eval[(run.eval["split"] == split) & (run.eval["step"] == step)]
    rows = rows[np.isclose(rows["temperature"], SAMPLED)]
    single = rows[rows["level"] != "all"]
    rows = single if len(single) else rows
    if not len(rows):
        return None
    columns = ["n", "k", "accuracy", "std_error"]
    n, k, p, error = rows.reindex(columns=columns).to_numpy(float).T  # (levels,) each
    binomial = p * (1 - p)
    between = n * error**2
    within = np.maximum(0.0, binomial - between) * k / np.maximum(k - 1, 1)
    within = np.where((k > 1) & np.isfinite(error), within, binomial)
    share = n / n.sum()  # of a level among the prompts
    return float(np.sum(share**2 * within / (n * k)))


# -- What tables and figures show

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
    "sam_cross_fitted": "cross-fitted SAM sharpness",
    "average": "average sharpness",
    "largest": "largest Hessian eigenvalue",
    "along_update": "curvature along the update",
    "critical_sharpness": "critical sharpness",
    "relative_critical_sharpness": "relative critical sharpness",
}
"""Measures of the loss surface that are shown along training."""
CRITICAL = ("critical_sharpness", "critical_threshold")


def estimates_of(probes: pd.DataFrame) -> pd.DataFrame:
    """The rows of the table `probes` with a value, without those of iterations that did not converge."""
    return probes[probes["value"].notna() & ~probes["converged"].isin([False])]


def split_of(probe_set: str) -> str:
    """`train` of `task-hash/train@policy`; the whole name if it names no split."""
    return probe_set.rpartition("@")[0].rpartition("/")[2] or probe_set


def known(values: pd.Series | np.ndarray) -> np.ndarray:
    """Values as float64; what is null is NaN."""
    return pd.to_numeric(pd.Series(values), errors="coerce").to_numpy(float)


def rotates(run: Run) -> bool:
    """Whether a run's gradient was measured to differ from the reference's by more than rounding."""
    angles = known(run.steps["gradient_rotation"])
    return bool(np.isfinite(angles).any() and np.nanmax(angles) > ROUNDING)


@per_run
def accuracy_values(run: Run) -> pd.DataFrame:
    """step, split, temperature, prompts, k, EVALUATED, and low, high, half (longer arm) of the interval over prompts (Wilson); levels pooled."""
    made = []
    answers = run.eval.groupby(["split", "temperature", "step"])["k"].max().to_dict()
    for split in splits_of(run):
        for heat in temperatures(run, split):
            columns = {name: evaluations(run, split, heat, name) for name in EVALUATED}
            for step, (accuracy, prompts) in columns["accuracy"].items():
                row: dict[str, Any] = {
                    name: at.get(step, (math.nan, 0))[0] for name, at in columns.items()
                }
                row |= {
                    "step": step,
                    "split": split,
                    "temperature": heat,
                    "prompts": prompts,
                }
                row["k"] = int(answers[split, heat, step])
                ends = accuracy_interval(accuracy, row["std_error"], prompts, row["k"])
                row |= {"low": ends.low, "high": ends.high}
                row["half"] = max(accuracy - ends.low, ends.high - accuracy)
                made.append(row)
    names = ["step", "split", "temperature", "prompts", "k", *EVALUATED, "low", "high", "half"]
    return pd.DataFrame(made, columns=names)


@per_run
def sharpness_rows(run: Run) -> pd.DataFrame:
    """The estimates of SHARPNESS that are shown: all parameters, training half of the probe set, converged.

    Rows of `probes` with `measure` (the quantity with its functional, radius and number of prompts: values of different numbers
    are not compared), `half` of its 95 % interval over prompts, the ends `low` and `high` of it, also where it is not symmetric, `text` with the
    value and the interval, and `saturation`. Critical sharpness of an update's own prompts has no interval.
    """
    rows = estimates_of(run.probes)
    shown = rows["parameters"].eq("all") & rows["quantity"].isin(list(SHARPNESS))
    shown &= ~rows["probe_set"].fillna("").str.contains("/heldout@")
    rows = rows[shown]
    # traces of version 0.3 have an error of critical sharpness, which covers too little
    errors = rows["prompt_std_error"].mask(rows["quantity"].str.endswith(CRITICAL[0]))
    half = Z * known(errors)
    ends = rows.reindex(columns=["low", "high"]).mask(rows["quantity"] == CRITICAL[0])
    value = known(rows["value"])
    low = known(ends["low"])
    high = known(ends["high"])
    skew = np.isnan(half) & ~np.isnan(low)
    texts = []
    for is_skew, error, *interval in zip(skew, half, value, low, high, strict=True):
        symmetric = value_text(interval[0], error, WIDE)
        texts.append(ends_text(*interval) if is_skew else symmetric)
    records = rows.to_dict("records")
    rows = rows.assign(
        measure=list(map(_measure_name, records)),
        half=half,
        low=np.where(skew, low, value - half),
        high=np.where(skew, high, value + half),
        text=texts,
        saturation=[_saturation(run, row) for row in records],
        rank=rows["quantity"].map(list(SHARPNESS).index),
    )
    return rows.sort_values(["rank", "measure", "step"], kind="stable")


def _saturation(run: Run, row: Mapping[Any, Any]) -> float:
    """The saturation of a row of SAM sharpness; NaN of another, or if it is not known."""
    if row["quantity"] != "sam":
        return math.nan
    found = sharpness(run, "sam", row["functional"])["saturation"]
    return float(found.get((row["step"], rounded(real(row["rho"]))), math.nan))


def _measure_name(row: Mapping[Any, Any]) -> str:
    """`SAM sharpness of nll, radius 0.05, 200 prompts`; that of an update's own batch is `critical sharpness`."""
    quantity = row["quantity"]
    name = SHARPNESS[quantity]
    if quantity == CRITICAL[0]:
        return name
    words = [f"{name} of {row['functional']}".replace("_", " ")]
    radius = real(row["rho"])
    prompts = real(row["prompts"])
    if quantity == "average" and math.isfinite(radius):  # relative to each tensor's norm
        words.append(f"noise {radius:.3g} of the weights")
    elif math.isfinite(radius):
        words.append(f"radius {radius:.3g}")
    if math.isfinite(prompts):
        words.append(f"{prompts:.0f} prompts")
    return ", ".join(words)


def critical_text(estimates: pd.DataFrame) -> str:
    """The newest critical sharpness of the table `probes` with its threshold 2 / learning rate; empty without one."""
    rows = estimates_of(estimates)
    found = rows[rows["quantity"].isin(CRITICAL)]
    # (steps, CRITICAL) the last value of each step
    values = found.pivot_table(
        index="step",
        columns="quantity",
        values="value",
        aggfunc="last",
    )
    values = values.reindex(columns=list(CRITICAL)).dropna()
    if values.empty:
        return ""
    sharp, limit = values.iloc[-1]
    return f"step {values.index[-1]}, {critical_sentence(sharp, limit)}"


def critical_sentence(sharpness: float, threshold: float) -> str:
    """What a critical sharpness says about its threshold 2 / learning rate."""
    found = f"critical sharpness {number(sharpness)}, threshold 2/lr = {number(threshold)}"
    factor = threshold / sharpness
    longer = f"could be {factor:.3g} times longer before it raised"
    means = longer if factor >= 1 else f"was {1 / factor:.3g} times too long: it raised"
    return f"{found}: the update {means} the loss of its batch"
