"""C5: held-out failure ≤ empirical failure + sharpness term, against a constant in the sharpness's place.

A bound with a radius large enough always holds, whatever sharpness is. The sharpness term is therefore compared with a constant that
was fixed in the same way, on the same seeds, and must correlate with the gap over seeds that fixed neither. Radius and constant are fixed
with half of the probe's prompts, and tested with the other half.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import scipy.stats
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
    mean_estimate,
    picture,
    present,
    rows_of,
    unfinished,
)
from sharpscope.analysis.claims.measures import (
    UNKNOWN_NOISE,
    accuracy,
    evaluations,
    gap_noise,
    probe_rows,
    prompt_values,
    reliability,
    train_accuracy,
    unreliable,
)
from sharpscope.analysis.figures.draw import draw_curves, regular_steps
from sharpscope.analysis.figures.style import BLUE, DASHES, GRAY, VERMILLION, Line, Picture, finish, panels, styled
from sharpscope.analysis.statistics import Correlation, correlation
from sharpscope.analysis.study import Study
from sharpscope.traces import Run

NAME = "C5"
FUNCTIONAL = "expected_failure"
SHARPNESS, FIRST_ORDER, AVERAGE = "sam", "sam_first_order", "average"
MARGIN = 0.01
CORRELATION = 0.3
"""Correlation of sharpness and gap over seeds that matters."""
FLOOR = 0.5
"""Reliability of the gap below which it cannot be predicted by anything."""
DELTA = 0.05
"""Chance with which a PAC-Bayes bound may fail."""
FRESH = 0.05
"""A run's bound counts as broken where the lower 95 % limit of its held-out failure lies above it."""


def bound_frame(study: Study) -> pd.DataFrame:
    """One row a run, evaluated step and radius: failures, sharpness, its first-order term, the bound.

    Columns: run, seed, method, step, rho, train, heldout (failures), n (held-out completions), sharpness, split (whether there are
    values by prompt), fixing and testing (sharpness of the prompts with even and with odd index; of all if not split), first_order,
    bound = train + testing, average (mean rise under Gaussian noise of that expected norm, if recorded).
    """
    rows: list[dict[str, Any]] = []
    for name, run in study.alike(study.baseline, study.treatment).items():
        whole = {q: _by_step_and_radius(probe_rows(run, q, FUNCTIONAL)) for q in (SHARPNESS, FIRST_ORDER, AVERAGE)}
        prompts = prompt_values(run, SHARPNESS, FUNCTIONAL)
        fixing, testing = (_by_step_and_radius(prompts[prompts["prompt"] % 2 == half]) for half in (0, 1))
        steps = {step for step, _ in whole[SHARPNESS]} & set(evaluations(run, "heldout"))
        for (step, rho), value in whole[SHARPNESS].items():
            outside, inside = accuracy(run, "heldout", step), train_accuracy(run, step)
            if step not in steps or outside is None or inside is None:
                continue
            row = {"run": name, "seed": run.seed, "method": run.method, "step": step, "rho": rho}
            row |= {"train": 1 - inside[0], "heldout": 1 - outside[0], "n": outside[1], "sharpness": value}
            halves = fixing.get((step, rho)), testing.get((step, rho))
            row |= {"split": None not in halves}
            row |= {"fixing": halves[0], "testing": halves[1]} if row["split"] else {"fixing": value, "testing": value}
            row |= {"first_order": whole[FIRST_ORDER].get((step, rho), math.nan)}
            row |= {"average": whole[AVERAGE].get((step, rho), math.nan)}
            rows.append(row | {"bound": row["train"] + row["testing"]})
    return pd.DataFrame(rows, columns=COLUMNS)


COLUMNS = [
    *("run", "seed", "method", "step", "rho", "train", "heldout", "n"),
    *("sharpness", "split", "fixing", "testing", "first_order", "average", "bound"),
]


def _by_step_and_radius(rows: pd.DataFrame) -> dict[tuple[int, float], float]:
    rows = rows[rows["rho"].notna()]
    means = rows.assign(rho=rows["rho"].round(12)).groupby(["step", "rho"])["value"].mean()
    keys = zip(means.index.get_level_values(0), means.index.get_level_values(1), means, strict=True)
    return {(int(step), float(rho)): float(value) for step, rho, value in keys}


def at_radius(frame: pd.DataFrame, rho: float) -> pd.DataFrame:
    """One row a run and step at the radius `rho`, which need not have been probed: linear between radii, 0 at radius 0."""
    rows = []
    for _, group in frame.sort_values("rho").groupby(["run", "step"]):
        keys = np.concatenate([[0.0], group["rho"]])
        row: dict[str, Any] = {str(name): value for name, value in group.iloc[-1].items()} | {"rho": rho}
        for name in INTERPOLATED:
            row[name] = float(np.interp(rho, keys, np.concatenate([[0.0], group[name]])))
        rows.append(row | {"bound": row["train"] + row["testing"]})
    return pd.DataFrame(rows, columns=frame.columns)


INTERPOLATED = ("sharpness", "fixing", "testing", "first_order", "average")
GRID = 2_000
"""Radii between 0 and the largest that are tried."""


def fixed_radius(calibration: pd.DataFrame) -> tuple[float, bool]:
    """The smallest radius at which the bound holds in every run of the calibration seeds; the largest if none does.

    The bound is that of the prompts that fix the radius.
    """
    largest = float(calibration.groupby("run")["rho"].max().min())
    radii = np.linspace(0.0, largest, GRID + 1)
    holds = np.ones(len(radii), dtype=bool)
    for _, group in calibration.sort_values("rho").groupby("run"):
        curve = np.interp(radii, np.concatenate([[0.0], group["rho"]]), np.concatenate([[0.0], group["fixing"]]))
        holds &= curve >= (group["heldout"] - group["train"]).iloc[0]
    return (float(radii[np.argmax(holds)]), True) if holds.any() else (largest, False)


@dataclass(frozen=True)
class Fixed:
    """Radius and constant fixed on the calibration seeds; `holds`: whether the bound holds at that radius on all of them."""

    seeds: tuple[Any, ...]
    rho: float
    holds: bool
    constant: float

    @staticmethod
    def by(last: pd.DataFrame, seeds: list[Any]) -> Fixed:
        """Calibrate on the rows of `seeds` in `last`, which holds each run's last step."""
        own = last[last["seed"].isin(seeds)]
        return Fixed(tuple(seeds), *fixed_radius(own), max(0.0, float(own["gap"].max())))


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
    """How much closer to the gap the sharpness term is than the constant, and their correlation; seeds as clusters."""
    frame = bound_frame(study)
    if not len(frame):
        return Finding(
            missing=f"no run has sam sharpness of {FUNCTIONAL} on the training probe set where it was evaluated"
        )
    last = frame[frame["step"] == frame.groupby("run")["step"].transform("max")]
    last = last.assign(gap=last["heldout"] - last["train"])
    seeds = sorted(frame["seed"].unique())
    chosen = seeds[: max(2, len(seeds) // 3)]
    if not len(last[~last["seed"].isin(chosen)]):
        return Finding(missing=f"{len(seeds)} seeds: too few to fix the radius on some and test on others")
    fixed = Fixed.by(last, chosen)
    fresh = at_radius(last[~last["seed"].isin(chosen)], fixed.rho)
    frames = {"bound": _with_fixed(frame, fixed)}
    reliable, unreliable_gap = _reliability(study, fresh)
    if unreliable_gap:
        return Finding(missing=unreliable_gap, frames=frames)
    if lacking := sorted(set(last.loc[~last["split"], "run"])):
        return Finding(
            missing=f"{len(lacking)} of {last['run'].nunique()} runs, such as {lacking[0]}, have no values by prompt of sam sharpness "
            "(table probe_prompts, from version 0.2 on): rho would be tested on the prompts that fixed it",
            frames=frames,
        )
    return replace(_tested(study, last, fresh, fixed, reliable), frames=frames)


def _with_fixed(frame: pd.DataFrame, fixed: Fixed) -> pd.DataFrame:
    """The runs at the probed radii and at the fixed one; `tested`: of a seed that did not fix it."""
    whole = pd.concat([frame, at_radius(frame, fixed.rho)], ignore_index=True)
    return whole.assign(tested=~whole["seed"].isin(fixed.seeds), fixed_rho=fixed.rho, constant=fixed.constant)


def _tested(study: Study, last: pd.DataFrame, fresh: pd.DataFrame, fixed: Fixed, reliable: float) -> Finding:
    """The finding of runs that can be tested: `fresh`, at the fixed radius, those of `last` that did not fix it."""
    by_seed = _by_seed(fresh, fixed.constant)
    advantage = by_seed["advantage"].to_numpy()
    related = correlation(by_seed["testing"].to_numpy(), by_seed["gap"].to_numpy())
    margin = study.terms.margin(NAME, MARGIN)
    tied = Evidence(related.p_value, related.value > 0, related.p_below(CORRELATION))
    broken, excess = _broken_share(fresh)
    complexities = [pac_bayes(study.finished[row["run"]], row) for _, row in fresh.iterrows()]
    complexity = np.array([value for value in complexities if value is not None])
    names = list(dict.fromkeys(last["run"]))
    return Finding(
        effect=mean_estimate(
            "how much closer the sharpness term is to the gap than a constant", advantage, "failure", "", "points"
        ),
        n=len(advantage),
        evidence=replace(every((directional(advantage, "higher", margin), tied)), parts=2),
        conditions=(
            Condition("a radius made the bound hold on every calibration seed", fixed.holds),
            Condition(f"no more than {FRESH:.0%} of the runs break the bound", excess > study.terms.level),
            Condition("the bound is below 1 on average", bool(by_seed["bound"].mean() < 1)),
        ),
        confounders=_confounders(fixed, reliable),
        others=_others(related, broken, fixed, by_seed, reliable, last, complexity),
        rows=rows_of(
            names, "probes", ("step", "rho", "value"), f"functional {FUNCTIONAL}; sam, sam_first_order, average; train"
        )
        + rows_of(names, "probe_prompts", ("step", "rho", "prompt", "value"), f"functional {FUNCTIONAL}; sam; train")
        + rows_of(names, "eval", ("step", "accuracy", "n"), "split heldout and train, temperature 1"),
        notes=(
            f"rho = {fixed.rho:g} and the constant {100 * fixed.constant:.3g} points from {len(fixed.seeds)} seeds, tested on {len(advantage)}",
            *study.elsewhere(study.baseline, study.treatment),
            *(() if len(complexity) else ("PAC-Bayes: average sharpness, parameters or training size not recorded",)),
            *unfinished(study),
        ),
        samples=(
            Sample(
                "advantage over a constant",
                advantage,
                tuple(by_seed.index),
                "higher",
                margin,
                runs=len(fresh) // len(by_seed),
                note="the test of the correlation, and Bonferroni's correction for it, are not in this power",
            ),
        ),
    )


def _reliability(study: Study, fresh: pd.DataFrame) -> tuple[float, str]:
    """Reliability of the gap over the tested runs, and why it is not sufficient; empty if it is."""
    gaps = fresh["gap"].to_numpy()
    noise = [gap_noise(study.finished[row["run"]], int(row["step"])) for _, row in fresh.iterrows()]
    if any(value is None for value in noise):
        return math.nan, UNKNOWN_NOISE
    known = np.array(noise, dtype=float)
    result = reliability(gaps, known, list(fresh["method"]))
    return result, "" if result >= FLOOR else unreliable(result, FLOOR, gaps, known)


def _by_seed(fresh: pd.DataFrame, constant: float) -> pd.DataFrame:
    """Means over the runs of a seed; `advantage`: how much closer the sharpness term is to the gap than the constant."""
    values = fresh.assign(
        advantage=(constant - fresh["gap"]).abs() - (fresh["testing"] - fresh["gap"]).abs(),
        tightness=fresh["first_order"] / fresh["sharpness"],
    )
    return values.groupby("seed")[["advantage", "testing", "gap", "tightness", "bound"]].mean()


def _confounders(fixed: Fixed, reliable: float) -> tuple[Confounder, ...]:
    return (
        Confounder("radius large enough for any bound", "a constant fixed on the same seeds is the rival"),
        Confounder(
            "sharpness that says nothing",
            "its correlation with the gap, by permutation over seeds, must be positive",
        ),
        Confounder(
            "radius chosen to fit",
            f"rho = {fixed.rho:g} and the constant were fixed on seeds {', '.join(map(str, fixed.seeds))} with the probe's even "
            "prompts, and tested on other seeds with the odd ones; the perturbation's direction is that of all prompts",
        ),
        Confounder("a gap of noise", f"its reliability must reach {FLOOR:g}; here {reliable:.2f}"),
        Confounder("two runs of a seed", "averaged: one cluster"),
        Confounder(
            "one set of puzzles",
            "the evaluated puzzles are not split, since the table eval has no values by puzzle; where all seeds share them the chances "
            "are over runs, not over training sets",
        ),
    )


def _others(
    related: Correlation,
    broken: Estimate,
    fixed: Fixed,
    by_seed: pd.DataFrame,
    reliable: float,
    last: pd.DataFrame,
    complexity: NDArray[np.float64],
) -> tuple[Estimate, ...]:
    return present(
        Estimate(
            "correlation of sharpness and gap",
            related.value,
            "1",
            None,
            related.p_value,
            related.n,
            "permutation over seeds",
        ),
        broken,
        Estimate(
            "the constant", fixed.constant, "failure", note="the largest gap of the calibration seeds", scale="points"
        ),
        mean_estimate("slack of the bound", (by_seed["testing"] - by_seed["gap"]).to_numpy(), "failure", "", "points"),
        mean_estimate(
            "first-order term / sharpness",
            by_seed["tightness"].dropna().to_numpy(),
            "1",
            "1: rho·‖∇L‖ is all of it",
        ),
        mean_estimate("gap", by_seed["gap"].to_numpy(), "failure", "", "points"),
        Estimate("reliability of the gap", reliable, "1"),
        Estimate(
            "smallest rho that would do on every seed", *_smallest(last), note="chosen after the fact: a description"
        ),
        mean_estimate(
            "PAC-Bayes bound",
            complexity,
            "failure",
            "vacuous" if len(complexity) and complexity.mean() >= 1 else "not vacuous",
            "points",
        ),
    )


def _broken_share(fresh: pd.DataFrame) -> tuple[Estimate, float]:
    """Share of the runs that break the bound, and the p-value of "no more than FRESH"."""
    broken = [_broken(row) for _, row in fresh.iterrows()]
    excess = float(scipy.stats.binomtest(sum(broken), len(broken), FRESH, alternative="greater").pvalue)
    share = Estimate(
        "runs that break the bound",
        float(np.mean(broken)),
        "share",
        p_value=excess,
        n=len(broken),
        note="p: more than 5 %",
        scale="percent",
    )
    return share, excess


def _broken(row: pd.Series) -> bool:
    """Whether held-out failure exceeds the bound by more than its sampling error (exact, one-sided, prompts as trials)."""
    failures = round(row["heldout"] * row["n"])
    limit = scipy.stats.beta.ppf(FRESH, failures, row["n"] - failures + 1) if failures else 0.0
    return bool(limit > row["bound"])


def _smallest(last: pd.DataFrame) -> tuple[float, str]:
    rho, result = fixed_radius(last)
    return (rho if result else math.nan), "L2 norm"


def bound_tightness(bound: pd.DataFrame) -> Figure:
    """Failures and the bound at the fixed radius along training, and the first-order term's share of it (C5).

    `bound`: step, seed, rho, fixed_rho, tested, train, heldout, sharpness, first_order, bound (of the tested prompts); only tested
    seeds are drawn.
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
    Rule(
        "a third of the seeds (at least 2) fixes, with half of the probe's prompts, the smallest rho at which the bound holds on all of "
        "them, and the smallest constant that does as well in its place; supported: on the other seeds the sharpness of the other "
        "prompts is closer to the gap than the constant (sign-flip test), correlates with it (permutation over seeds), and no more than "
        "5 % of the runs break the bound; "
        "refuted: it is shown to be closer by less than {margin}, or the correlation to be below "
        f"{CORRELATION:g} (Bonferroni); untestable where the gap's reliability is below {FLOOR:g}",
        "seeds that did not fix the radius",
        6,
        MARGIN,
        scale="points",
    ),
    "9 seeds or more with perturbation probes of expected_failure over a grid of rho, evaluated at the same steps with enough "
    "answers for the gap to be reliable",
    test,
    draw=draw,
)
