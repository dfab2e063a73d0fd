"""C11: reward follows the damped-oscillator model; its overdamped limit, a single exponential, is the rival."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from sharpscope.analysis.claims.base import (
    Claim,
    Condition,
    Confounder,
    Estimate,
    Finding,
    Rule,
    Verdict,
    directional,
    mean_estimate,
    present,
    rows_of,
    unfinished,
)
from sharpscope.analysis.claims.measures import probe_rows
from sharpscope.analysis.claims.oscillator import (
    explained,
    fit_exponential,
    fit_oscillator,
    noise_variance,
    prediction_errors,
)
from sharpscope.analysis.figures.style import BLUE, GREY, VERMILLION, Picture, finish, panels, plain, styled
from sharpscope.analysis.statistics import mean_interval
from sharpscope.analysis.study import GRID, Study, grid_settings
from sharpscope.traces import Run

NAME = "C11"
MARGIN = 0.02
FEWEST = 40
"""Steps that a curve must have [steps]."""
GOOD_FIT = 0.9
STIFFNESS = ("preconditioned_largest", "largest")
"""Quantities of the probes table that stand for the stiffness, the first that is recorded."""


def fits_frame(study: Study) -> pd.DataFrame:
    """One row a run: fitted and predicted frequency and damping, errors of prediction of both models, R².

    `main`: whether it has the setting that is looked at; the others differ from it in the grid's settings alone.
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
        "run": name, "method": run.method, "seed": run.seed, **grid_settings(run),
        "gain": math.log(rival / ours) if ours > 0 and rival > 0 else 0.0,
        "omega": fit.parameters[0], "zeta": fit.parameters[1], "r2": plain, "r2_corrected": corrected,
        "omega_predicted": omega, "zeta_predicted": zeta, "noise": noise_variance(reward),
        "final": float(reward[-max(5, len(reward) // 10):].mean()),
    }  # fmt: skip


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
    """What group size does to the final reward and to its noise, runs alike in method, seed, learning rate and
    decay.
    """
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
    p, as_claimed, refuted, smallest = directional(gain, "higher", MARGIN)
    fitted, ahead = frame["zeta"].median(), frame["zeta_predicted"].median()
    quality = by_seed["r2_corrected"].to_numpy()
    good = bool(np.isfinite(quality).all() and quality.mean() >= GOOD_FIT)
    return Finding(
        effect=mean_estimate("gain of the oscillator over the exponential", gain, "ln ratio of prediction errors"),
        n=len(by_seed),
        p_supported=p,
        as_claimed=as_claimed,
        p_refuted=refuted,
        smallest_p=smallest,
        conditions=(Condition(f"the oscillator explains {GOOD_FIT:.0%} of what is not noise", good),),
        confounders=(
            Confounder("more free parameters", "models are compared on blocks of steps that were not fitted"),
            Confounder(
                "noise of a step's reward", "R² is also given with the noise, known from second differences, taken out"
            ),
            Confounder("several runs of a seed", "averaged: one cluster"),
        ),
        others=present(
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
            Estimate("fitted damping ratio ζ", float(fitted), "1", note="median over runs; above 1 it does not swing"),
            Estimate("damping ratio from optimizer and curvature", float(ahead), "1", note="median over runs"),
            Estimate("fitted frequency ω", float(frame["omega"].median()), "1/step", note="median over runs"),
            Estimate("frequency from optimizer and curvature", float(frame["omega_predicted"].median()), "1/step"),
            Estimate("share of runs whose fit swings (ζ < 1)", float((frame["zeta"] < 1).mean()), "1", n=len(frame)),
            *_group_size(family),
        ),
        rows=rows_of(frame["run"], "steps", ("step", "reward_mean", "updates"), "all steps with a reward")
        + rows_of(frame["run"], "probes", ("value",), f"quantity {' or '.join(STIFFNESS)}"),
        notes=(
            "a curve that both models fit alike speaks for the overdamped limit, hence against inertia",
            *(() if math.isfinite(ahead) else ("no curvature of surrogate or expected_failure: nothing predicted",)),
            *study.elsewhere(study.baseline, study.treatment),
            *unfinished(study),
        ),
        frames={"fits": frame.drop(columns="main")},
    )


def fitted_curves(run: Run) -> pd.DataFrame:
    """step, reward, oscillator, exponential: a run's reward and both fits, for the figure."""
    steps = run.steps.sort_values("step")
    steps = steps[np.isfinite(steps["reward_mean"].to_numpy(dtype=float))]
    t, reward = steps["step"].to_numpy(dtype=float), steps["reward_mean"].to_numpy(dtype=float)
    return pd.DataFrame({
        "step": t, "reward": reward, "oscillator": fit_oscillator(t, reward).curve,
        "exponential": fit_exponential(t, reward).curve,
    })  # fmt: skip


def reward_fit(curves: Mapping[str, pd.DataFrame]) -> Figure:
    """Reward of a run, the damped oscillator and its overdamped limit, a panel for each run (C11).

    `curves`: title → step, reward, oscillator, exponential.
    """
    with styled():
        figure, axes = panels(len(curves))
        for axis, (title, rows) in zip(axes, curves.items(), strict=True):
            axis.plot(rows["step"], rows["reward"], ".", color=GREY, markersize=3, label="reward")
            axis.plot(rows["step"], rows["oscillator"], color=VERMILLION, label="damped oscillator")
            axis.plot(rows["step"], rows["exponential"], color=BLUE, linestyle="--", label="single exponential")
            axis.set(xlabel="step", ylabel="mean reward", title=plain(title))
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


CLAIM = Claim(
    NAME,
    "reward follows the damped-oscillator model",
    "arXiv 2606.30789 (R² ≥ 0.91)",
    "exploratory",
    Rule(
        "supported: on blocks of steps that were not fitted (the first block always is) the oscillator predicts reward better "
        f"than the single exponential (sign-flip test over seeds), and explains {GOOD_FIT:.0%} of what is not noise; refuted: its "
        f"error is shown to be smaller by less than {MARGIN:.0%}",
        "seeds",
        6,
        MARGIN,
    ),
    "more seeds, longer runs, curvature probes for the stiffness",
    test,
    draw=draw,
)
