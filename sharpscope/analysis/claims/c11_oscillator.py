"""C11: reward follows the damped-oscillator model; its overdamped limit, a single exponential, is the rival.

r(t) = r∞ − D·g(t), where g solves m·g″ + γ·g′ + k·g = 0 with g(0) = 1, g′(0) = 0 (arXiv 2606.30789). With
ω = √(k/m) and ζ = γ/(2√(mk)), g depends on ωt and ζ alone; for ζ → ∞ at fixed k/γ it is exp(−(k/γ)t). r∞ and D enter
linearly, so a grid over (ω, ζ) with linear least squares at each point finds the best fit without a starting guess.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from numpy.typing import NDArray

from sharpscope.analysis.claims.base import (
    Claim,
    Condition,
    Confounder,
    Estimate,
    Evidence,
    Finding,
    Rule,
    Sample,
    Verdict,
    directional,
    every,
    log_margin,
    mean_estimate,
    present,
    rows_of,
    unfinished,
)
from sharpscope.analysis.claims.measures import probe_rows
from sharpscope.analysis.figures.style import BLUE, GRAY, VERMILLION, Picture, finish, panels, plain, styled
from sharpscope.analysis.statistics import mean_interval, sign_flip_p, smallest_sign_flip_p
from sharpscope.analysis.study import GRID, Study, grid_settings
from sharpscope.traces import Run

Array = NDArray[np.float64]

FOLDS = 5
SMALLEST_ZETA, LARGEST_ZETA = 0.05, 20.0
FASTEST_SWING = 1.5
"""Frequency above which a swing is not told from noise, about four steps a period [1/step]."""
NAME = "C11"
MARGIN = 0.02
FEWEST = 40
"""Steps that a curve must have [steps]."""
GOOD_FIT = 0.9
WITHIN = 2.0
"""Factor within which the fitted frequency must lie around the predicted one."""
GAIN, GAIN_UNIT = "how much larger the exponential's prediction error is", "ln(exponential's / oscillator's)"
STIFFNESS = ("preconditioned_largest", "largest")
"""Quantities of the probes table that stand for the stiffness, the first that is recorded."""


def fits_frame(study: Study) -> pd.DataFrame:
    """One row per run: fitted and predicted frequency and damping, errors of prediction of both models, R².

    `main`: whether the run has the setting that is tested; the others differ from it only in the grid's settings.
    """
    methods = (study.baseline, study.treatment)
    main = study.alike(*methods)
    family = study.alike(*methods, but=list(GRID.values()))
    rows = [row | {"main": name in main} for name, run in family.items() if (row := _row(name, run)) is not None]
    return pd.DataFrame(rows)


def _row(name: str, run: Run) -> dict[str, Any] | None:
    steps = run.steps.sort_values("step")
    steps = steps[np.isfinite(steps["reward_mean"].to_numpy(dtype=float))]
    t, reward = steps["step"].to_numpy(dtype=float), steps["reward_mean"].to_numpy(dtype=float)
    if len(t) < FEWEST or np.ptp(reward) == 0:
        return None
    fit = fit_oscillator(t, reward)
    ours, rival = prediction_errors(t, reward)
    plain, corrected = explained(fit, reward)
    omega, zeta = predicted(run)
    return {
        "run": name,
        "method": run.method,
        "seed": run.seed,
        "steps": len(t),
        **grid_settings(run),
        "gain": math.log(rival / ours) if ours > 0 and rival > 0 else 0.0,
        "omega": fit.parameters[0],
        "zeta": fit.parameters[1],
        "r2": plain,
        "r2_corrected": corrected,
        "omega_predicted": omega,
        "zeta_predicted": zeta,
        "noise": noise_variance(reward),
        "final": float(reward[-max(5, len(reward) // 10) :].mean()),
    }


def predicted(run: Run) -> tuple[float, float]:
    """(ω, ζ) per step from the optimizer and the measured curvature; NaN where it was not measured.

    Momentum as an average of gradients, θ_{t+1} − θ_t = β(θ_t − θ_{t−1}) − η(1 − β)∇L, has mass m = β/(η(1 − β)) and
    damping γ = 1/η per update; the stiffness k is the largest eigenvalue, of the AdamW-preconditioned Hessian where
    that was recorded.
    """
    optimizer = run.config.get("optimizer") or {}
    lr, beta = optimizer.get("lr"), optimizer.get("beta1", 0.9)
    updates = float(run.steps["updates"].mean())
    for quantity in STIFFNESS:
        rows = pd.concat([probe_rows(run, quantity, f) for f in ("surrogate", "expected_failure")])
        stiffness = float(rows["value"].median()) if len(rows) else 0.0
        if stiffness > 0 and lr and 0 < beta < 1 and updates > 0:
            mass, damping = beta / (lr * (1 - beta)), 1 / lr
            return math.sqrt(stiffness / mass) * updates, damping / (2 * math.sqrt(mass * stiffness))
    return math.nan, math.nan


def _group_size(frame: pd.DataFrame) -> tuple[Estimate, ...]:
    """Effect of the group size on the final reward and its noise, other settings equal."""
    if "group size" not in frame or frame["group size"].nunique() < 2:
        return ()
    held = [c for c in ("method", "seed", "learning rate", "weight decay") if c in frame]
    means, slopes = [], []
    for _, rows in frame.groupby(held):
        if rows["group size"].nunique() > 1:
            x = np.log(rows["group size"].to_numpy())
            means.append(np.polyfit(x, rows["final"].to_numpy(), 1)[0])
            slopes.append(np.polyfit(x, np.log(rows["noise"].to_numpy()), 1)[0])
    return present(
        mean_estimate("final reward per unit of ln G", np.array(means), "reward", "the model says 0"),
        mean_estimate("slope of ln noise variance on ln G", np.array(slopes), "1", "the model says −1; p of 0"),
    )


def test(study: Study) -> Finding:
    """ln(MSE of the exponential / MSE of the oscillator) on steps that were not fitted; seeds as clusters."""
    family = fits_frame(study)
    frame = family[family["main"]] if len(family) else family
    if not len(frame):
        return Finding(missing=f"no run of {study.baseline} or {study.treatment} has {FEWEST} steps with a reward")
    by_seed = frame.groupby("seed").mean(numeric_only=True)
    gain = by_seed["gain"].to_numpy()
    if hidden := _hidden(frame):
        return Finding(
            missing=hidden,
            others=present(mean_estimate(GAIN, gain, GAIN_UNIT, "", "log")),
            frames={"fits": frame.drop(columns="main")},
        )
    margin = log_margin(study.terms.margin(NAME, MARGIN), "lower")  # an error lower by that share
    away = (
        frame.assign(away=np.log(frame["omega"] / frame["omega_predicted"])).groupby("seed")["away"].mean().to_numpy()
    )
    evidence = every((directional(gain, "higher", margin), _near(away)))
    quality = by_seed["r2_corrected"].to_numpy()
    good = bool(np.isfinite(quality).all() and quality.mean() >= GOOD_FIT)
    return Finding(
        effect=mean_estimate(GAIN, gain, GAIN_UNIT, "", "log"),
        n=len(by_seed),
        evidence=evidence,
        conditions=(Condition(f"the oscillator explains {GOOD_FIT:.0%} of what is not noise", good),),
        confounders=(
            Confounder("more free parameters", "models are compared on blocks of steps that were not fitted"),
            Confounder(
                "noise of a step's reward", "R² is also given with the noise, known from second differences, taken out"
            ),
            Confounder("several runs of a seed", "averaged: one cluster"),
        ),
        others=present(
            *_estimates(frame, by_seed, away),
            *_group_size(family),
        ),
        rows=rows_of(frame["run"], "steps", ("step", "reward_mean", "updates"), "all steps with a reward")
        + rows_of(frame["run"], "probes", ("value",), f"quantity {' or '.join(STIFFNESS)}"),
        notes=(
            "if both models fit alike, this favors the overdamped limit, hence no inertia",
            *study.elsewhere(study.baseline, study.treatment),
            *unfinished(study),
        ),
        frames={"fits": frame.drop(columns="main")},
        samples=(
            Sample(
                "gain over the exponential",
                gain,
                tuple(by_seed.index),
                "higher",
                margin,
                runs=len(frame) // len(by_seed),
                note="the test of the frequency is not in this power",
            ),
        ),
    )


def _estimates(frame: pd.DataFrame, by_seed: pd.DataFrame, away: NDArray[np.float64]) -> tuple[Estimate, ...]:
    """How well the oscillator fits, and its damping and frequency beside those that optimizer and curvature predict."""
    quality = by_seed["r2_corrected"].to_numpy()
    return present(
        Estimate(
            "R² of the oscillator",
            float(by_seed["r2"].mean()),
            "1",
            mean_interval(by_seed["r2"].to_numpy()),
            None,
            len(by_seed),
            "published: at least 0.91",
        ),
        Estimate(
            "R² with the noise taken out",
            float(np.nanmean(quality)) if np.isfinite(quality).any() else math.nan,
            "1",
            n=int(np.isfinite(quality).sum()),
            note="seeds whose variance is not all noise",
        ),
        Estimate(
            "fitted damping ratio ζ",
            float(frame["zeta"].median()),
            "1",
            note="median over runs; above 1 it does not swing",
        ),
        Estimate(
            "damping ratio from optimizer and curvature",
            float(frame["zeta_predicted"].median()),
            "1",
            note="median over runs",
        ),
        Estimate("fitted frequency ω", float(frame["omega"].median()), "1/step", note="median over runs"),
        Estimate("frequency from optimizer and curvature", float(frame["omega_predicted"].median()), "1/step"),
        mean_estimate("fitted frequency against the predicted one", away, "ln ratio", "p of equal", "log"),
        Estimate("share of runs whose fit swings (ζ < 1)", float((frame["zeta"] < 1).mean()), "1", n=len(frame)),
    )


def _hidden(frame: pd.DataFrame) -> str:
    """Why the predicted frequency cannot be seen in the rewards; empty if it can."""
    known = frame["omega_predicted"].dropna()
    if len(known) < len(frame):
        return "no curvature of surrogate or expected_failure in every run: the theory predicts no frequency (probes.preset=standard)"
    omega, steps = float(known.median()), int(frame["steps"].min())
    slowest = math.pi / steps
    if slowest <= omega <= FASTEST_SWING:
        return ""
    limit = (
        f"above what one reward per step can show (fitted up to {FASTEST_SWING:g}, Nyquist {math.pi:.3g})"
        if omega > FASTEST_SWING
        else f"too slow for half a period in {steps} steps ({slowest:.2g})"
    )
    return f"the predicted frequency is {omega:.3g} per step, {limit}: the theory's frequency cannot be tested"


def _near(away: Array) -> Evidence:
    """Tests that ln(fitted/predicted) lies within ± ln WITHIN (two one-sided), and that it lies outside."""
    edge = math.log(WITHIN)
    inside = max(sign_flip_p(away, "greater", shift=-edge), sign_flip_p(away, "less", shift=edge))
    outside = min(sign_flip_p(away, "less", shift=-edge), sign_flip_p(away, "greater", shift=edge))
    smallest = smallest_sign_flip_p(len(away), "greater")
    return Evidence(inside, abs(float(away.mean())) < edge, outside, smallest, smallest, parts=1)


def fitted_curves(run: Run) -> pd.DataFrame:
    """step, reward, oscillator, exponential: a run's reward and both fits, for the figure."""
    steps = run.steps.sort_values("step")
    steps = steps[np.isfinite(steps["reward_mean"].to_numpy(dtype=float))]
    t, reward = steps["step"].to_numpy(dtype=float), steps["reward_mean"].to_numpy(dtype=float)
    return pd.DataFrame(
        {
            "step": t,
            "reward": reward,
            "oscillator": fit_oscillator(t, reward).curve,
            "exponential": fit_exponential(t, reward).curve,
        }
    )


def reward_fit(curves: Mapping[str, pd.DataFrame]) -> Figure:
    """Reward of a run, the damped oscillator and its overdamped limit, a panel for each run (C11).

    `curves`: title → step, reward, oscillator, exponential.
    """
    with styled():
        figure, axes = panels(len(curves))
        for axis, (title, rows) in zip(axes, curves.items(), strict=True):
            axis.plot(rows["step"], rows["reward"], ".", color=GRAY, markersize=3, label="reward")
            axis.plot(rows["step"], rows["oscillator"], color=VERMILLION, label="damped oscillator")
            axis.plot(rows["step"], rows["exponential"], color=BLUE, linestyle="--", label="single exponential")
            axis.set(xlabel="step", ylabel="mean reward [reward]", title=plain(title))
        finish(figure, axes)
    return figure


def draw(verdict: Verdict, study: Study) -> Iterator[Picture]:
    """Reward of the first run of each method with both fits."""
    chosen: dict[str, pd.DataFrame] = {}
    for method in (study.baseline, study.treatment):
        for name, run in sorted(study.alike(method).items()):
            if len(run.steps) >= 10 and run.steps["reward_mean"].notna().sum() >= 10:
                chosen[name] = fitted_curves(run)
                break
    if not chosen:
        yield Picture("reward_fit", "", missing="reward fit: no finished run has 10 steps with a reward", claim=NAME)
        return
    caption = "Reward of one run of each method with the damped oscillator and its overdamped limit (C11)."
    yield Picture("reward_fit", caption, reward_fit(chosen), claim=NAME)


@dataclass(frozen=True)
class Fit:
    """The best curve of a family.

    Attributes:
        limit, drop: r∞ and D.
        parameters: (ω, ζ) [1/step, 1], or (rate,) [1/step].
        curve: (T,) fitted values.
        mse: mean squared error on the points fitted.
    """

    limit: float
    drop: float
    parameters: tuple[float, ...]
    curve: Array
    mse: float


def oscillator_shapes(t: Array, omega: Array, zeta: Array) -> Array:
    """G (M, T) of a unit oscillator released at rest; omega, zeta (M,). Near ζ = 1 the critical form is taken."""
    w, z = omega[:, None], zeta[:, None]
    x = w * t  # (M, T)
    under = np.sqrt(np.maximum(1 - z**2, 1e-12))
    over = np.sqrt(np.maximum(z**2 - 1, 1e-12))
    swinging = np.exp(-z * x) * (np.cos(under * x) + z / under * np.sin(under * x))
    slow, fast = z - over, z + over  # decay rates over ω
    creeping = (fast * np.exp(-slow * x) - slow * np.exp(-fast * x)) / (2 * over)
    critical = np.exp(-x) * (1 + x)
    return np.asarray(np.where(np.abs(z - 1) < 1e-3, critical, np.where(z < 1, swinging, creeping)))


def fit_oscillator(t: Array, reward: Array, keep: NDArray[np.bool_] | None = None) -> Fit:
    """Least squares over (ω, ζ, r∞, D); `keep` (T,) marks the points fitted, the curve covers all."""
    span = float(t[-1] - t[0]) or 1.0
    omega, zeta = np.geomspace(0.5 / span, 40.0, 40), np.geomspace(SMALLEST_ZETA, LARGEST_ZETA, 20)
    best = (0.0, 0.0)
    for _ in range(3):
        grid_w, grid_z = (axis.ravel() for axis in np.meshgrid(omega, zeta))
        possible = (grid_w <= FASTEST_SWING) | (grid_z > 1)
        grid_w, grid_z = grid_w[possible], grid_z[possible]
        result = _best(oscillator_shapes(t - t[0], grid_w, grid_z), reward, keep)
        best = (float(grid_w[result]), float(grid_z[result]))
        omega = _closer(omega, best[0], 9)
        zeta = np.clip(_closer(zeta, best[1], 9), SMALLEST_ZETA, LARGEST_ZETA)
    shape = oscillator_shapes(t - t[0], np.array(best[:1]), np.array(best[1:]))[0]
    return _linear(shape, reward, keep, best)


def fit_exponential(t: Array, reward: Array, keep: NDArray[np.bool_] | None = None) -> Fit:
    """Least squares over (rate, r∞, D) of r∞ − D·exp(−rate·t)."""
    span = float(t[-1] - t[0]) or 1.0
    rate = np.geomspace(0.1 / span, 2.0, 80)
    best = 0.0
    for _ in range(3):
        shapes = np.exp(-rate[:, None] * (t - t[0]))
        best = float(rate[_best(shapes, reward, keep)])
        rate = _closer(rate, best, 15)
    return _linear(np.exp(-best * (t - t[0])), reward, keep, (best,))


def blocks(count: int) -> NDArray[np.int_]:
    """(count,) fold of each step: short blocks assigned to FOLDS in turn, so that every part of a curve but its start is predicted.

    The first block is in no fold (−1): it is always fitted. Without it a fast drop would be extrapolated without bound, and
    that one point would decide.
    """
    block = np.arange(count) // max(2, count // 40)
    return np.where(block == 0, -1, (block - 1) % FOLDS)


def prediction_errors(t: Array, reward: Array) -> tuple[float, float]:
    """Mean squared error of (oscillator, exponential) on blocks of steps that were not fitted; the first block is not scored."""
    fold = blocks(len(t))
    errors = np.zeros(2)
    for k in range(FOLDS):
        keep = fold != k
        for i, fit in enumerate((fit_oscillator, fit_exponential)):
            errors[i] += float(np.sum((fit(t, reward, keep).curve - reward)[~keep] ** 2))
    scored = int((fold >= 0).sum())
    return float(errors[0] / scored), float(errors[1] / scored)


def noise_variance(reward: Array) -> float:
    """Variance of the noise around a smooth curve, from second differences: Σ(r_{t−1} − 2r_t + r_{t+1})²/(6(T − 2))."""
    return float(np.mean(np.diff(reward, 2) ** 2) / 6)


def explained(fit: Fit, reward: Array) -> tuple[float, float]:
    """R² of a fit, and R² with the noise taken out of both error and variance (NaN where all variance is noise)."""
    total, noise = float(np.var(reward)), noise_variance(reward)
    plain = 1 - fit.mse / total if total > 0 else float("nan")
    signal = total - noise
    return plain, 1 - max(0.0, fit.mse - noise) / signal if signal > 0 else float("nan")


def _closer(axis: Array, best: float, points: int) -> Array:
    step = (axis[1] / axis[0]) if len(axis) > 1 and axis[1] > axis[0] else 1.1
    return np.geomspace(best / step, best * step, points)


def _moments(shapes: Array, reward: Array, keep: NDArray[np.bool_] | None) -> tuple[Array, Array, Array]:
    w = np.ones(len(reward)) if keep is None else keep.astype(np.float64)
    centered = reward - (w @ reward) / w.sum()
    means = shapes @ w / w.sum()
    square = (shapes**2) @ w - means**2 * w.sum()
    return means, shapes @ (w * centered), np.maximum(square, 1e-12)


def _best(shapes: Array, reward: Array, keep: NDArray[np.bool_] | None) -> int:
    _, cross, square = _moments(shapes, reward, keep)
    return int(np.argmax(cross**2 / square))


def _linear(shape: Array, reward: Array, keep: NDArray[np.bool_] | None, parameters: tuple[float, ...]) -> Fit:
    means, cross, square = _moments(shape[None], reward, keep)
    used = np.ones(len(reward), dtype=bool) if keep is None else keep
    slope = float(cross[0] / square[0])
    limit = float(reward[used].mean() - slope * means[0])
    curve = limit + slope * shape
    return Fit(limit, -slope, parameters, curve, float(np.mean((curve - reward)[used] ** 2)))


CLAIM = Claim(
    NAME,
    "reward follows the damped-oscillator model",
    "arXiv 2606.30789 (R² ≥ 0.91)",
    Rule(
        "supported: on blocks of steps that were not fitted (the first block always is) the oscillator predicts reward better "
        f"than the single exponential (sign-flip test over seeds), explains {GOOD_FIT:.0%} of what is not noise, and its frequency is "
        f"shown to lie within a factor of {WITHIN:g} of that predicted from optimizer and curvature; refuted: its error is shown to be "
        "smaller by less than {margin}, or the frequency to lie outside (Bonferroni); untestable where the predicted frequency cannot "
        "be seen in one reward per step",
        "seeds",
        6,
        MARGIN,
        scale="log",
    ),
    "more seeds, longer runs, curvature probes for the stiffness",
    test,
    draw=draw,
)
