"""What a claim is, what testing it found, and how a verdict follows by a rule stated beforehand."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from numpy.typing import NDArray

from sharpscope.analysis.figures.draw import draw_points
from sharpscope.analysis.figures.style import BLUE, GRAY, Picture, finish, panels, plain, styled
from sharpscope.analysis.statistics import Interval, contrast_interval, sign_flip_p, smallest_sign_flip_p
from sharpscope.analysis.study import Pairing, Study
from sharpscope.analysis.tokens import Reducer

Outcome = Literal["supported", "refuted", "inconclusive", "untestable"]
Role = Literal["primary", "exploratory"]
Direction = Literal["higher", "lower"]

LEVEL = 0.05


@dataclass(frozen=True)
class Rule:
    """The decision, written before the data.

    Attributes:
        text: when the verdict is `supported` and when `refuted`.
        unit: unit of n, e.g. "pairs of runs with one seed".
        minimal_n: with fewer the claim is untestable.
        margin: the smallest effect that matters, in the effect's unit; an effect shown to be smaller refutes.
        level: error rate of wrongly calling the claim supported; for primary claims that of the whole family.
    """

    text: str
    unit: str
    minimal_n: int
    margin: float | None = None
    level: float = LEVEL


@dataclass(frozen=True)
class Estimate:
    """A number with its interval, in the unit named; `p_value` belongs to the test that the note names, if any."""

    name: str
    value: float
    unit: str
    interval: Interval | None = None
    p_value: float | None = None
    n: int | None = None
    note: str = ""


@dataclass(frozen=True)
class Confounder:
    """Another possible cause of the effect, and how it was handled."""

    name: str
    handling: str


@dataclass(frozen=True)
class Rows:
    """What was read from one run."""

    run: str
    table: str
    columns: tuple[str, ...]
    filter: str


@dataclass(frozen=True)
class Condition:
    """A requirement of `supported` besides the test."""

    text: str
    met: bool


@dataclass(frozen=True)
class Evidence:
    """The tests of an effect.

    Attributes:
        p_supported: p-value of the test whose rejection supports the claim if the effect points as claimed.
        as_claimed: whether the effect points as claimed.
        p_refuted: p-value of the test whose rejection at half the level refutes the claim.
        smallest_p: the smallest p_supported that the sample size allows.
    """

    p_supported: float | None = None
    as_claimed: bool = False
    p_refuted: float | None = None
    smallest_p: float = 0.0


@dataclass(frozen=True)
class Finding:
    """What a claim's module found; `decide` turns it into a verdict.

    Attributes:
        effect: the statistic that the rule is about; None if there is nothing to compute it from.
        n: sample size in the rule's unit.
        evidence: the tests of the effect.
        missing: what is not recorded, if the claim cannot be tested at all.
        conditions: further requirements of `supported`.
        confounders, others, rows: see `Verdict`.
        notes: remarks for a reader.
        frames: name → data behind the numbers, for figures.
    """

    effect: Estimate | None = None
    n: int = 0
    evidence: Evidence = Evidence()
    missing: str = ""
    conditions: tuple[Condition, ...] = ()
    confounders: tuple[Confounder, ...] = ()
    others: tuple[Estimate, ...] = ()
    rows: tuple[Rows, ...] = ()
    notes: tuple[str, ...] = ()
    frames: Mapping[str, pd.DataFrame] = field(default_factory=dict)


@dataclass(frozen=True)
class Claim:
    """One published claim and how it is tested.

    Attributes:
        name: C1 … C13.
        title: the claim in a few words.
        source: the publication.
        role: primary claims share one error rate (Holm); the others are exploratory, each at its own.
        rule: the decision.
        settles: what further data would settle an open question.
        test: Study → Finding.
        reducers: what it needs of the token tables, computed while they are streamed once for all claims.
        draw: (verdict, study) → its figures. Those that show every setting of a study are drawn by the study instead.
    """

    name: str
    title: str
    source: str
    role: Role
    rule: Rule
    settles: str
    test: Callable[[Study], Finding]
    reducers: tuple[Reducer, ...] = ()
    draw: Callable[[Verdict, Study], Iterator[Picture]] | None = None


@dataclass(frozen=True)
class Verdict:
    """The result of testing a claim on some runs, with everything needed to check it.

    Attributes:
        claim, title, source, role: see `Claim`.
        verdict: supported | refuted | inconclusive | untestable.
        reason: why this verdict, in one sentence.
        effect: the rule's statistic with its interval; None if it could not be computed.
        p_value: of the test for the claim; None if there is none.
        p_adjusted: the same after Holm over the primary claims; equal to p_value for exploratory ones.
        n: sample size in the rule's unit.
        rule: stated before the data.
        confounders: with how each was handled.
        others: further numbers: secondary measures, checks, descriptions.
        rows: what was read.
        settles: what further data would settle the question; empty if it is settled.
        notes: remarks.
        methods: (baseline, treatment).
        frames: data behind the numbers, for figures; not written to claims.json.
    """

    claim: str
    title: str
    source: str
    role: Role
    verdict: Outcome
    reason: str
    effect: Estimate | None
    p_value: float | None
    p_adjusted: float | None
    n: int
    rule: Rule
    confounders: tuple[Confounder, ...]
    others: tuple[Estimate, ...]
    rows: tuple[Rows, ...]
    settles: str
    notes: tuple[str, ...]
    methods: tuple[str, str]
    frames: Mapping[str, pd.DataFrame] = field(default_factory=dict, repr=False)

    @property
    def interval(self) -> Interval | None:
        """Interval of the effect."""
        return None if self.effect is None else self.effect.interval

    def line(self) -> str:
        """The verdict on one line."""
        parts = [f"{self.claim:<4}{self.verdict:<13}{self.title}"]
        if self.effect is not None and math.isfinite(self.effect.value):
            interval = "" if self.interval is None else f" {self.interval}"
            p = "" if self.p_adjusted is None else f", p = {self.p_adjusted:.2g}"
            parts.append(f"{self.effect.name} {self.effect.value:.3g}{interval}{p}, n = {self.n}")
        if self.verdict in ("untestable", "inconclusive"):
            parts.append(self.reason)
        return ": ".join(parts[:2]) + "".join(f" ({part})" for part in parts[2:])

    def to_dict(self) -> dict[str, Any]:
        """The verdict as JSON values; what is not a finite number is null."""
        effect = self.effect
        return {
            "claim": self.claim,
            "title": self.title,
            "source": self.source,
            "role": self.role,
            "verdict": self.verdict,
            "reason": self.reason,
            "effect": None
            if effect is None
            else {"name": effect.name, "value": _number(effect.value), "unit": effect.unit, "note": effect.note},
            "interval": _interval(self.interval),
            "p_value": _number(self.p_value),
            "p_adjusted": _number(self.p_adjusted),
            "n": self.n,
            "rule": {
                "text": self.rule.text,
                "level": self.rule.level,
                "unit_of_n": self.rule.unit,
                "minimal_n": self.rule.minimal_n,
                "margin": self.rule.margin,
            },
            "confounders": [{"name": c.name, "handling": c.handling} for c in self.confounders],
            "rows": [
                {"run": r.run, "table": r.table, "columns": list(r.columns), "filter": r.filter} for r in self.rows
            ],
            "others": [_estimate(estimate) for estimate in self.others],
            "settles": self.settles,
            "notes": list(self.notes),
            "baseline": self.methods[0],
            "treatment": self.methods[1],
        }


def decide(
    claim: Claim,
    finding: Finding,
    methods: tuple[str, str],
    *,
    family: int = 1,
    p_supported: float | None = None,
    p_refuted: float | None = None,
) -> Verdict:
    """The verdict that the rule gives.

    Untestable: something is missing, n is below the minimum, or the smallest p that n can give exceeds level/family.
    Refuted: p_refuted ≤ level/2. Supported: p_supported ≤ level, the effect points as claimed, every condition is met.
    If both hold, the verdict is refuted: an effect that exists but is smaller than the margin is not the one claimed.

    Args:
        family: number of claims that share the level.
        p_supported, p_refuted: after correction for the family; None: the finding's own.
    """
    rule = claim.rule
    for_it = finding.evidence.p_supported if p_supported is None else p_supported
    against = finding.evidence.p_refuted if p_refuted is None else p_refuted
    verdict, reason = _outcome(rule, finding, for_it, against, family)
    return Verdict(
        claim=claim.name,
        title=claim.title,
        source=claim.source,
        role=claim.role,
        verdict=verdict,
        reason=reason,
        effect=finding.effect,
        p_value=finding.evidence.p_supported,
        p_adjusted=for_it,
        n=finding.n,
        rule=rule,
        confounders=finding.confounders,
        others=finding.others,
        rows=finding.rows,
        settles=claim.settles if verdict in ("inconclusive", "untestable") else "",
        notes=finding.notes,
        methods=methods,
        frames=finding.frames,
    )


def _outcome(
    rule: Rule, finding: Finding, p_supported: float | None, p_refuted: float | None, family: int
) -> tuple[Outcome, str]:
    if finding.missing:
        return "untestable", finding.missing
    if finding.n < rule.minimal_n:
        return "untestable", f"{finding.n} {rule.unit}; the rule needs {rule.minimal_n}"
    if finding.evidence.smallest_p > rule.level / family:
        needed = f"{rule.level:g}" if family == 1 else f"{rule.level:g}/{family}"
        return (
            "untestable",
            f"{finding.n} {rule.unit} can give no p below {finding.evidence.smallest_p:.3g}, the rule needs {needed}",
        )
    if finding.effect is None or not math.isfinite(finding.effect.value):
        return "untestable", "the effect cannot be computed from what was recorded"
    if p_refuted is not None and p_refuted <= rule.level / 2:
        if finding.evidence.as_claimed and p_supported is not None and p_supported <= rule.level:
            return "refuted", "the effect exists, but is shown to be smaller than the margin stated beforehand"
        return "refuted", "the claimed effect is excluded at the margin stated beforehand"
    unmet = [condition.text for condition in finding.conditions if not condition.met]
    if p_supported is not None and p_supported <= rule.level and finding.evidence.as_claimed:
        if unmet:
            return "inconclusive", "the test supports the claim, but these conditions are not met: " + "; ".join(unmet)
        return "supported", "the test rejects that there is no such effect, and every stated condition holds"
    return (
        "inconclusive",
        "neither the absence of the claimed effect nor an effect of the size that matters is excluded",
    )


def rows_of(runs: Iterable[str], table: str, columns: Iterable[str], filter_: str) -> tuple[Rows, ...]:
    """The same table, columns and filter of several runs."""
    return tuple(Rows(run, table, tuple(columns), filter_) for run in runs)


PAIRED_BY_SEED = Confounder(
    "random seed", "runs are paired by seed (same puzzles in the same order), and the seed is the unit of the test"
)
SAME_SETTINGS = Confounder(
    "learning rate and other settings",
    "only pairs equal in every setting but the method are compared; runs that differ in one are refused by name",
)
FINISHED_ONLY = Confounder(
    "unfinished runs",
    "they are left out and named in the notes; a method that fails more often looks better than it is",
)


def directional(values: NDArray[np.floating], direction: Direction, margin: float) -> Evidence:
    """Sign-flip tests of a mean that a claim says is higher or lower than 0.

    p_supported: of "the mean is 0", two-sided. p_refuted: of "the effect is at least `margin` in the claimed direction",
    one-sided.

    Args:
        values: (n,) one number per cluster, n ≥ 1.
        direction: in which the claim says that the mean differs from 0.
        margin: the smallest effect that matters.
    """
    turned = (1.0 if direction == "higher" else -1.0) * np.asarray(values, dtype=np.float64)
    against = sign_flip_p(turned, "less", shift=margin)
    return Evidence(sign_flip_p(turned), bool(turned.mean() > 0), against, smallest_sign_flip_p(len(turned)))


def every(evidence: Iterable[Evidence]) -> Evidence:
    """Evidence that all of several effects exist: the largest p for it, Bonferroni's p that one is excluded."""
    parts = list(evidence)
    supported = max(e.p_supported for e in parts if e.p_supported is not None)
    refuted = min(e.p_refuted for e in parts if e.p_refuted is not None)
    as_claimed, smallest = all(e.as_claimed for e in parts), max(e.smallest_p for e in parts)
    return Evidence(supported, as_claimed, min(1.0, len(parts) * refuted), smallest)


def difference_estimate(name: str, frame: pd.DataFrame, unit: str, note: str = "") -> Estimate | None:
    """Mean of the column `difference` with its interval and sign-flip p; None for no rows."""
    return mean_estimate(name, frame["difference"].to_numpy(dtype=float), unit, note)


def mean_estimate(name: str, values: NDArray[np.floating], unit: str, note: str = "") -> Estimate | None:
    """Mean over clusters with its interval and the two-sided sign-flip p of 0; None for no values."""
    if not len(values):
        return None
    return Estimate(
        name, float(np.mean(values)), unit, contrast_interval(values), sign_flip_p(values), len(values), note
    )


def present(*estimates: Estimate | None) -> tuple[Estimate, ...]:
    """The estimates that could be computed."""
    return tuple(estimate for estimate in estimates if estimate is not None)


def pairing_notes(study: Study, pairing: Pairing) -> tuple[str, ...]:
    """Notes on the pairs: their setting, pairs of other settings, unfinished runs."""
    notes = [f"{study.treatment} against {study.baseline}" + (f" at {pairing.setting}" if pairing.setting else "")]
    if pairing.left_out:
        notes.append(f"{pairing.left_out} pairs of other settings are not used")
    if study.ignore:
        notes.append(f"the runs of a pair may differ in {', '.join(study.ignore)}, as asked")
    return (*notes, *unfinished(study))


def unfinished(study: Study) -> tuple[str, ...]:
    """A note that names the runs left out."""
    if not study.unfinished:
        return ()
    names = ", ".join(study.unfinished[:5]) + (" …" if len(study.unfinished) > 5 else "")
    return (f"{len(study.unfinished)} unfinished runs are left out: {names}",)


def paired_pictures(verdict: Verdict, keys: Mapping[str, str], unit: str, *, log: bool = False) -> Iterator[Picture]:
    """Baseline and treatment of every seed, joined, with the mean of each: a panel for each frame of the verdict.

    Args:
        verdict: its frames have columns seed, baseline, treatment.
        keys: frame → title of its panel.
        unit: label of the ordinate.
        log: logarithmic ordinate where all values are positive; the mean is then the geometric one.
    """
    import seaborn as sns

    frames = {title: verdict.frames[key] for key, title in keys.items() if len(verdict.frames.get(key, ()))}
    name = f"pairs_{verdict.claim.lower()}"
    if not frames:
        yield Picture(name, "", missing=f"pairs of {verdict.claim}: {verdict.reason}", claim=verdict.claim)
        return
    with styled():
        figure, axes = panels(len(frames))
        for axis, (title, frame) in zip(axes, frames.items(), strict=True):
            long = frame.melt("seed", ["baseline", "treatment"])
            axis.set_yscale("log" if log and (long["value"] > 0).all() else "linear")
            thin: dict[str, Any] = {"units": "seed", "estimator": None, "color": GRAY, "linewidth": 0.8, "alpha": 0.7}
            sns.lineplot(long, x="variable", y="value", ax=axis, legend=False, **thin)
            draw_points(axis, long, BLUE, x="variable", y="value", order=["baseline", "treatment"], markersize=5)
            axis.set_xticks([0, 1], [plain(name) for name in verdict.methods])
            axis.set(xlim=(-0.3, 1.3), xlabel="", ylabel=unit, title=plain(title))
        finish(figure, axes)
    caption = (
        f"Baseline and treatment, paired by seed, with the {'geometric ' if log else ''}mean over seeds and its 95 % "
        f"t-interval ({verdict.claim}): {verdict.verdict}."
    )
    yield Picture(name, caption, figure, claim=verdict.claim)


def picture(verdict: Verdict, key: str, name: str, caption: str, draw: Callable[[pd.DataFrame], Figure]) -> Picture:
    """The figure that `draw` makes from the verdict's frame `key`, or what is missing for it."""
    frame = verdict.frames.get(key)
    if frame is None or not len(frame):
        return Picture(name, "", missing=f"{name.replace('_', ' ')}: {verdict.reason}", claim=verdict.claim)
    return Picture(name, f"{caption} ({verdict.claim}): {verdict.verdict}.", draw(frame), claim=verdict.claim)


def _number(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)


def _interval(interval: Interval | None) -> dict[str, Any] | None:
    if interval is None:
        return None
    return {
        "low": _number(interval.low),
        "high": _number(interval.high),
        "level": interval.level,
        "kind": interval.kind,
    }


def _estimate(estimate: Estimate) -> dict[str, Any]:
    return {
        "name": estimate.name,
        "value": _number(estimate.value),
        "unit": estimate.unit,
        "interval": _interval(estimate.interval),
        "p_value": _number(estimate.p_value),
        "n": estimate.n,
        "note": estimate.note,
    }
