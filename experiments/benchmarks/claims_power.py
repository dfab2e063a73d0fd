"""Whether `sharpscope power` predicts what the claims' rules decide: synthetic studies with a planted effect or none.

    python -m experiments.benchmarks claims-power --out experiments/benchmarks/claims-power.md

Studies are made of the frames that the rules read, without any training. A large pilot gives the recommended size; 200 studies of
that size with the effect at the margin and 200 without any go through the claim's own code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.stats import binomtest

from sharpscope.analysis.claims import CLAIMS
from sharpscope.analysis.claims.base import Claim, Verdict, decide
from sharpscope.analysis.power import TARGETS, Design, power
from sharpscope.analysis.study import Pairing, Study
from sharpscope.analysis.tokens import Reduced
from tests.analysis.claims.frames import FrameRun, frame_run, probe_frame

LEVEL = 0.05
PILOT = 400
"""Clusters of the pilot: enough to know its standard deviation within 4 %."""
METHODS = ("grpo", "grpo-sg")
Rng = np.random.Generator
Sizes = Mapping[str, float]
Maker = Callable[[int, float, Rng, Sizes], Study]


@dataclass(frozen=True)
class Case:
    """A claim with studies in which its effect is known.

    Attributes:
        claim: name.
        beside: whether it is the version beside.
        margin: planted effect that equals the rule's margin; 0 is none.
        make: (clusters, effect, rng, sizes of the sources) → study.
    """

    claim: str
    beside: bool
    margin: float
    make: Maker

    @property
    def rule(self) -> Claim:
        """The version of the claim that is tested."""
        claim = CLAIMS[self.claim]
        return claim.beside if self.beside and claim.beside is not None else claim

    @property
    def name(self) -> str:
        """Claim and version."""
        return f"{self.claim} ({self.rule.version})" if self.rule.version else self.claim

    def verdict(self, n: int, effect: float, rng: Rng, sizes: Sizes) -> Verdict:
        """The verdict on one study."""
        return decide(self.rule, self.rule.test(self.make(n, effect, rng, sizes)), METHODS)


@dataclass(frozen=True)
class Found:
    """What power predicted of a size, and how often it came true.

    Attributes:
        name: claim and version.
        unit: what n counts.
        design: recommended for 80 %, with the predictions.
        studies: of each kind.
        supported: studies with the effect at the margin that are supported.
        refuted: studies without an effect that are refuted.
        wrongly_refuted, wrongly_supported: of the same studies.
    """

    name: str
    unit: str
    design: Design
    studies: int
    supported: int
    refuted: int
    wrongly_refuted: int
    wrongly_supported: int

    @property
    def holds(self) -> bool:
        """At least 80 % right and no more than 5 % wrong, and predictions within 5 points, beyond what the count scatters."""
        wrong = max(self.wrongly_supported, self.wrongly_refuted)
        right = ((self.supported, self.design.supported), (self.refuted, self.design.refuted))
        return (
            all(near(count, self.studies, predicted) for count, predicted in right)
            and all(binomtest(count, self.studies, TARGETS[0], "less").pvalue > 0.01 for count, _ in right)
            and binomtest(wrong, self.studies, LEVEL, "greater").pvalue > 0.01
        )


def near(count: int, studies: int, predicted: float) -> bool:
    """Whether the share lies within 5 points of the prediction, or an exact test at 1 % does not reject that it does."""
    low, high = max(0.0, predicted - 0.05), min(1.0, predicted + 0.05)
    below, above = binomtest(count, studies, low, "less").pvalue, binomtest(count, studies, high, "greater").pvalue
    return low <= count / studies <= high or min(below, above) > 0.01


def measure(case: Case, studies: int = 200, pilot: int = PILOT, seed: int = 0) -> Found:
    """Recommend a size from a pilot without an effect, and count verdicts on studies of that size."""
    rng = np.random.default_rng([seed, *case.rule.key.encode()])
    found = power(case.verdict(pilot, 0.0, rng, {}), None, LEVEL)
    design = found.cheapest[TARGETS[0]]
    if design is None:
        raise RuntimeError(f"{case.rule.key}: no size reaches 80 %: {found.missing}")
    outcomes = [
        [case.verdict(design.clusters, effect, rng, design.sizes).verdict for _ in range(studies)]
        for effect in (case.margin, 0.0)
    ]
    there, absent = outcomes
    return Found(
        case.name,
        found.unit,
        design,
        studies,
        there.count("supported"),
        absent.count("refuted"),
        there.count("refuted"),
        absent.count("supported"),
    )


# Studies of runs: the paired values that a rule reads, in place of the runs' tables.

_RUN = frame_run(columns={"zero_std_groups": 0.0}, answers=1_600)
CONTROLS = ("grpo-sg-reverse", "grpo-sg-shuffled")
RATES = (5e-5, 1e-4, 2e-4)


def _run(method: str, seed: int = 0, lr: float = 1e-4, **tables: Any) -> FrameRun:
    config = {**_RUN.config, "optimizer": {**_RUN.config["optimizer"], "lr": lr}, "method": {"name": method}}
    return replace(_RUN, name=f"{method}-{lr:g}-{seed}", method=method, seed=seed, config=config, **tables)


class Tidy(Study):
    """A study whose pairs have the values of `frames`: learning rate or name of the rival → seed, baseline, treatment."""

    def __init__(self, runs: Sequence[FrameRun], frames: Mapping[Any, pd.DataFrame] | None = None) -> None:
        super().__init__({run.name: run for run in runs}, *METHODS)  # type: ignore[misc]  # has what claims read of a run
        self.frames = frames or {}

    def differences(self, pairing: Pairing, measure: Any) -> pd.DataFrame:
        """The values of the rival that the pairs name; none where it has none."""
        if not pairing.pairs:
            return super().differences(pairing, measure)
        rival = self.finished[pairing.pairs[0].baseline]
        key = rival.method if rival.method in self.frames else rival.config["optimizer"]["lr"]
        frame: pd.DataFrame = self.frames[key]
        return frame.assign(difference=frame["treatment"] - frame["baseline"])


def paired(frames: Mapping[Any, pd.DataFrame]) -> Study:
    """Runs of the treatment and of every rival, which differ in nothing but `frames`."""
    seeds = range(len(next(iter(frames.values()))))
    rivals = [("grpo", key) if isinstance(key, float) else (key, 1e-4) for key in frames]
    named = {method: _run(method, 0, rate) for method, rate in rivals if method != "grpo"}  # one table for all seeds
    runs = [replace(_TREATED, name=f"{_TREATED.name}{seed}", seed=seed) for seed in seeds]
    for method, rate in rivals:
        first = named.get(method) or _run(method, 0, rate)
        runs += [replace(first, name=f"{first.name}{seed}", seed=seed) for seed in seeds]
    return Tidy(runs, frames)


_TREATED = _run("grpo-sg")


def accuracies(*rivals: Any) -> Maker:
    """Held-out accuracies with the luck of a seed (5 points), of a run (0.8 points) and of the answers drawn."""

    def make(n: int, effect: float, rng: Rng, sizes: Sizes) -> Study:
        answers = int(sizes.get("answers", 1_600))
        level = 0.5 + 0.05 * rng.normal(size=n)

        def drawn(mean: NDArray[np.float64]) -> NDArray[np.float64]:
            return rng.binomial(answers, np.clip(mean + 0.008 * rng.normal(size=n), 0, 1)) / answers

        treated = drawn(level + effect)
        return paired({rival: frame_of(drawn(level), treated) for rival in rivals})

    return make


def frame_of(baseline: NDArray[np.float64], treatment: NDArray[np.float64]) -> pd.DataFrame:
    """The tidy frame of pairs."""
    return pd.DataFrame({"seed": range(len(baseline)), "baseline": baseline, "treatment": treatment})


def ratios(noise: float) -> Maker:
    """Positive values whose log ratio scatters by `noise`; the factor between the methods is 1 − effect."""

    def make(n: int, effect: float, rng: Rng, sizes: Sizes) -> Study:
        baseline = np.exp(0.2 * rng.normal(size=n))
        return paired({"grpo": frame_of(baseline, baseline * (1 - effect) * np.exp(noise * rng.normal(size=n)))})

    return make


def sharpness(n: int, effect: float, rng: Rng, sizes: Sizes) -> Study:
    """Sharpness of pairs probed on the same prompts; the factor between the methods is 1 − effect, the luck of a run 5 %.

    What a prompt adds is common to all runs but for noise of 25 % in each. The pilot keeps the values by prompt.
    """
    prompts = int(sizes.get("probe prompts", 24))
    common = 0.5 * np.random.default_rng(7).normal(size=prompts)
    level = np.exp(0.3 * rng.normal(size=n))
    parts = []
    for factor in (1.0, 1 - effect):
        luck = level * factor * np.exp(0.05 * rng.normal(size=n))
        parts.append(luck[:, None] * (1 + common + 0.25 * rng.normal(size=(n, prompts))))
    frames = {"grpo": frame_of(*(values.mean(axis=1) for values in parts))}
    if sizes:
        return paired(frames)
    runs = []
    for seed in range(n):
        for method, values in zip(METHODS, parts, strict=True):
            table = probe_frame([{"step": 40, "quantity": "sam", "rho": 0.05, "value": values[seed].mean()}])
            first = table.drop(columns=["value", "converged"])
            each = first.merge(pd.DataFrame({"prompt": range(prompts), "value": values[seed]}), how="cross")
            runs.append(_run(method, seed, probes=table, probe_prompts=each))
    return Tidy(runs, frames)


# Studies of tokens: what the reducers make of them.


def _reduced(claim: str, rows: Iterator[Reduced], runs: Sequence[FrameRun]) -> Study:
    study = Tidy(runs)
    study.reduced[claim] = list(rows)
    return study


def shares(n: int, effect: float, rng: Rng, sizes: Sizes) -> Study:
    """Share of the lucky tokens lowered by 1 − effect, both by the weights on the same tokens and between runs; noise 5 %."""
    runs = [_run(method, seed) for seed in range(n) for method in METHODS]

    def rows() -> Iterator[Reduced]:
        for run in runs:
            treated = run.method == "grpo-sg"
            plain, sure = 0.1 * np.exp(0.035 * rng.normal()), 0.5 * np.exp(0.007 * rng.normal())
            factor = (1 - effect) * np.exp(0.05 * rng.normal()) if treated else 1.0
            keys = ("lucky", "lucky_unweighted", "confident", "confident_unweighted")
            values = dict(zip(keys, (plain * factor, plain, sure, sure * np.exp(0.01 * rng.normal())), strict=True))
            yield Reduced(run.name, run.method, run.seed, 10, 1000, values)

    return _reduced("C13", rows(), runs)


def influences(n: int, effect: float, rng: Rng, sizes: Sizes) -> Study:
    """Influence of the lowest tenth −effect, of the others 0, with noise 0.1 a step; one step a seed."""
    runs = [_run("grpo", seed) for seed in range(n)]

    def rows() -> Iterator[Reduced]:
        for run in runs:
            low, rest = 0.1 * rng.normal() - effect, 0.01 * rng.normal()
            values = {"low": low, "rest": rest, "low_positive": low, "low_negative": low, "cells": [{}]}
            yield Reduced(run.name, run.method, run.seed, 10, 1000, values)

    return _reduced("C9", rows(), runs)


# Studies of counterfactual updates.


def forks(outcome: str, better: str, rivals: Sequence[str], noise: float, reference: str = "grpo") -> Maker:
    """Batches of one state. The reference lowers the outcome by 0.02, the arm `better` by 1 + effect as much.

    Of `sam_sharpness` the arm's value is 1 − effect times the reference's; the arm `low` raises the outcome by the effect instead.
    """

    def make(n: int, effect: float, rng: Rng, sizes: Sizes) -> Study:
        tables = []
        for arm in dict.fromkeys((reference, better, *rivals)):
            own = (effect if arm == better else 0.0) + noise * rng.normal(size=n)
            if outcome == "sam_sharpness":
                value = 2 * np.exp(np.log1p(-effect if arm == better else 0.0) + noise * rng.normal(size=n))
            elif arm in ("low", "high"):
                value = 0.5 + 0.02 * own
            else:
                value = 0.5 - 0.02 * (1 + own)
            base = {"step": 10, "fork": "a", "batch": range(n), "arm": arm, "reference": reference, "valid": True}
            made = {"comparison": "kl", "outcome": outcome, "value": value, "start": 0.5}
            turned = {"comparison": "step", "outcome": "update_rotation", "value": 12.0 * (arm != reference)}
            tables += [pd.DataFrame(base | made), pd.DataFrame(base | turned)]
        return Tidy([_run("grpo", forks=pd.concat(tables, ignore_index=True))])

    return make


CASES = (
    Case("C4", False, 0.1, sharpness),
    Case("C4", True, 0.01, forks("sam_sharpness", "grpo-sg", (), 0.008)),
    Case("C7", False, 0.02, accuracies("grpo")),
    Case("C7", True, 0.1, forks("heldout_failure", "grpo-sg", (), 0.08)),
    Case("C8", False, 0.1, ratios(0.1)),
    Case("C9", False, 0.1, forks("heldout_failure", "low", ("high",), 0.08)),
    Case("C9", True, 0.1, influences),
    Case("C10", False, 0.02, accuracies(*CONTROLS)),
    Case("C10", True, 0.1, forks("heldout_failure", "grpo-sg", CONTROLS, 0.08)),
    Case("C13", False, 0.05, shares),
    Case("C13", True, 0.05, shares),
    Case("C14", False, 0.02, accuracies(*RATES)),
)


PAGE = """# Predictions of `sharpscope power` against synthetic studies

`python -m experiments.benchmarks claims-power --out experiments/benchmarks/claims-power.md`. Synthetic studies with a planted
effect, made of the values that a claim's rule reads; nothing is trained. A pilot of {pilot} clusters without an effect gives
the size that `power` recommends for 80 %. The claim's own code then decides {studies} studies of that size with every effect at its
margin, and {studies} without any effect. Shares with exact 95 % intervals; the simulation behind a prediction has a
standard error of 1.3 points. A claim of several parts (C9, C10, C14) has every part at its margin.

{table}
{verdict}

With a pilot of few clusters the size is less certain than this: the standard deviation of 12 clusters is known within a factor
of 0.7 to 1.6 (90 % interval), which `power` prints.

C1 and C2 need no power, C3 and C6 are tested by the same sign flips, and C5, C11 and C12 have parts besides a mean (a
correlation, a frequency), which `power` says it leaves out.
"""


def page(results: Sequence[Found]) -> str:
    """The page of results."""
    studies = results[0].studies
    failed = [r.name for r in results if not r.holds]
    verdict = (
        f"Not as predicted: {', '.join(failed)}."
        if failed
        else "Every count is consistent with being right at least 80 % of the time and wrong at most 5 %, and with a share within 5 points "
        "of the prediction (exact tests at 1 %)."
    )
    left = [case.name for case in CASES if case.name not in {r.name for r in results}]
    verdict += f" Not measured here: {', '.join(left)}." if left else ""
    return PAGE.format(studies=studies, pilot=PILOT, table=table(results), verdict=verdict)


def share(count: int, studies: int) -> str:
    """A share in per cent with its exact 95 % interval."""
    ends = binomtest(count, studies).proportion_ci(method="exact")
    return f"{count / studies:.0%} [{ends.low:.0%}, {ends.high:.0%}]"


def table(results: Sequence[Found]) -> str:
    """The results as Markdown."""
    lines = [
        "| claim | recommended for 80 % | supported at the margin: predicted | observed | refuted without effect: predicted | observed "
        "| wrongly refuted | wrongly supported |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in results:
        sizes = "".join(f", {name} {size:,.0f}" for name, size in r.design.sizes.items())
        cells = [r.name, f"{r.design.clusters} {r.unit}{sizes}"]
        cells += [f"{r.design.supported:.0%}", share(r.supported, r.studies)]
        cells += [f"{r.design.refuted:.0%}", share(r.refuted, r.studies)]
        cells += [share(r.wrongly_refuted, r.studies), share(r.wrongly_supported, r.studies)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
