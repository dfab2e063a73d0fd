"""Claims and verdicts: a verdict follows from a rule that is stated before the data.

Most claims are one sentence: a sign-flip test of one number per pair (a seed, or a batch of rollouts) against a margin. Their
`measure` gives the numbers, everything else follows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Literal

import numpy as np
import pandas as pd

from sharpscope.analysis.measures import Dose
from sharpscope.analysis.statistics import (
    FEW_PAIRS,
    NO_COLLAPSE,
    Doubles,
    Interval,
    Numbers,
    contrast_interval,
    mean_interval,
    sign_flip_p,
    smallest_sign_flip_p,
)
from sharpscope.analysis.study import Pairing, Study
from sharpscope.analysis.text import number
from sharpscope.analysis.tokens import Reducer
from sharpscope.config import ClaimsSpec
from sharpscope.packaged import package_yaml

Outcome = Literal["supported", "refuted", "inconclusive", "untestable"]
Direction = Literal["higher", "lower"]
Scale = Literal["plain", "points", "percent", "log"]
"""How a number is shown: as it is, ×100 in points (a difference of shares), ×100 in per cent, or e^x − 1 in per cent."""
FEWEST = FEW_PAIRS
"""Clusters below which a claim is untestable, and a t-interval says what it assumes."""


def shown(value: float, scale: Scale, signed: bool = True) -> str:
    """A number without its unit, on its scale."""
    if not math.isfinite(value) or scale == "plain":
        return number(value)
    # e^700 is the last power that a float holds, about
    scaled = 100 * (math.expm1(min(value, 700.0)) if scale == "log" else value)
    if abs(scaled) < 1e-9:
        return "0"
    return f"{scaled:+.3g}" if signed and scale != "percent" else f"{scaled:.3g}"


def margin_text(margin: float, scale: Scale) -> str:
    """A margin with its unit."""
    points = "1 point" if f"{100 * margin:g}" == "1" else f"{100 * margin:g} points"
    return {"plain": f"{margin:g}", "points": points}.get(scale, f"{100 * margin:g} %")


@dataclass(frozen=True)
class Statistic:
    """A number with its interval; on the scale `log` the logarithm of a ratio, shown as a change in per cent.

    Attributes:
        interval: exact sign flips or BCa over clusters.
        p_value: two-sided sign-flip p of 0, unless the note names another test.
        n: clusters.
        t: Student's interval, also for few clusters.
        median, worst: of the clusters' values; the worst is the one furthest against the claim, or from the median
            where none is tested, with its cluster.
    """

    name: str
    value: float
    unit: str
    interval: Interval | None = None
    p_value: float | None = None
    n: int | None = None
    note: str = ""
    scale: Scale = "plain"
    t: Interval | None = None
    median: float | None = None
    worst: tuple[float, str] | None = None

    @property
    def text(self) -> str:
        """The value with its unit, such as `+1.2 points`."""
        unit = {"points": "points", "percent": "%", "log": "%"}.get(
            self.scale, "" if self.unit == "1" else self.unit
        )
        return f"{shown(self.value, self.scale)} {unit}".rstrip()

    def ends(self, interval: Interval | None) -> str:
        """An interval on this scale, such as `[-0.3, +2.7]`; empty without one."""
        return (
            ""
            if interval is None
            else f"[{shown(interval.low, self.scale)}, {shown(interval.high, self.scale)}]"
        )

    @property
    def line(self) -> str:
        """Value, interval, p and n on one line."""
        few = "" if (self.n or 0) >= FEWEST else f", {NO_COLLAPSE}"
        interval = self.ends(self.interval) or (
            f"{self.ends(self.t)} (t{few})" if self.t is not None else ""
        )
        parts = [f"{self.text} {interval}".rstrip()]
        if self.p_value is not None:
            parts.append(f"p = {self.p_value:.2g}")
        if self.n is not None:
            parts.append(f"n = {self.n}")
        if self.median is not None and self.worst is not None:
            middle, worst = (shown(value, self.scale) for value in (self.median, self.worst[0]))
            parts.append(f"median {middle}, worst {worst} ({self.worst[1]})")
        return ", ".join(parts)


Values = pd.DataFrame | pd.Series | Sequence[float] | Numbers
"""Numbers of clusters, or a frame with the column `difference`."""


def _numbers(values: Values) -> Doubles:
    """Numbers (n,), or the column `difference` of a frame."""
    return np.asarray(values["difference"] if isinstance(values, pd.DataFrame) else values, float)


def mean_estimate(name: str, values: Values, unit: str, scale: Scale = "plain") -> Statistic | None:
    """Mean over clusters, of numbers (n,) or a frame's column `difference`, with intervals and sign-flip p; None for no values."""
    data = _numbers(values)
    if not len(data):
        return None
    interval = contrast_interval(data)
    t = mean_interval(data)
    found = Statistic(
        name, float(np.mean(data)), unit, interval, sign_flip_p(data), len(data), "", scale, t
    )
    # with few clusters every one counts: the middle and the farthest say more than the interval
    if not 1 < len(data) < FEWEST:
        return found
    middle = float(np.median(data))
    worst = int(np.argmax(np.abs(data - middle)))
    place = f"pair {worst + 1}"
    if isinstance(values, pd.DataFrame) and "seed" in values:
        place = f"seed {values['seed'].iloc[worst]}"
    return replace(found, median=middle, worst=(float(data[worst]), place))


def is_shown(
    study: Study, values: Values, side: Literal["greater", "less"], shift: float = 0.0
) -> bool:
    """Whether a mean over clusters is shown to be above or below `shift`, one-sided at the study's level; False without values."""
    data = _numbers(values)
    return len(data) > 0 and sign_flip_p(data, side, shift) <= study.terms.level


@dataclass(frozen=True)
class Evidence:
    """The tests of an effect: p-values for and against the claim, whether the effect points as claimed, and the sizes of the tests."""

    p_supported: float | None = None
    as_claimed: bool = False
    p_refuted: float | None = None
    sizes: tuple[int, ...] = ()


def directional(values: Numbers, direction: Direction, margin: float) -> Evidence:
    """Sign-flip tests of a mean over clusters `values` (n,) that a claim says is higher or lower than 0.

    p_supported: of "the mean is 0", two-sided. p_refuted: of "the effect is at least `margin` in the claimed direction",
    one-sided; `margin` is on the values' scale.
    """
    turned = (1.0 if direction == "higher" else -1.0) * np.asarray(values, float)
    refuted = sign_flip_p(turned, "less", shift=margin)
    return Evidence(sign_flip_p(turned), bool(turned.mean() > 0), refuted, (len(turned),))


def every(evidence: Iterable[Evidence]) -> Evidence:
    """Evidence that all of several effects exist: the largest p for it, Bonferroni's p that one is excluded."""
    parts = list(evidence)
    refuted = min((e.p_refuted for e in parts if e.p_refuted is not None), default=None)
    return Evidence(
        max((e.p_supported for e in parts if e.p_supported is not None), default=None),
        all(e.as_claimed for e in parts),
        None if refuted is None else min(1.0, len(parts) * refuted),
        tuple(size for e in parts for size in e.sizes),
    )


def log_margin(margin: float, direction: Direction) -> float:
    """The size of ln(1 ± margin): a relative change of `margin` on the scale of log ratios."""
    return math.log1p(margin) if direction == "higher" else -math.log1p(-margin)


@dataclass(frozen=True)
class ClaimData:
    """What a claim's measure found.

    Attributes:
        parts: name → frame with `difference`, one number per cluster; `seed` (or the index) names the cluster, `baseline` and
            `treatment` are the values compared. Every part must show the effect.
        evidence: of tests beside those of the parts.
        effect, n: of claims that are not tested by their parts alone.
        missing: what is not recorded, if the claim cannot be tested at all.
        undecided: why neither verdict may be given although the tests could.
        conditions: further requirements of `supported`, each with whether it is met.
        others, notes: further numbers (None: could not be computed), and remarks for a reader.
        dose: of the treatment, where methods are compared.
    """

    parts: Mapping[str, pd.DataFrame] = field(default_factory=dict)
    evidence: tuple[Evidence, ...] = ()
    effect: Statistic | None = None
    n: int = 0
    missing: str = ""
    undecided: str = ""
    conditions: tuple[tuple[str, bool], ...] = ()
    others: tuple[Statistic | None, ...] = ()
    notes: tuple[str, ...] = ()
    dose: Dose | None = None


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One published claim and how it is tested.

    With a `direction` it is a sign-flip test of one number per pair against a margin; of several parts every one must show the
    effect, and effect and p are those of the part that is least shown: of parts that point the wrong way the one with the smallest
    p, else the one with the largest. Without one, `measure` gives effect, evidence and n.

    Attributes:
        title: the claim in a few words; `{treatment}` and `{baseline}` are filled in.
        rule: when the verdict is `supported` and when `refuted`; `{margin}` stands for the margin in its unit.
        margin: the smallest effect that matters, in the effect's unit; an effect shown to be smaller refutes.
        direction: in which the numbers differ from 0.
        scale: of margin and effect. On the scale `log` the margin is a relative change (0.1: 10 %).
        unit: of n.
        compares: whether two methods are compared, so that the treatment must turn the update.
        reducers: what it needs of the token tables, computed while they are streamed once for all claims.
        version: what the test compares, where the claim has two versions: runs, or one update.
        other: the other version. Its verdict is reported with this one and never changes it.
    """

    name: str
    title: str
    source: str
    rule: str
    measure: Callable[[Study], ClaimData]
    margin: float
    direction: Direction | None = None
    effect: str = ""
    effect_unit: str = ""
    scale: Scale = "plain"
    unit: str = "pairs of runs with one seed"
    compares: bool = False
    reducers: tuple[Reducer, ...] = ()
    version: str = ""
    other: Claim | None = None

    @property
    def key(self) -> str:
        """The name, with the version if this is the second one; declared margins are found by it."""
        return (
            self.name
            if self.other is not None or not self.version
            else f"{self.name} ({self.version})"
        )

    def title_text(self, terms: ClaimsSpec) -> str:
        """The title with the methods compared."""
        return self.title.replace("{treatment}", terms.treatment).replace(
            "{baseline}", terms.baseline
        )

    def margin_in(self, terms: ClaimsSpec) -> float:
        """The declared margin, or that of the rule."""
        return terms.margins.get(self.key, self.margin)

    def rule_text(self, terms: ClaimsSpec) -> str:
        """The rule with the declared margin."""
        return self.rule.replace("{margin}", margin_text(self.margin_in(terms), self.scale))

    def margin_of_parts(self, terms: ClaimsSpec) -> float:
        """The margin on the scale of the numbers tested."""
        margin = self.margin_in(terms)
        return (
            log_margin(margin, self.direction) if self.scale == "log" and self.direction else margin
        )

    def test(self, finding: ClaimData, terms: ClaimsSpec) -> tuple[Statistic | None, Evidence, int]:
        """Effect, evidence and sample size."""
        if self.direction is None:
            return finding.effect, every(finding.evidence), finding.n
        if not finding.parts or not all(map(len, finding.parts.values())):
            return None, Evidence(), 0
        margin = self.margin_of_parts(terms)
        sign = 1 if self.direction == "higher" else -1
        values = {name: _numbers(frame) for name, frame in finding.parts.items()}
        tests = {name: directional(data, self.direction, margin) for name, data in values.items()}

        def rank(name: str) -> tuple[float, float]:
            """One-sided p, then how far the part points the wrong way."""
            p = tests[name].p_supported or 0.0
            return p if tests[name].as_claimed else 2 - p, -sign * float(values[name].mean())

        weakest = max(tests, key=rank)
        data = values[weakest]
        frame = finding.parts[weakest]
        worst = int(np.argmin(sign * data))
        cluster = ", ".join(
            f"{key} {frame[key].iloc[worst]}" for key in ("seed", "step", "batch") if key in frame
        )
        joined = every([*tests.values(), *finding.evidence])
        # of parts alone the p that is reported belongs to the effect that is shown
        if not finding.evidence:
            joined = replace(joined, p_supported=tests[weakest].p_supported)
        effect = mean_estimate(
            self.effect + (f" against {weakest}" if weakest else ""),
            data,
            self.effect_unit,
            self.scale,
        )
        assert effect is not None
        effect = replace(effect, median=float(np.median(data)), worst=(float(data[worst]), cluster))
        return (
            effect,
            joined,
            min([*map(len, values.values()), *([finding.n] if finding.n else [])]),
        )


_ENTRIES = package_yaml("sharpscope.analysis.claims", "claims.yaml")


def declared(
    key: str, measure: Callable[[Study], ClaimData], *reducers: Reducer, other: Claim | None = None
) -> Claim:
    """The claim `key` of claims.yaml with what measures it."""
    return Claim(
        name=key.split(maxsplit=1)[0],
        measure=measure,
        reducers=reducers,
        other=other,
        **_ENTRIES[key],
    )


@dataclass(frozen=True)
class Verdict:
    """The result of testing a claim on some runs.

    Attributes:
        claim, finding, terms: what was tested, what was found, and by which methods, margins and level.
        reason: why, in one sentence.
        effect: the rule's statistic with its interval; None if it could not be computed.
        n: sample size in the claim's unit.
        confirmatory: whether this is a primary claim and all before it in the order have the same verdict.
        p_adjusted: the largest p of the primary claims up to this one; of others their own.
        other: verdict on the other version.
    """

    claim: Claim
    finding: ClaimData
    terms: ClaimsSpec
    verdict: Outcome
    reason: str
    effect: Statistic | None
    evidence: Evidence
    n: int
    confirmatory: bool = False
    p_adjusted: float | None = None
    other: Verdict | None = None

    @property
    def name(self) -> str:
        """Name of the claim, with its version."""
        return f"{self.claim.name}{f' ({self.claim.version})' if self.claim.version else ''}"

    @property
    def title(self) -> str:
        """Title of the claim, with the methods compared."""
        return self.claim.title_text(self.terms)

    @property
    def p_value(self) -> float | None:
        """The p-value of the test for the claim."""
        return self.evidence.p_supported

    @property
    def others(self) -> list[Statistic]:
        """The further numbers that could be computed."""
        return [one for one in self.finding.others if one is not None]

    @property
    def primary(self) -> bool:
        """Whether the claim is tested in the fixed order."""
        return self.claim.key in self.terms.order

    @property
    def versions(self) -> list[Verdict]:
        """This verdict, and that on the other version if there is one."""
        return [self] if self.other is None else [self, self.other]

    def line(self) -> str:
        """The verdict on one line."""
        text = f"{self.name:<17} {self.verdict:<12} {self.title}"
        if self.effect is not None and math.isfinite(self.effect.value):
            text += f": {self.effect.name} {self.effect.line}"
        if self.verdict in ("untestable", "inconclusive") or self.finding.undecided:
            text += f" ({self.reason})"
        return text

    def details(self) -> list[str]:
        """Rule, numbers and remarks, one a line."""
        claim = self.claim
        effect = self.effect
        finding = self.finding
        lines = [
            f"reason: {self.reason}",
            f"source: {claim.source}",
            f"rule: {claim.rule_text(self.terms)}",
        ]
        lines.append(f"level {100 * self.terms.level:g} %; n: {claim.unit}, at least {FEWEST}")
        if effect is not None:
            t = (
                ""
                if effect.t is None or effect.interval is None
                else f"; Student's t interval {effect.ends(effect.t)}"
            )
            lines.append(f"effect: {effect.name}: {effect.line}{t}")
        if self.primary:
            lines.append(f"primary, {'' if self.confirmatory else 'not '}confirmatory")
        lines += [
            f"condition: {text}: {'met' if met else 'not met'}" for text, met in finding.conditions
        ]
        lines += [
            f"also: {one.name}: {one.line}{f' ({one.note})' if one.note else ''}"
            for one in self.others
        ]
        notes = [*finding.notes, *([] if finding.dose is None else [finding.dose.text])]
        return lines + [f"note: {note}" for note in notes]

    def to_dict(self) -> dict[str, object]:
        """The verdict as JSON values."""
        claim, finding = self.claim, self.finding
        values = {
            "claim": claim.name,
            "version": claim.version,
            "title": self.title,
            "source": claim.source,
            "baseline": self.terms.baseline,
            "treatment": self.terms.treatment,
            "role": "primary" if self.primary else "exploratory",
            "confirmatory": self.confirmatory,
            "verdict": self.verdict,
            "reason": self.reason,
            "p_value": self.p_value,
            "p_refuted": self.evidence.p_refuted,
            "p_adjusted": self.p_adjusted,
            "n": self.n,
            "unit_of_n": claim.unit,
            "rule": claim.rule_text(self.terms),
            "margin": claim.margin_in(self.terms),
            "level": self.terms.level,
            "conditions": [{"text": text, "met": met} for text, met in finding.conditions],
            "dose": None if finding.dose is None else asdict(finding.dose),
            "notes": list(finding.notes),
            "effect": None
            if self.effect is None
            else asdict(self.effect) | {"shown": self.effect.line},
            "others": [asdict(one) | {"shown": one.line} for one in self.others],
            "other": None if self.other is None else self.other.to_dict(),
        }
        return {name: _json(value) for name, value in values.items()}


def decide(claim: Claim, finding: ClaimData, terms: ClaimsSpec) -> Verdict:
    """The verdict that the rule gives.

    Untestable: something is missing, n is below the minimum, n cannot give a p at the level for `supported` or for
    `refuted`, or the treatment's dose is recorded and below the least. Refuted: p_refuted ≤ level. Supported:
    p_supported ≤ level, the effect points as claimed, every condition is met. If both hold, the verdict is refuted: an
    effect that exists but is smaller than the margin is not the one claimed.
    """
    effect, evidence, n = claim.test(finding, terms)
    dose = finding.dose
    unmet = [text for text, met in finding.conditions if not met]
    supports = (
        evidence.p_supported is not None
        and evidence.p_supported <= terms.level
        and evidence.as_claimed
    )
    verdict: Outcome = "untestable"
    if finding.missing:
        reason = finding.missing
    elif why := too_few(claim, n, evidence, terms.level):
        reason = why
    elif (
        claim.compares
        and dose is not None
        and dose.rotation is not None
        and dose.rotation < terms.least_rotation
    ):
        reason = f"{dose.text}; the rule needs {terms.least_rotation:g}°"
    elif effect is None or not math.isfinite(effect.value):
        reason = "the effect cannot be computed from what was recorded"
    elif finding.undecided:
        verdict, reason = "inconclusive", finding.undecided
    elif evidence.p_refuted is not None and evidence.p_refuted <= terms.level:
        verdict = "refuted"
        reason = "the claimed effect is excluded at the margin stated beforehand"
        if supports:
            reason = (
                "the effect exists, but is shown to be smaller than the margin stated beforehand"
            )
    elif not supports:
        verdict = "inconclusive"
        reason = "neither the absence of the claimed effect nor an effect of the size that matters is excluded"
    elif unmet:
        verdict = "inconclusive"
        reason = (
            f"the test supports the claim, but these conditions are not met: {'; '.join(unmet)}"
        )
    else:
        verdict = "supported"
        reason = "the test rejects that there is no such effect, and every stated condition holds"
    return Verdict(
        claim, finding, terms, verdict, reason, effect, evidence, n, p_adjusted=evidence.p_supported
    )


def clusters_needed(level: float, parts: int = 1) -> int:
    """The smallest n whose sign flips can reach `level` two-sided, and one-sided after Bonferroni's correction for `parts`."""
    for n in range(1, 200):
        if smallest_sign_flip_p(n) <= level and parts * smallest_sign_flip_p(n, "less") <= level:
            return n
    raise ValueError(f"level {level:g}: sign flips cannot reach it")


def too_few(claim: Claim, n: int, evidence: Evidence, level: float) -> str:
    """Why n is too small for the rule, or for one of the two verdicts, and how many more would do; empty if it is not."""
    unit = claim.unit.replace("pairs", "pair", 1) if n == 1 else claim.unit
    if n < FEWEST:
        return f"{n} {unit}; the rule needs {FEWEST}: {FEWEST - n} more"
    tests = len(evidence.sizes)
    sizes = evidence.sizes or (n,)
    least = {
        "supported": smallest_sign_flip_p(min(sizes)),
        "refuted": tests * smallest_sign_flip_p(max(sizes), "less"),
    }
    # a claim that can only be supported, or only be refuted, is not tested
    for verdict, smallest in least.items():
        if smallest > level:
            text = f"{n} {unit} can give no p below {min(1.0, smallest):.3g} for {verdict}, the rule needs {level:g}"
            needed = clusters_needed(level, tests)
            return f"{text}: {needed - n} more" if needed > n else text
    return ""


def paired(measure: Callable[[Study, Pairing], ClaimData]) -> Callable[[Study], ClaimData]:
    """The measure of a claim about pairs of runs: untestable where there is none; notes name their setting, and other pairs."""

    def _measured(study: Study) -> ClaimData:
        pairing = study.pairing()
        if pairing.missing:
            return ClaimData(missing=pairing.missing)
        notes = [
            f"{study.treatment} against {study.baseline}"
            + (f" at {pairing.setting}" if pairing.setting else "")
        ]
        if pairing.left_out:
            notes.append(f"{pairing.left_out} pairs of other settings are not used")
        found = measure(study, pairing)
        return replace(found, notes=(*found.notes, *notes))

    return _measured


def _json(value: object) -> object:
    """The value with null in place of numbers that are not finite."""
    if isinstance(value, dict):
        return {key: _json(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_json(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
