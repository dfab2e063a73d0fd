"""C5: held-out failure ≤ empirical failure + sharpness term, the radius fixed beforehand on other seeds."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
import scipy.stats
from matplotlib.figure import Figure

from sharpscope.analysis.claims.base import (
    Claim,
    Condition,
    Confounder,
    Estimate,
    Evidence,
    Finding,
    Rule,
    Verdict,
    mean_estimate,
    picture,
    present,
    rows_of,
    unfinished,
)
from sharpscope.analysis.claims.measures import accuracy, evaluations, probe_rows, train_accuracy
from sharpscope.analysis.figures.draw import draw_curves, regular_steps
from sharpscope.analysis.figures.style import BLUE, DASHES, GRAY, VERMILLION, Line, Picture, finish, panels, styled
from sharpscope.analysis.statistics import sign_flip_p, smallest_sign_flip_p
from sharpscope.analysis.study import Study
from sharpscope.traces import Run

NAME = "C5"
FUNCTIONAL = "expected_failure"
SHARPNESS, FIRST_ORDER, AVERAGE = "sam", "sam_first_order", "average"
DELTA = 0.05
"""Chance with which a PAC-Bayes bound may fail."""
FRESH = 0.05
"""A run's bound counts as broken where the lower 95 % limit of its held-out failure lies above it."""


def bound_frame(study: Study) -> pd.DataFrame:
    """One row a run, evaluated step and radius: failures, sharpness, its first-order term, the bound.

    Columns: run, seed, method, step, rho, train, heldout (failures), n (held-out completions), sharpness, first_order,
    bound = train + sharpness, average (mean rise under Gaussian noise of that expected norm, if recorded).
    """
    rows: list[dict[str, Any]] = []
    for name, run in study.alike(study.baseline, study.treatment).items():
        quantities = {q: _by_step_and_radius(run, q) for q in (SHARPNESS, FIRST_ORDER, AVERAGE)}
        steps = sorted({step for step, _ in quantities[SHARPNESS]} & set(evaluations(run, "heldout")))
        for step in steps:
            outside, inside = accuracy(run, "heldout", step), train_accuracy(run, step)
            if outside is None or inside is None:
                continue
            for (at, rho), value in quantities[SHARPNESS].items():
                if at == step:
                    rows.append(
                        {
                            "run": name,
                            "seed": run.seed,
                            "method": run.method,
                            "step": step,
                            "rho": rho,
                            "train": 1 - inside[0],
                            "heldout": 1 - outside[0],
                            "n": outside[1],
                            "sharpness": value,
                            "first_order": quantities[FIRST_ORDER].get((step, rho), math.nan),
                            "average": quantities[AVERAGE].get((step, rho), math.nan),
                            "bound": 1 - inside[0] + value,
                        }
                    )
    return pd.DataFrame(rows, columns=COLUMNS)


COLUMNS = [
    "run",
    "seed",
    "method",
    "step",
    "rho",
    "train",
    "heldout",
    "n",
    "sharpness",
    "first_order",
    "average",
    "bound",
]


def _by_step_and_radius(run: Run, quantity: str) -> dict[tuple[int, float], float]:
    rows = probe_rows(run, quantity, FUNCTIONAL)
    rows = rows[rows["rho"].notna()]
    means = rows.assign(rho=rows["rho"].round(12)).groupby(["step", "rho"])["value"].mean()
    places = zip(means.index.get_level_values(0), means.index.get_level_values(1), means, strict=True)
    return {(int(step), float(rho)): float(value) for step, rho, value in places}


def fixed_radius(calibration: pd.DataFrame) -> tuple[float, bool]:
    """The smallest radius at which the bound holds in every run of the calibration seeds; the largest if none does."""
    holds = (calibration["bound"] >= calibration["heldout"]).groupby(calibration["rho"]).all()
    good = holds.index[holds]
    return (float(min(good)), True) if len(good) else (float(max(holds.index)), False)


def pac_bayes(run: Run, row: pd.Series) -> float | None:
    """PAC-Bayes-kl relaxed (McAllester, Maurer 2004) of the policy under Gaussian noise of expected norm rho.

    E failure ≤ train failure + mean rise + √((KL + ln(2√n/δ))/(2n)) with KL ≤ (Σ‖Δθ‖)²/(2σ²), σ = rho/√parameters, the
    prior centered at the initial policy, n the training prompts. The path's length bounds the distance traveled.
    """
    parameters, task = run.info.get("parameters"), run.config.get("task") or {}
    size, people = task.get("train_size"), task.get("people", 1)
    path = float(run.steps.loc[run.steps["step"] <= row["step"], "update_norm"].mul(run.steps["updates"]).sum())
    if not parameters or not size or not math.isfinite(row["average"]):
        return None
    n = size * (len(people) if isinstance(people, list | tuple) else 1)
    divergence = path**2 * parameters / (2 * row["rho"] ** 2)
    return float(row["train"] + row["average"] + math.sqrt((divergence + math.log(2 * math.sqrt(n) / DELTA)) / (2 * n)))


def test(study: Study) -> Finding:
    """Slack of the bound, seeds as clusters, at the radius that other seeds fixed."""
    frame = bound_frame(study)
    if not len(frame):
        return Finding(
            missing=f"no run has sam sharpness of {FUNCTIONAL} on the training probe set where it was evaluated"
        )
    seeds = sorted(frame["seed"].unique())
    chosen = seeds[: max(2, len(seeds) // 3)]
    last = frame[frame["step"] == frame.groupby("run")["step"].transform("max")]
    calibration, fresh = last[last["seed"].isin(chosen)], last[~last["seed"].isin(chosen)]
    if not len(fresh):
        return Finding(missing=f"{len(seeds)} seeds: too few to fix the radius on some and test on others")
    rho, found = fixed_radius(calibration)
    fresh = fresh[np.isclose(fresh["rho"], rho)]
    slack = (fresh["bound"] - fresh["heldout"]).groupby(fresh["seed"]).mean().to_numpy()
    if not len(slack):
        return Finding(missing=f"the radius {rho:g} fixed on the first seeds was not probed on the others")
    broken = np.array([_broken(row) for _, row in fresh.iterrows()])
    excess = scipy.stats.binomtest(int(broken.sum()), len(broken), FRESH, alternative="greater").pvalue
    tightness = (fresh["first_order"] / fresh["sharpness"]).groupby(fresh["seed"]).mean().dropna().to_numpy()
    bounds = fresh["bound"].groupby(fresh["seed"]).mean().to_numpy()
    complexities = [pac_bayes(study.finished[row["run"]], row) for _, row in fresh.iterrows()]
    known = np.array([value for value in complexities if value is not None])
    names = list(dict.fromkeys(last["run"]))
    return Finding(
        effect=mean_estimate("slack of the bound", slack, "failure, bound − held-out"),
        n=len(slack),
        evidence=Evidence(
            sign_flip_p(slack),
            bool(slack.mean() > 0),
            min(1.0, 2 * min(sign_flip_p(slack, "less"), excess)),
            smallest_sign_flip_p(len(slack)),
        ),
        conditions=(
            Condition("a radius made the bound hold on every calibration seed", found),
            Condition("the bound is below 1 on average", bool(bounds.mean() < 1)),
        ),
        confounders=(
            Confounder(
                "radius chosen to fit", f"rho = {rho:g} was fixed on seeds {', '.join(map(str, chosen))}, not tested"
            ),
            Confounder(
                "no gap", "where held-out failure is no larger than training failure any bound holds; see the gap"
            ),
            Confounder("error of held-out failure", "a run breaks the bound only beyond its 95 % limit (prompts)"),
            Confounder("two runs of a seed", "their slack is averaged: one cluster"),
            Confounder(
                "one set of puzzles",
                "not handled where all seeds train and are tested on the same puzzles: the chances are over runs, not over "
                "training sets",
            ),
        ),
        others=present(
            Estimate(
                "runs that break the bound",
                float(broken.mean()),
                "share",
                None,
                float(excess),
                len(broken),
                "p: more than 5 %",
            ),
            mean_estimate("first-order term / sharpness", tightness, "1", "1: rho·‖∇L‖ is all of it"),
            mean_estimate(
                "gap", (fresh["heldout"] - fresh["train"]).groupby(fresh["seed"]).mean().to_numpy(), "failure"
            ),
            mean_estimate("bound", bounds, "failure"),
            Estimate(
                "smallest rho that would do", _smallest(last), "L2 norm", note="chosen after the fact: a description"
            ),
            mean_estimate(
                "PAC-Bayes bound", known, "failure", "vacuous" if len(known) and known.mean() >= 1 else "not vacuous"
            )
            if len(known)
            else None,
        ),
        rows=rows_of(
            names, "probes", ("step", "rho", "value"), f"functional {FUNCTIONAL}; sam, sam_first_order, average; train"
        )
        + rows_of(names, "eval", ("step", "accuracy", "n"), "split heldout and train, temperature 1"),
        notes=(
            f"rho = {rho:g} from {len(chosen)} seeds, tested on {len(slack)}",
            *study.elsewhere(study.baseline, study.treatment),
            *(() if len(known) else ("PAC-Bayes: average sharpness, parameters or training size not recorded",)),
            *unfinished(study),
        ),
        frames={"bound": frame.assign(tested=~frame["seed"].isin(chosen), fixed_rho=rho)},
    )


def _broken(row: pd.Series) -> bool:
    """Whether held-out failure exceeds the bound by more than its sampling error (exact, one-sided, prompts as trials)."""
    failures = round(row["heldout"] * row["n"])
    limit = scipy.stats.beta.ppf(FRESH, failures, row["n"] - failures + 1) if failures else 0.0
    return bool(limit > row["bound"])


def _smallest(last: pd.DataFrame) -> float:
    holds = (last["bound"] >= last["heldout"]).groupby(last["rho"]).all()
    good = holds.index[holds]
    return float(min(good)) if len(good) else math.nan


def bound_tightness(bound: pd.DataFrame) -> Figure:
    """Failures and the bound at the fixed radius along training, and the first-order term's share of it (C5).

    `bound`: step, seed, rho, fixed_rho, tested, train, heldout, sharpness, first_order, bound; only tested seeds are drawn.
    """
    rows = bound[np.isclose(bound["rho"], bound["fixed_rho"]) & bound["tested"]]
    rows = rows.assign(
        first_bound=rows["train"] + rows["first_order"], tightness=rows["first_order"] / rows["sharpness"]
    )
    curves = {
        "heldout": ("held-out failure", Line(BLUE, "-", "o")),
        "train": ("training failure", Line(GRAY, "-", "o")),
        "bound": ("training failure + sharpness", Line(VERMILLION, "-", "o")),
        "first_bound": ("training failure + rho·‖∇L‖", Line(VERMILLION, DASHES[1], "s")),
        "tightness": ("rho·‖∇L‖ / sharpness", Line(BLUE, "-", "o")),
    }
    rho = float(bound["fixed_rho"].iloc[0])
    with styled():
        figure, axes = panels(2)
        for column, (label, line) in curves.items():
            draw_curves(axes[column == "tightness"], regular_steps(rows, column, label), {label: line})
        title = f"rho = {rho:g}, fixed on\nseeds that are not drawn"
        axes[0].set(xlabel="step", ylabel="failure [share of completions]", yscale="log", title=title)
        axes[1].axhline(1, color=GRAY, linewidth=0.8)
        axes[1].set(
            xlabel="step",
            ylabel="rho·‖∇L‖ / sharpness [1]",
            yscale="log",
            title="1: the first-order term\nis all of it",
        )
        finish(figure, axes)
    return figure


def draw(verdict: Verdict, study: Study) -> Iterator[Picture]:
    """Bound and failures along training."""
    caption = (
        "Held-out failure and the sharpness bound along training, its radius fixed on other seeds than those drawn"
    )
    yield picture(verdict, "bound", "bound_tightness", caption, bound_tightness)


CLAIM = Claim(
    NAME,
    "held-out failure ≤ empirical failure + sharpness term",
    "arXiv 2511.00066: max over ‖e‖ ≤ rho, first order rho·‖∇L‖",
    "exploratory",
    Rule(
        "a third of the seeds (at least 2) fixes the smallest rho at which the bound holds on all of them; "
        "supported: on "
        "the other seeds its slack is above 0 (sign-flip test) and the bound below 1; refuted: the slack is "
        "shown to be "
        "below 0, or more runs break the bound beyond sampling error than 5 %",
        "seeds that did not fix the radius",
        6,
        0.0,
    ),
    "9 seeds or more with perturbation probes of expected_failure over a grid of rho, evaluated at the same steps",
    test,
    draw=draw,
)
