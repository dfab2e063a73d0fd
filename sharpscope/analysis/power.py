"""What a study of n pairs can decide, in closed form: by Student's t with the spread of runs that exist, or of answers alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from scipy.stats import chi2, nct, t

from sharpscope.analysis.claims.base import Claim, Verdict, clusters_needed, shown
from sharpscope.analysis.claims.registry import CLAIMS, judge
from sharpscope.analysis.measures import GREEDY, SAMPLED, answer_noise, last_evaluation
from sharpscope.analysis.study import Study
from sharpscope.config import ClaimsSpec

TARGET = 0.8
RECOMMENDED = 8
"""Pairs below which the normal model of power is worst: sign flips of six pairs need near unanimity."""
MOST = 1_000
NOTE = (
    "n: pairs of runs with one seed, or the claim's own unit. SD: its 90 % interval in brackets; at least: from the sampling of answers "
    "alone. Power here: chance of supported with the effect at the margin / of refuted without an effect, by Student's t. n for 80 % of "
    f"both: at this SD, and at its interval's upper end. At least {RECOMMENDED} pairs are advised: sign flips of fewer need near unanimity."
)


def student_power(deviation: float, margin: float, n: int, level: float, parts: int = 1) -> tuple[float, float]:
    """(chance of `supported` with the effect at the margin, of `refuted` without an effect) for n pairs.

    Two-sided at `level` and one-sided at level/parts; several parts must all support, as if they were independent.
    """
    if n < 2:
        return 0.0, 0.0
    if not deviation > 0:
        return 1.0, 1.0
    shift = margin / deviation * math.sqrt(n)
    support = float(nct.sf(t.ppf(1 - level / 2, n - 1), n - 1, shift))
    return support**parts, float(nct.sf(t.ppf(1 - level / parts, n - 1), n - 1, shift))


def pairs_needed(deviation: float, margin: float, level: float, parts: int = 1) -> int | None:
    """The fewest pairs, at least RECOMMENDED, at which both chances reach TARGET; None if more than MOST."""
    fewest = max(RECOMMENDED, clusters_needed(level, parts))
    sizes = range(fewest, MOST + 1)
    return next((n for n in sizes if min(student_power(deviation, margin, n, level, parts)) >= TARGET), None)


def deviation_interval(deviation: float, n: int) -> tuple[float, float]:
    """90 % interval of a standard deviation estimated from n ≥ 2 normal values."""
    low, high = chi2.ppf([0.95, 0.05], n - 1)
    return deviation * math.sqrt((n - 1) / low), deviation * math.sqrt((n - 1) / high)


def answers_deviation(accuracy: float, answers: float) -> float:
    """Standard deviation of a difference of two accuracies from that many independent answers each: √(2p(1 − p)/answers)."""
    return math.sqrt(2 * accuracy * (1 - accuracy) / answers)


@dataclass(frozen=True)
class Power:
    """What a claim needs.

    Attributes:
        tested: the claim.
        claim: its name, with its version.
        pilot: pairs that the standard deviation is from; 0 where it is that of answers alone.
        deviation: of the values tested, of the least certain part.
        terms: level and margins.
        parts: tests that are joined.
    """

    tested: Claim
    claim: str
    pilot: int
    deviation: float
    terms: ClaimsSpec
    parts: int

    @property
    def needed(self) -> tuple[int | None, ...]:
        """Pairs for TARGET at the deviation, and at the upper end of its 90 % interval (the same where that is not known)."""
        margin, level = self.tested.margin_of_parts(self.terms), self.terms.level
        high = deviation_interval(self.deviation, self.pilot)[1] if self.pilot > 1 else self.deviation
        return tuple(pairs_needed(value, margin, level, self.parts) for value in (self.deviation, high))

    def row(self) -> dict[str, str]:
        """The power as a row of a table."""
        scale, margin = self.tested.scale, self.tested.margin_of_parts(self.terms)
        unit = {"points": "points", "percent": "%", "log": "% (ln)"}.get(scale, "")
        factor = 1 if scale == "plain" else 100
        spread, now = f"at least {factor * self.deviation:.3g} {unit}", "–"
        if self.pilot > 1:
            ends = (f"{factor * end:.3g}" for end in deviation_interval(self.deviation, self.pilot))
            spread = f"{factor * self.deviation:.3g} [{', '.join(ends)}] {unit}"
            both = student_power(self.deviation, margin, self.pilot, self.terms.level, self.parts)
            now = " / ".join(f"{chance:.0%}" for chance in both)
        likely, upper = (f"over {MOST:,}" if n is None else f"{n:,}" for n in self.needed)
        return {
            "claim": self.claim,
            "n": str(self.pilot or "–"),
            "SD of a value": spread.rstrip(),
            "margin": f"{shown(margin, scale, signed=False)} {unit.split(' ')[0]}".rstrip(),
            "power": now,
            "n for 80 %": likely if likely == upper else f"{likely} to {upper}",
        }


def powers_of(verdicts: Iterable[Verdict]) -> list[Power]:
    """The power of the paired claims whose parts have at least two values that vary."""
    result = []
    for verdict in (v for one in verdicts for v in one.versions):
        parts = verdict.finding.parts.values()
        pilot = min(map(len, parts), default=0)
        if verdict.claim.direction is None or pilot < 2:
            continue
        deviation = max(float(frame["difference"].astype(float).std(ddof=1)) for frame in parts)
        if deviation > 0:
            tests = len(parts) + len(verdict.finding.evidence)
            result.append(Power(verdict.claim, verdict.name, pilot, deviation, verdict.terms, tests))
    return result


def powers_of_runs(study: Study, names: Sequence[str]) -> tuple[list[Power], list[str]]:
    """The power of the claims `names` from runs that exist, and what there is to say of these runs."""
    listed = ", ".join(f"{method} ({len(study.of(method))})" for method in study.methods)
    lines = [f"runs: {listed}; compared: {study.treatment} against {study.baseline}"]
    powers, answers = powers_of(judge(study, names)[0]), answers_of_pair(study)
    if answers is not None:
        text = "sampling answers alone gives a pair's difference of accuracy an SD of"
        lines.append(f"{text} {100 * answers[0]:.2g} points ({answers[1]})")
    if not powers:
        lines.append(study.pairing().missing or "one pair has no spread: two pairs or more give a standard deviation")
    if answers is not None and not any(power.claim.startswith("C7 (between") for power in powers):
        powers += powers_of_answers(0.5, 0.5 / answers[0] ** 2, study.terms)
    return powers, lines


def powers_of_answers(accuracy: float, answers: float, terms: ClaimsSpec) -> list[Power]:
    """A lower bound of what the claims about accuracy need, from a baseline's accuracy and the answers of an evaluation."""
    deviation, parts = answers_deviation(accuracy, answers), {"C7": 1, "C10": 2, "C14": 3}
    return [Power(CLAIMS[name], name, 0, deviation, terms, several) for name, several in parts.items()]


def answers_of_pair(study: Study) -> tuple[float, str] | None:
    """Standard deviation of a pair's difference of accuracy from sampling answers, and at which temperature; None if unknown."""
    for temperature in (GREEDY, SAMPLED):
        for pair in study.pairing().pairs:
            runs = study.finished[pair.baseline], study.finished[pair.treatment]
            step = last_evaluation(*runs, temperature=temperature)
            noise = [answer_noise(run, "heldout", step, temperature) for run in runs] if step is not None else []
            if len(noise) == 2 and None not in noise:
                return math.sqrt(sum(value for value in noise if value is not None)), f"T = {temperature:g}"
    return None
