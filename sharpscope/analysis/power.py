"""Power of the claims' tests, from pilot runs: what a study of a given size can decide, and what deciding costs.

A claim's statistic has a value per cluster (a seed, or a step of a seed). Its variance over the clusters of the pilot is split
into the sources that more measurement reduces (answers of an evaluation, probe prompts), which fall as 1/size, and the
rest, which only more clusters reduce. Power is then simulated: normal values with that variance go through the claim's own
sign-flip tests, with the mean at the margin for `supported` and at 0 for `refuted`.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from numpy.typing import NDArray
from scipy.stats import nct, t

from sharpscope.analysis.claims import CLAIMS, Verdict, claim_names, study_of, verdicts_of, versions
from sharpscope.analysis.claims.base import Sample, clusters_needed
from sharpscope.analysis.figures.style import BLUE, GRAY, VERMILLION, Picture, finish, panels, save, styled
from sharpscope.analysis.statistics import sign_flip_tests
from sharpscope.analysis.study import Study
from sharpscope.analysis.terms import Terms
from sharpscope.analysis.text import Grid, csv_text, number
from sharpscope.traces import Run, Runs, output_folder, write_atomic

DRAWS = 1_000
"""Simulated studies for each power; its standard error is at most 1.6 points."""
TARGETS = (0.8, 0.9)
SIZES = (5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 30, 40, 60)
"""Clusters of a curve."""
MULTIPLES = (1, 2, 4, 8, 16)
"""How many times as large a source is tried."""
MOST = 20_000
"""Clusters beyond which a design is not considered."""


@dataclass(frozen=True)
class Costs:
    """Hours of a pilot run.

    Attributes:
        training: generation, updates and recording without probes.
        answers: evaluations; grows with the answers.
        probes: loss-surface probes; grows with the probe prompts.
    """

    training: float
    answers: float
    probes: float

    def run(self, multiples: Mapping[str, float]) -> float:
        """Hours of a run whose sources are `multiples` times as large."""
        probes = self.probes * multiples.get("probe prompts", 1.0)
        return self.training + self.answers * multiples.get("answers", 1.0) + probes


@dataclass(frozen=True)
class Design:
    """A size of a study, with what it would find.

    Attributes:
        clusters: n in the rule's unit.
        sizes: source → its size.
        supported: chance of `supported` if every effect is at its margin.
        refuted: chance of `refuted` if there is no effect.
        hours: of all runs, one after another; None if the pilot does not tell.
    """

    clusters: int
    sizes: Mapping[str, float]
    supported: float
    refuted: float
    hours: float | None = None


@dataclass(frozen=True)
class Power:
    """What a claim needs.

    Attributes:
        claim, version, unit: see `Claim` and `Rule`.
        pilot: clusters of the pilot.
        spread: standard deviation over the pilot's clusters of the least certain part, in the claim's unit.
        margin: of that part.
        components: source → share of the variance of that part; `cluster` is what only more clusters reduce.
        now: the pilot's size.
        curve: sizes of SIZES with the pilot's sources.
        sources: source → designs at the pilot's number of clusters (at least the fewest testable) with the source larger.
        cheapest: target → the cheapest design found that reaches it for both verdicts; None if none does.
        missing: why there is no power.
        notes: what was assumed.
        model: variance of the statistic; None where there is no power.
    """

    claim: str
    version: str
    unit: str
    pilot: int = 0
    spread: float = math.nan
    margin: float = math.nan
    components: Mapping[str, float] = field(default_factory=dict)
    now: Design | None = None
    curve: tuple[Design, ...] = ()
    sources: Mapping[str, tuple[Design, ...]] = field(default_factory=dict)
    cheapest: Mapping[float, Design | None] = field(default_factory=dict)
    missing: str = ""
    notes: tuple[str, ...] = ()
    model: Model | None = field(default=None, repr=False)

    def at(self, n: int, sizes: Mapping[str, float], level: float) -> Design | None:
        """The power of n clusters whose sources have `sizes`; a source that is not named has the pilot's."""
        if self.model is None or n < 2:
            return None
        own = self.model.sizes()
        multiples = {name: sizes[name] / size for name, size in own.items() if sizes.get(name) and size}
        rates = simulate(self.model.at(multiples), self.model.margins, n, level)
        return Design(n, own | {name: sizes[name] for name in multiples}, *rates)

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return {
            "claim": self.claim,
            "version": self.version,
            "unit_of_n": self.unit,
            "pilot_n": self.pilot,
            "standard_deviation": _finite(self.spread),
            "margin": _finite(self.margin),
            "components": dict(self.components),
            "now": _design(self.now),
            "curve": [_design(design) for design in self.curve],
            "sources": {name: [_design(design) for design in designs] for name, designs in self.sources.items()},
            "cheapest": {f"{target:g}": _design(design) for target, design in self.cheapest.items()},
            "missing": self.missing,
            "notes": list(self.notes),
        }


def power_of(
    runs: Runs,
    claims: Sequence[str] | None = None,
    *,
    baseline: str = "grpo",
    treatment: str = "grpo-sg",
    terms: Terms | None = None,
) -> list[Power]:
    """The power of each claim's tests, from pilot runs.

    Args:
        runs: the pilot; at least 3 clusters of a claim are needed for its variance.
        claims: names; None: all.
        baseline, treatment, terms: see `test_claims`.

    Raises:
        UserError: an unknown claim, or a method compared with itself.
    """
    names = claim_names(claims)
    study = study_of(runs, baseline, treatment, terms=terms)
    study.read_tokens([reducer for name in names for reducer in CLAIMS[name].reducers])
    costs = costs_of(study)
    return [power(v, costs, study.terms.level) for verdict in verdicts_of(study, names) for v in versions(verdict)]


def power(verdict: Verdict, costs: Costs | None, level: float) -> Power:
    """The power of one claim's test, from the values that its verdict rests on."""
    samples = verdict.samples
    own_unit = samples[0].unit if samples else ""
    named = Power(verdict.claim, verdict.version, own_unit or verdict.rule.unit)
    if not samples:
        why = (
            verdict.reason
            if verdict.verdict == "untestable"
            else "no power is computed: this claim is not decided by the mean of a value per cluster"
        )
        return Power(named.claim, named.version, named.unit, missing=why)
    pilot = min(len(sample.values) for sample in samples)
    if pilot < 3:
        why = f"{pilot} {named.unit}: a pilot needs 3 for a variance"
        return Power(named.claim, named.version, named.unit, pilot, missing=why)
    model = Model(samples)
    if not model.covariance.diagonal().min() > 0:
        return Power(named.claim, named.version, named.unit, pilot, missing="the pilot's values do not vary")
    fewest = max(1 if own_unit else verdict.rule.minimal_n, clusters_needed(level, len(samples)))
    hardest = int(np.argmax(np.sqrt(model.covariance.diagonal()) / model.margins))
    sizes = model.sizes()
    runs = sum(sample.runs for sample in samples) - (len(samples) - 1)
    # a counterfactual update costs no run, and its own time is not recorded
    plan = _Planner(model, costs if runs > 0 else None, level, runs, samples)
    cheapest = {target: plan.cheapest(target, fewest) for target in TARGETS}
    notes = tuple(dict.fromkeys(s.note for sample in samples for s in sample.sources if s.note))
    if model.components(hardest)["cluster"] == 0:
        notes += (
            "the sources named explain all of the spread: what more of them leaves cannot be told from this pilot",
        )
    notes += tuple(dict.fromkeys(sample.note for sample in samples if sample.note))
    if pilot < 10:
        low, high = (math.sqrt((pilot - 1) / q) for q in _chi(pilot - 1))
        notes += (
            f"the standard deviation comes from {pilot} clusters: 90 % interval from {low:.2g} to {high:.2g} times as large",
        )
    return Power(
        named.claim,
        named.version,
        named.unit,
        pilot,
        float(np.sqrt(model.covariance[hardest, hardest])),
        float(model.margins[hardest]),
        model.components(hardest),
        plan.design(pilot, {}),
        tuple(plan.design(n, {}) for n in sorted({*SIZES, pilot}) if n >= fewest),
        {name: tuple(plan.design(max(pilot, fewest), {name: float(m)}) for m in MULTIPLES) for name in sizes},
        cheapest,
        "",
        notes,
        model,
    )


def _chi(freedom: int) -> tuple[float, float]:
    from scipy.stats import chi2

    return float(chi2.ppf(0.95, freedom)), float(chi2.ppf(0.05, freedom))


class Model:
    """Variance of the parts of a claim's statistic, and how it falls with the sources' sizes.

    Attributes:
        covariance: (K, K) of the parts over the pilot's clusters; parts with other clusters are taken as independent.
        margins: (K,) positive.
    """

    def __init__(self, samples: Sequence[Sample]) -> None:
        self.samples = samples
        self.margins = np.array([sample.margin for sample in samples])
        turned = [(1 if s.direction == "higher" else -1) * np.asarray(s.values, dtype=np.float64) for s in samples]
        frame = pd.concat([pd.Series(v, index=list(s.clusters)) for v, s in zip(turned, samples, strict=True)], axis=1)
        shared = frame.dropna()
        count = len(samples)
        covariance = np.diag([float(v.var(ddof=1)) for v in turned])
        if count > 1 and len(shared) >= 3:
            scale = np.sqrt(covariance.diagonal())
            with np.errstate(invalid="ignore"):
                related = np.nan_to_num(np.corrcoef(shared.to_numpy().T))
            np.fill_diagonal(related, 1.0)
            covariance = related * scale[:, None] * scale
        self.covariance = covariance

    def sizes(self) -> dict[str, float]:
        """Source → size in the pilot."""
        return {source.name: source.size for sample in self.samples for source in sample.sources}

    def _shares(self, part: int) -> dict[str, float]:
        """Source → variance, scaled down together where they exceed the whole."""
        total = float(self.covariance[part, part])
        variances = {source.name: source.variance for source in self.samples[part].sources}
        over = max(1.0, sum(variances.values()) / total)
        return {name: value / over for name, value in variances.items()}

    def components(self, part: int) -> dict[str, float]:
        """Source → share of the variance of a part; `cluster` is the rest."""
        total = float(self.covariance[part, part])
        shares = {name: value / total for name, value in self._shares(part).items()}
        return {"cluster": max(0.0, 1 - sum(shares.values())), **shares}

    def at(self, multiples: Mapping[str, float]) -> NDArray[np.float64]:
        """(K, K) covariance with sources `multiples` times as large."""
        saved = [
            sum(value * (1 - 1 / multiples.get(name, 1.0)) for name, value in self._shares(part).items())
            for part in range(len(self.samples))
        ]
        return np.asarray(self.covariance - np.diag(saved))


def simulate(
    covariance: NDArray[np.float64],
    margins: NDArray[np.float64],
    n: int,
    level: float,
    seed: int = 0,
    draws: int = DRAWS,
) -> tuple[float, float]:
    """Chance of `supported` with every mean at its margin, and of `refuted` with every mean 0, for n clusters.

    Every part must support; one excluded part refutes, after Bonferroni's correction, as in `every`.
    """
    values, vectors = np.linalg.eigh(covariance)
    root = vectors * np.sqrt(np.maximum(values, 0.0))  # (K, K)
    count = len(margins)
    noise = np.random.default_rng([seed, n]).normal(size=(draws, n, count)) @ root.T
    outcomes = []
    for means in (margins, np.zeros(count)):
        for_it, against, right = np.zeros(draws), np.ones(draws), np.ones(draws, dtype=bool)
        for part in range(count):
            data = noise[:, :, part] + means[part]
            both, below = sign_flip_tests(data, float(margins[part]))
            for_it, against = np.maximum(for_it, both), np.minimum(against, below)
            right &= data.mean(axis=1) > 0
        refuted = count * against <= level
        outcomes.append((float(np.mean((for_it <= level) & right & ~refuted)), float(np.mean(refuted))))
    return outcomes[0][0], outcomes[1][1]


def approximate(deviation: float, margin: float, n: int, level: float, parts: int = 1) -> float:
    """The smaller of both powers by Student's t, see `students`."""
    return min(students([deviation], [margin], n, level, parts))


def students(
    deviations: Sequence[float], margins: Sequence[float], n: int, level: float, parts: int | None = None
) -> tuple[float, float]:
    """(supported at the margin, refuted without an effect) by Student's t: two-sided at `level`, one-sided at level/parts.

    Of several parts the least certain one counts, supported as if they were independent; `parts` is their number unless given.
    """
    count = len(deviations) if parts is None else parts
    pairs = [(d, m) for d, m in zip(deviations, margins, strict=True) if d > 0]
    if n < 2 or not pairs:
        return (0.0, 0.0) if n < 2 else (1.0, 1.0)
    shift = min(m / d for d, m in pairs) * math.sqrt(n)
    support = float(nct.sf(t.ppf(1 - level / 2, n - 1), n - 1, shift))
    return support**count, float(nct.sf(t.ppf(1 - level / count, n - 1), n - 1, shift))


class _Planner:
    """Designs of a claim and their cost."""

    def __init__(self, model: Model, costs: Costs | None, level: float, runs: int, samples: Sequence[Sample]) -> None:
        self.model, self.costs, self.level, self.runs = model, costs, level, runs
        steps = [len({c for c in sample.clusters if isinstance(c, tuple)}) for sample in samples]
        seeds = [len({c[0] for c in sample.clusters if isinstance(c, tuple)}) for sample in samples]
        self.per_seed = max((a / b for a, b in zip(steps, seeds, strict=True) if b), default=1.0)

    def hours(self, n: int, multiples: Mapping[str, float]) -> float | None:
        """Hours of n clusters with the sizes of the sources of variance multiplied; None if no time was recorded."""
        return None if self.costs is None else math.ceil(n / self.per_seed) * self.runs * self.costs.run(multiples)

    def design(self, n: int, multiples: Mapping[str, float]) -> Design:
        """The design with its powers, simulated."""
        sizes = {name: size * multiples.get(name, 1.0) for name, size in self.model.sizes().items()}
        rates = simulate(self.model.at(multiples), self.model.margins, n, self.level) if n > 1 else (0.0, 0.0)
        return Design(n, sizes, *rates, self.hours(n, multiples))

    def cheapest(self, target: float, fewest: int) -> Design | None:
        """The cheapest design whose powers both reach `target`: candidates by Student's t, the best of them simulated."""
        names = list(self.model.sizes())
        candidates = []
        for chosen in itertools.product(MULTIPLES, repeat=len(names)):
            multiples = dict(zip(names, map(float, chosen), strict=True))
            n = self._enough(self.model.at(multiples), target, fewest)
            if n is not None:
                candidates.append((self._cost(n, multiples), n, multiples))
        best: tuple[float, Design] | None = None
        for _, n, multiples in sorted(candidates, key=lambda item: item[0])[:3]:
            reach = self._reach(n, multiples, target, fewest)
            if reach is not None:
                cost = self._cost(reach.clusters, multiples)
                if best is None or cost < best[0]:
                    best = cost, reach
        return None if best is None else best[1]

    def _cost(self, n: int, multiples: Mapping[str, float]) -> float:
        """Hours; where they are not known, clusters × (1 + how many times as large each source is)."""
        hours = self.hours(n, multiples)
        return n * (1 + sum(multiples.values())) if hours is None else hours

    def _enough(self, covariance: NDArray[np.float64], target: float, fewest: int) -> int | None:
        """The fewest clusters whose powers by Student's t both reach `target`; None if more than MOST."""
        deviations, margins = np.sqrt(covariance.diagonal()).tolist(), self.model.margins.tolist()
        if not any(deviation > 0 for deviation in deviations):
            return fewest
        low, high = fewest, fewest
        while min(students(deviations, margins, high, self.level)) < target:
            low, high = high + 1, 2 * high
            if high > MOST:
                return None
        while low < high:
            middle = (low + high) // 2
            if min(students(deviations, margins, middle, self.level)) >= target:
                high = middle
            else:
                low = middle + 1
        return high

    def _reach(self, n: int, multiples: Mapping[str, float], target: float, fewest: int) -> Design | None:
        """The smallest simulated n near the approximate one."""
        if n > 500:  # the approximation is as good as the simulation
            deviations = np.sqrt(self.model.at(multiples).diagonal())
            found = students(deviations.tolist(), self.model.margins.tolist(), n, self.level)
            return Design(n, self._sizes(multiples), *found, self.hours(n, multiples))
        step = max(1, n // 20)
        design = self.design(n, multiples)
        good = min(design.supported, design.refuted) >= target
        for _ in range(25):
            following = n + (-step if good else step)
            if following < fewest:
                break
            other = self.design(following, multiples)
            enough = min(other.supported, other.refuted) >= target
            if good and not enough:
                break
            n, design = following, other
            if enough and not good:
                break
        return design if min(design.supported, design.refuted) >= target else None

    def _sizes(self, multiples: Mapping[str, float]) -> dict[str, float]:
        return {name: size * multiples.get(name, 1.0) for name, size in self.model.sizes().items()}


def costs_of(study: Study) -> Costs | None:
    """Hours of a run of the pilot, means over its finished runs; None where no time was recorded."""
    costs = [cost for run in study.finished.values() if (cost := _run_costs(run)) is not None]
    if not costs:
        return None
    return Costs(
        *(float(np.mean([getattr(cost, name) for cost in costs])) for name in ("training", "answers", "probes"))
    )


def _run_costs(run: Run) -> Costs | None:
    steps = run.steps
    if not {"generation_s", "training_s", "recording_s"} <= set(steps.columns) or not len(steps):
        return None
    probes = float(run.probes["seconds"].sum()) if "seconds" in run.probes else 0.0
    generation = float(steps["generation_s"].sum())
    whole = generation + float(steps[["training_s", "recording_s"]].sum().sum())
    rollout = run.config.get("rollout", {})
    completions = len(steps) * int(rollout.get("prompts_per_step", 1)) * int(rollout.get("group_size", 1))
    answers = float((run.eval["n"] * run.eval["k"]).sum()) * generation / completions
    return Costs(max(0.0, whole - probes) / 3600, answers / 3600, probes / 3600)


def power_table(powers: Sequence[Power]) -> pd.DataFrame:
    """One row per claim: pilot, spread, components, power now, and the cheapest design for each target."""
    rows = []
    for power in powers:
        row: dict[str, Any] = {
            "claim": power.claim,
            "version": power.version,
            "pilot n": power.pilot,
            "unit": power.unit,
            "SD / margin": power.spread / power.margin if power.margin else math.nan,
            "variance": ", ".join(f"{name} {share:.0%}" for name, share in power.components.items()),
            "supported now": power.now.supported if power.now else math.nan,
            "refuted now": power.now.refuted if power.now else math.nan,
        }
        for target in TARGETS:
            row[f"for {target:.0%}"] = design_text(power.cheapest.get(target)) if not power.missing else ""
        rows.append(row | {"missing": power.missing})
    return pd.DataFrame(rows)


def design_text(design: Design | None) -> str:
    """A design in words, such as `13 clusters × 1,600 answers, 4.2 h`; a cluster is the claim's unit."""
    if design is None:
        return f"more than {MOST:,}"
    sizes = "".join(f" × {size:,.0f} {name}" for name, size in design.sizes.items())
    hours = "" if design.hours is None else f", {design.hours:{',.0f' if design.hours >= 100 else '.2g'}} h"
    return f"{design.clusters:,} clusters{sizes}{hours}"


NOTE = (
    "Chance that a study of that many clusters supports the claim if its effect is at the margin (solid) and refutes it if there is none "
    "(dashed), by Student's t with the spread of these runs; gray: these runs, and 80 %. `sharpscope power` simulates the rules' own tests."
)


def outline(verdicts: Sequence[Verdict], level: float) -> tuple[Grid, Picture] | None:
    """Power of the tests of `verdicts` by Student's t alone, without simulation: a table and a figure; None without a variance."""
    rows, powers = [], []
    for verdict in (version for each in verdicts for version in versions(each)):
        pilot = min((len(sample.values) for sample in verdict.samples), default=0)
        model = Model(verdict.samples) if pilot >= 3 else None
        if model is None or not model.covariance.diagonal().min() > 0:
            continue
        deviations = np.sqrt(model.covariance.diagonal()).tolist()
        margins = model.margins.tolist()
        unit = verdict.samples[0].unit or verdict.rule.unit
        sizes = [n for n in sorted({*SIZES, pilot}) if n >= clusters_needed(level, len(deviations))]
        now, *curve = (Design(n, {}, *students(deviations, margins, n, level)) for n in (pilot, *sizes))
        enough = next(
            (str(n) for n in range(2, 1000) if min(students(deviations, margins, n, level)) >= TARGETS[0]), "over 1,000"
        )
        hardest = max(d / m for d, m in zip(deviations, margins, strict=True))
        found = Power(verdict.claim, verdict.version, unit, pilot, now=now, curve=tuple(curve))
        powers.append(found)
        name = f"{verdict.claim}{f' ({verdict.version})' if verdict.version else ''}"
        rows.append(
            (
                name,
                f"{pilot} {unit}",
                f"{hardest:.2g}",
                f"{now.supported:.0%}",
                f"{now.refuted:.0%}",
                f"{enough} {unit}",
            )
        )
    if not rows:
        return None
    columns = ("claim", "here", "SD / margin", "supported at the margin", "refuted without effect", "for 80 % of both")
    return Grid("Power", columns, tuple(rows)), Picture("power", NOTE, power_figure(powers))


def power_text(powers: Sequence[Power]) -> str:
    """The table as text for a terminal."""
    lines = []
    for power in powers:
        name = f"{power.claim}{f' ({power.version})' if power.version else ''}"
        if power.missing or power.now is None:
            lines.append(f"{name}: {power.missing}")
            continue
        parts = ", ".join(f"{source} {share:.0%}" for source, share in power.components.items())
        lines.append(
            f"{name}: {power.pilot} {power.unit}; SD {number(power.spread)} ({parts}), margin {number(power.margin)}; now supported "
            f"{power.now.supported:.0%} at the margin, refuted {power.now.refuted:.0%} without an effect"
        )
        lines += [f"    {target:.0%} of both: {design_text(design)}" for target, design in power.cheapest.items()]
        lines += [f"    {note}" for note in power.notes]
    return "\n".join(lines)


def power_figure(powers: Sequence[Power]) -> Figure | None:
    """Power over the number of clusters, a panel for each claim; None if there is none. The pilot's size is marked."""
    shown = [power for power in powers if power.curve]
    if not shown:
        return None
    with styled():
        figure, axes = panels(len(shown), columns=3, height=1.6)
        for axis, power in zip(axes, shown, strict=False):
            n = [design.clusters for design in power.curve]
            axis.plot(n, [d.supported for d in power.curve], color=BLUE, label="supported, effect at the margin")
            axis.plot(n, [d.refuted for d in power.curve], "--", color=VERMILLION, label="refuted, no effect")
            axis.axhline(TARGETS[0], color=GRAY, linewidth=0.6)
            axis.axvline(power.pilot, color=GRAY, linewidth=0.6, linestyle=":")
            title = f"{power.claim}{f' ({power.version})' if power.version else ''}"
            axis.set(ylim=(0, 1.02), xlabel="clusters", ylabel="power", title=title)
        finish(figure, axes)
    return figure


def write_power(powers: Sequence[Power], out: str | Path) -> list[Path]:
    """Write power.json, power.csv and the figure power.png (and .svg) into `out`; returns the paths."""
    folder = output_folder(out)
    paths = [folder / "power.json", folder / "power.csv"]
    text = json.dumps([power.to_dict() for power in powers], indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    write_atomic(paths[0], text)
    write_atomic(paths[1], csv_text(power_table(powers)))
    figure = power_figure(powers)
    return paths if figure is None else [*paths, *save(figure, folder, "power")]


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _design(design: Design | None) -> dict[str, Any] | None:
    if design is None:
        return None
    return {
        "n": design.clusters,
        "sizes": dict(design.sizes),
        "supported": design.supported,
        "refuted": design.refuted,
        "hours": design.hours,
    }
