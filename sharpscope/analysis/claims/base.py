"""Claims, findings and verdicts; a verdict follows from a rule that is stated before the data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from numpy.typing import NDArray

from sharpscope.analysis.figures.draw import draw_points
from sharpscope.analysis.figures.style import BLUE, GRAY, WIDTH, Picture, finish, panels, plain, styled
from sharpscope.analysis.statistics import Interval, contrast_interval, sign_flip_p, smallest_sign_flip_p
from sharpscope.analysis.study import Pairing, Study
from sharpscope.analysis.terms import DEFAULT, LEVEL, Terms
from sharpscope.analysis.text import number
from sharpscope.analysis.tokens import Reducer

Outcome = Literal["supported", "refuted", "inconclusive", "untestable"]
Role = Literal["primary", "exploratory"]
Direction = Literal["higher", "lower"]
Scale = Literal["plain", "points", "percent", "log"]
"""How a number is shown: as it is, ×100 in points (a difference of shares), ×100 in per cent, or e^x − 1 in per cent."""


def quantity(value: float, scale: Scale, signed: bool = True) -> str:
    """A number without its unit, on its scale."""
    if not math.isfinite(value) or scale == "plain":
        return number(value)
    shown = 100 * (math.expm1(min(value, 700.0)) if scale == "log" else value)
    text = f"{shown:+.3g}" if signed and scale != "percent" else f"{shown:.3g}"
    return "0" if float(text) == 0 else text


@dataclass(frozen=True)
class Rule:
    """The decision, written before the data.

    Attributes:
        text: when the verdict is `supported` and when `refuted`; `{margin}` stands for the margin in its unit.
        unit: unit of n, e.g. "pairs of runs with one seed".
        minimal_n: with fewer the claim is untestable.
        margin: the smallest effect that matters, in the effect's unit; an effect shown to be smaller refutes.
        level: error rate of each test: of "there is no effect" (two-sided) and of "the effect reaches the margin" (one-sided).
        scale: of the margin. On the scale `log` the margin is a relative change (0.1: 10 %).
        compares: whether two methods are compared, so that the treatment needs a dose.
        least_rotation: the mean rotation of the update that the treatment must cause [degrees].
    """

    text: str
    unit: str
    minimal_n: int
    margin: float | None = None
    level: float = LEVEL
    scale: Scale = "plain"
    compares: bool = False
    least_rotation: float | None = None

    def under(self, terms: Terms, claim: str) -> Rule:
        """The rule with the margin, level and least dose of `terms`."""
        margin = None if self.margin is None else terms.margin(claim, self.margin)
        text = self.text if margin is None else self.text.replace("{margin}", margin_text(margin, self.scale))
        least = terms.least_rotation if self.compares else None
        return replace(self, text=text, margin=margin, level=terms.level, least_rotation=least)


def margin_text(margin: float, scale: Scale) -> str:
    """A margin with its unit."""
    points = "1 point" if f"{100 * margin:g}" == "1" else f"{100 * margin:g} points"
    return {"plain": f"{margin:g}", "points": points}.get(scale, f"{100 * margin:g} %")


@dataclass(frozen=True)
class Estimate:
    """A number with its interval, in the unit named; `p_value` belongs to the test that the note names, if any.

    On the scale `log` the value is the logarithm of a ratio and is shown as a change in per cent.
    """

    name: str
    value: float
    unit: str
    interval: Interval | None = None
    p_value: float | None = None
    n: int | None = None
    note: str = ""
    scale: Scale = "plain"

    @property
    def text(self) -> str:
        """The value with its unit, such as `+1.2 points`."""
        unit = {"points": "points", "percent": "%", "log": "%"}.get(self.scale, "" if self.unit == "1" else self.unit)
        return f"{quantity(self.value, self.scale)} {unit}".rstrip()

    @property
    def interval_text(self) -> str:
        """The interval on the estimate's scale, such as `[-0.3, +2.7]`; empty without one."""
        if self.interval is None:
            return ""
        return f"[{quantity(self.interval.low, self.scale)}, {quantity(self.interval.high, self.scale)}]"


@dataclass(frozen=True)
class Confounder:
    """Another possible cause of the effect, and how it was handled."""

    name: str
    handling: str


@dataclass(frozen=True)
class Rows:
    """Rows and columns that were read from one run."""

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
        p_refuted: p-value of the test whose rejection refutes the claim.
        smallest_p, smallest_p_refuted: the smallest values of both that the sample size allows.
        parts: number of sign-flip tests that both p-values join; 0 if they do not come from sign flips.
    """

    p_supported: float | None = None
    as_claimed: bool = False
    p_refuted: float | None = None
    smallest_p: float = 0.0
    smallest_p_refuted: float = 0.0
    parts: int = 0


@dataclass(frozen=True)
class Dose:
    """How far the treatment turned the update away from that of the reference objective on the same rollouts.

    Attributes:
        rotation: mean over the steps of the treatment's runs [degrees]; None where it was not recorded.
        noise: mean angle between independent halves of a batch [degrees]; None where it was not recorded.
        method: the treatment.
    """

    rotation: float | None
    noise: float | None
    method: str

    @property
    def text(self) -> str:
        """The dose in one sentence."""
        if self.rotation is None:
            return f"dose of {self.method}: not recorded (steps.update_rotation)"
        noise = "" if self.noise is None else f", the batch's noise by {self.noise:.3g}°"
        return f"the weights of {self.method} turned the update by {self.rotation:.3g}°{noise}"


@dataclass(frozen=True)
class Source:
    """A source of variance that more measurement reduces.

    Attributes:
        name: prompts | samples | probe prompts | steps | rounds.
        size: how many there were.
        variance: the part of the variance of a cluster's value that it caused; it falls as 1/size.
        note: how it was estimated, and what was assumed.
    """

    name: str
    size: float
    variance: float
    note: str = ""


@dataclass(frozen=True)
class Sample:
    """The values behind a test of a mean, for `sharpscope power`.

    Attributes:
        name: what is compared.
        values: (n,) one per cluster.
        clusters: the clusters, in the order of the values; parts of a claim with a common cluster are correlated.
        direction: in which the claim says that the mean differs from 0.
        margin: the smallest effect that matters.
        sources: of the variance, other than the cluster itself.
        runs: runs that one more cluster costs.
        note: parts of the rule that these values do not cover.
        unit: what a cluster is, where the rule counts something else.
    """

    name: str
    values: NDArray[np.float64]
    clusters: tuple[Any, ...]
    direction: Direction
    margin: float
    sources: tuple[Source, ...] = ()
    runs: int = 2
    note: str = ""
    unit: str = ""


@dataclass(frozen=True)
class Finding:
    """Result of testing one claim; `decide` turns it into a verdict.

    Attributes:
        effect: the statistic that the rule is about; None if there is nothing to compute it from.
        n: sample size in the rule's unit.
        evidence: the tests of the effect.
        missing: what is not recorded, if the claim cannot be tested at all.
        conditions: further requirements of `supported`.
        confounders, others, rows: see `Verdict`.
        notes: remarks for a reader.
        frames: name → data behind the numbers, for figures.
        dose: of the treatment, where methods are compared.
        samples: the values tested; every one of them must show the effect.
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
    dose: Dose | None = None
    samples: tuple[Sample, ...] = ()


@dataclass(frozen=True)
class Claim:
    """One published claim and how it is tested.

    Attributes:
        name: C1 … C14.
        title: the claim in a few words.
        source: the publication.
        rule: the decision.
        settles: what further data would settle an open question.
        test: Study → Finding.
        reducers: what it needs of the token tables, computed while they are streamed once for all claims.
        draw: (verdict, study) → its figures. Those that show every setting of a study are drawn by the study instead.
        version: what the test compares, where the claim has two versions: runs, or one update.
        beside: the other version. Its verdict is reported beside this one and never changes it.
    """

    name: str
    title: str
    source: str
    rule: Rule
    settles: str
    test: Callable[[Study], Finding]
    reducers: tuple[Reducer, ...] = ()
    draw: Callable[[Verdict, Study], Iterator[Picture]] | None = None
    version: str = ""
    beside: Claim | None = None

    @property
    def key(self) -> str:
        """The name, with the version if this is the one beside; declared margins are found by it."""
        return self.name if self.beside is not None or not self.version else f"{self.name} ({self.version})"


@dataclass(frozen=True)
class Verdict:
    """The result of testing a claim on some runs, with everything needed to check it.

    Attributes:
        claim, title, source: see `Claim`.
        role: primary claims are tested in a fixed order; the others are exploratory.
        verdict: supported | refuted | inconclusive | untestable.
        reason: why this verdict, in one sentence.
        effect: the rule's statistic with its interval; None if it could not be computed.
        p_value: of the test for the claim; None if there is none.
        p_adjusted: the largest p_value of the primary claims up to this one; equal to p_value for exploratory ones.
        n: sample size in the rule's unit.
        rule: stated before the data.
        confounders: with how each was handled.
        others: further numbers: secondary measures, checks, descriptions.
        rows: what was read.
        settles: what further data would settle the question; empty if it is settled.
        notes: remarks.
        methods: (baseline, treatment).
        frames: data behind the numbers, for figures; not written to claims.json.
        confirmatory: whether this is a primary claim and all before it in the order have the same verdict. The chance that
            any confirmatory `supported` is wrong is at most the level, as is that of any `refuted`.
        version: what was compared, where the claim has two versions.
        dose: of the treatment, where methods are compared.
        beside: verdict on the other version.
        samples: the values tested, for `sharpscope power`.
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
    confirmatory: bool = False
    version: str = ""
    dose: Dose | None = None
    beside: Verdict | None = None
    samples: tuple[Sample, ...] = field(default=(), repr=False)

    @property
    def interval(self) -> Interval | None:
        """Interval of the effect."""
        return None if self.effect is None else self.effect.interval

    def line(self) -> str:
        """The verdict on one line; that on the other version on a second one."""
        version = f" ({self.version})" if self.version else ""
        parts = [f"{self.claim:<4}{self.verdict:<13}{self.title}{version}"]
        if self.effect is not None and math.isfinite(self.effect.value):
            interval = f" {self.effect.interval_text}" if self.interval is not None else ""
            p = "" if self.p_value is None else f", p = {self.p_value:.2g}"
            parts.append(f"{self.effect.name} {self.effect.text}{interval}{p}, n = {self.n}")
        if self.verdict in ("untestable", "inconclusive"):
            parts.append(self.reason)
        line = ": ".join(parts[:2]) + "".join(f" ({part})" for part in parts[2:])
        return line if self.beside is None else f"{line}\n{replace(self.beside, claim='').line()}"

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
            "shown": "" if effect is None else f"{effect.text} {effect.interval_text}".rstrip(),
            "interval": _interval(self.interval),
            "p_value": _number(self.p_value),
            "p_adjusted": _number(self.p_adjusted),
            "confirmatory": self.confirmatory,
            "n": self.n,
            "rule": {
                "text": self.rule.text,
                "level": self.rule.level,
                "unit_of_n": self.rule.unit,
                "minimal_n": self.rule.minimal_n,
                "margin": self.rule.margin,
                "least_rotation": self.rule.least_rotation,
            },
            "version": self.version,
            "dose": None
            if self.dose is None
            else {"rotation": _number(self.dose.rotation), "noise": _number(self.dose.noise)},
            "confounders": [{"name": c.name, "handling": c.handling} for c in self.confounders],
            "rows": [
                {"run": r.run, "table": r.table, "columns": list(r.columns), "filter": r.filter} for r in self.rows
            ],
            "others": [_estimate(estimate) for estimate in self.others],
            "settles": self.settles,
            "notes": list(self.notes),
            "baseline": self.methods[0],
            "treatment": self.methods[1],
            "beside": None if self.beside is None else self.beside.to_dict(),
        }


def decide(
    claim: Claim,
    finding: Finding,
    methods: tuple[str, str],
    terms: Terms = DEFAULT,
) -> Verdict:
    """The verdict that the rule gives.

    Untestable: something is missing, n is below the minimum, n cannot give a p at the level for `supported` or for
    `refuted`, or the treatment's dose is recorded and below the least. Refuted: p_refuted ≤ level. Supported:
    p_supported ≤ level, the effect points as claimed, every condition is met. If both hold, the verdict is refuted: an
    effect that exists but is smaller than the margin is not the one claimed.
    """
    rule = claim.rule.under(terms, claim.key)
    verdict, reason = _outcome(rule, finding)
    notes = finding.notes
    if finding.dose is not None:
        unknown = (
            "; a method that changes the update little would look the same" if finding.dose.rotation is None else ""
        )
        notes = (*notes, finding.dose.text + unknown)
    return Verdict(
        claim=claim.name,
        title=claim.title,
        source=claim.source,
        role="primary" if claim.key in terms.order else "exploratory",
        verdict=verdict,
        reason=reason,
        effect=finding.effect,
        p_value=finding.evidence.p_supported,
        p_adjusted=finding.evidence.p_supported,
        n=finding.n,
        rule=rule,
        confounders=finding.confounders,
        others=finding.others,
        rows=finding.rows,
        settles=claim.settles if verdict in ("inconclusive", "untestable") else "",
        notes=notes,
        methods=methods,
        frames=finding.frames,
        version=claim.version,
        dose=finding.dose,
        samples=finding.samples,
    )


def _outcome(rule: Rule, finding: Finding) -> tuple[Outcome, str]:
    result = finding.evidence
    if finding.missing:
        return "untestable", finding.missing
    if finding.n < rule.minimal_n:
        return "untestable", _too_few(rule, finding.n, rule.minimal_n)
    if unreachable := unreachable_text(rule, finding.n, result):
        return "untestable", unreachable
    dose = finding.dose
    if dose is not None and dose.rotation is not None and dose.rotation < (rule.least_rotation or 0.0):
        return "untestable", f"{dose.text}; the rule needs {rule.least_rotation:g}°"
    if finding.effect is None or not math.isfinite(finding.effect.value):
        return "untestable", "the effect cannot be computed from what was recorded"
    supports = result.p_supported is not None and result.p_supported <= rule.level and result.as_claimed
    if result.p_refuted is not None and result.p_refuted <= rule.level:
        if supports:
            return "refuted", "the effect exists, but is shown to be smaller than the margin stated beforehand"
        return "refuted", "the claimed effect is excluded at the margin stated beforehand"
    unmet = [condition.text for condition in finding.conditions if not condition.met]
    if supports and unmet:
        return "inconclusive", "the test supports the claim, but these conditions are not met: " + "; ".join(unmet)
    if supports:
        return "supported", "the test rejects that there is no such effect, and every stated condition holds"
    return (
        "inconclusive",
        "neither the absence of the claimed effect nor an effect of the size that matters is excluded",
    )


def _too_few(rule: Rule, n: int, needed: int) -> str:
    return f"{n} {rule.unit}; the rule needs {needed}: {needed - n} more"


def unreachable_text(rule: Rule, n: int, evidence: Evidence) -> str:
    """Which verdict no data of this size could give, and the size that could; empty if both can be given."""
    for verdict, smallest in (("supported", evidence.smallest_p), ("refuted", evidence.smallest_p_refuted)):
        if smallest > rule.level:
            text = f"{n} {rule.unit} can give no p below {smallest:.3g} for {verdict}, the rule needs {rule.level:g}"
            needed = clusters_needed(rule.level, evidence.parts)
            return f"{text}: {needed - n} more" if evidence.parts and needed > n else text
    return ""


def clusters_needed(level: float, parts: int = 1) -> int:
    """The smallest n whose sign flips can reach `level` two-sided, and one-sided after Bonferroni's correction for `parts`."""
    n = 1
    while smallest_sign_flip_p(n) > level or parts * smallest_sign_flip_p(n, "less") > level:
        n += 1
        if n > 200:
            raise ValueError(f"level {level:g}: sign flips cannot reach it")
    return n


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
DOSED = Confounder(
    "a method that changes little",
    "the mean rotation of the update is compared with the least declared; below it the claim is untestable",
)


def directional(values: NDArray[np.floating], direction: Direction, margin: float) -> Evidence:
    """Sign-flip tests of a mean that a claim says is higher or lower than 0.

    p_supported: of "the mean is 0", two-sided. p_refuted: of "the effect is at least `margin` in the claimed direction",
    one-sided.

    Args:
        values: (n,) one number per cluster, n ≥ 1.
        direction: in which the claim says that the mean differs from 0.
        margin: the smallest effect that matters, on the values' scale.
    """
    turned = (1.0 if direction == "higher" else -1.0) * np.asarray(values, dtype=np.float64)
    n = len(turned)
    return Evidence(
        sign_flip_p(turned),
        bool(turned.mean() > 0),
        sign_flip_p(turned, "less", shift=margin),
        smallest_sign_flip_p(n),
        smallest_sign_flip_p(n, "less"),
        parts=1,
    )


def log_margin(margin: float, direction: Direction) -> float:
    """The size of ln(1 ± margin): a relative change of `margin` on the scale of log ratios."""
    return math.log1p(margin) if direction == "higher" else -math.log1p(-margin)


def every(evidence: Iterable[Evidence]) -> Evidence:
    """Evidence that all of several effects exist: the largest p for it, Bonferroni's p that one is excluded."""
    parts = list(evidence)
    count = len(parts)
    supported = max(e.p_supported for e in parts if e.p_supported is not None)
    refuted = min(e.p_refuted for e in parts if e.p_refuted is not None)
    return Evidence(
        supported,
        all(e.as_claimed for e in parts),
        min(1.0, count * refuted),
        max(e.smallest_p for e in parts),
        min(1.0, count * min(e.smallest_p_refuted for e in parts)),
        parts=sum(e.parts for e in parts),
    )


def against_every(
    differences: Sequence[NDArray[np.floating]], direction: Direction, margin: float
) -> tuple[int, Evidence]:
    """Index of the rival that the treatment is least shown to beat, and the evidence of beating all, with that rival's p.

    Least shown is the largest one-sided p: of rivals that are ahead the smallest two-sided p, else the largest one. Of equal
    ones, as when every pair points one way, it is the rival that is furthest ahead.

    Args:
        differences: treatment minus each rival, a value per cluster.
    """
    evidence = [directional(values, direction, margin) for values in differences]
    sign = 1 if direction == "higher" else -1

    def rank(k: int) -> tuple[float, float]:
        """One-sided p, then how far the rival is ahead."""
        p = evidence[k].p_supported
        assert p is not None
        return p if evidence[k].as_claimed else 2 - p, -sign * float(np.mean(differences[k]))

    least = max(range(len(evidence)), key=rank)
    return least, replace(every(evidence), p_supported=evidence[least].p_supported)


def difference_estimate(
    name: str, frame: pd.DataFrame, unit: str, note: str = "", scale: Scale = "plain"
) -> Estimate | None:
    """Mean of the column `difference` with its interval and sign-flip p; None for no rows."""
    return mean_estimate(name, frame["difference"].to_numpy(dtype=float), unit, note, scale)


def mean_estimate(
    name: str, values: NDArray[np.floating], unit: str, note: str = "", scale: Scale = "plain"
) -> Estimate | None:
    """Mean over clusters with its interval and the two-sided sign-flip p of 0; None for no values."""
    if not len(values):
        return None
    mean, p = float(np.mean(values)), sign_flip_p(values)
    return Estimate(name, mean, unit, contrast_interval(values), p, len(values), note, scale)


def sample_of(
    name: str,
    frame: pd.DataFrame,
    direction: Direction,
    margin: float,
    source: Source | str | None = None,
    runs: int = 2,
) -> Sample:
    """The column `difference` of paired runs as the values tested; clusters are seeds.

    `source`: of variance besides the seed, or why it is not known; None if there is none.
    """
    values = frame["difference"].to_numpy(dtype=float)
    sources, note = ((source,), "") if isinstance(source, Source) else ((), source or "")
    return Sample(name, values, tuple(frame["seed"]), direction, margin, sources, runs, note)


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


def difference_figure(values: pd.DataFrame, xlabel: str, ylabel: str = "") -> Figure:
    """Differences by what they are taken from, a line each: every cluster as a dot, the mean with its 95 % interval.

    `values`: name, difference.
    """
    names = list(dict.fromkeys(values["name"]))
    with styled():
        figure, (axis,) = panels(1, height=0.4 + 0.25 * len(names))
        figure.set_figwidth(WIDTH)
        axis.axvline(0, color=GRAY, linewidth=0.8)
        draw_points(axis, values, BLUE, x="difference", y="name", order=names, interval=_contrast)
        axis.set_yticks(range(len(names)), [plain(name) for name in names])
        axis.set(xlabel=xlabel, ylabel=ylabel)
        finish(figure, [axis])
    return figure


def _contrast(values: Any) -> tuple[float, float]:
    """Ends of the interval of paired differences (n,); NaN with too few."""
    interval = contrast_interval(np.asarray(values, dtype=float))
    return (np.nan, np.nan) if interval is None else (interval.low, interval.high)


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
        "shown": f"{estimate.text} {estimate.interval_text}".rstrip(),
    }
