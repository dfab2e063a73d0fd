"""What a study of n pairs can decide, in closed form: by Student's t with the spread of runs that exist, or of answers alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import chi2, nct, t

from sharpscope.analysis.claims.base import PairedClaim, Verdict, clusters_needed, shown
from sharpscope.analysis.claims.registry import CLAIMS
from sharpscope.analysis.measures import GREEDY, SAMPLED, answer_noise, last_step
from sharpscope.analysis.study import DEFAULT, Study, Terms

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


def deviation_interval(deviation: float, n: int, level: float = 0.9) -> tuple[float, float]:
    """Interval of a standard deviation estimated from n ≥ 2 normal values."""
    low, high = chi2.ppf([(1 + level) / 2, (1 - level) / 2], n - 1)
    return deviation * math.sqrt((n - 1) / low), deviation * math.sqrt((n - 1) / high)


def answers_deviation(accuracy: float, answers: float) -> float:
    """Standard deviation of a difference of two accuracies from that many independent answers each: √(2p(1 − p)/answers)."""
    return math.sqrt(2 * accuracy * (1 - accuracy) / answers)


@dataclass(frozen=True)
class Power:
    """What a claim needs.

    Attributes:
        claim: name, with its version.
        unit: what a pair is.
        scale, value_unit: of deviation and margin.
        pilot: pairs that the standard deviation is from; 0 where it is that of answers alone.
        deviation: of the values tested, of the least certain part.
        margin: on the values' scale.
        parts: tests that are joined.
        level: of the tests.
    """

    claim: str
    unit: str
    scale: Any
    value_unit: str
    pilot: int
    deviation: float
    margin: float
    parts: int
    level: float

    @property
    def needed(self) -> tuple[int | None, int | None]:
        """Pairs for TARGET at the deviation, and at the upper end of its 90 % interval (the same where that is not known)."""
        high = deviation_interval(self.deviation, self.pilot)[1] if self.pilot > 1 else self.deviation
        return tuple(pairs_needed(value, self.margin, self.level, self.parts) for value in (self.deviation, high))  # type: ignore[return-value]

    def row(self) -> dict[str, str]:
        """The power as a row of a table."""
        unit = {"points": "points", "percent": "%", "log": "% (ln)"}.get(self.scale, "")
        factor = 1 if self.scale == "plain" else 100
        spread, now = f"at least {factor * self.deviation:.3g} {unit}", "–"
        if self.pilot > 1:
            ends = (f"{factor * end:.3g}" for end in deviation_interval(self.deviation, self.pilot))
            spread = f"{factor * self.deviation:.3g} [{', '.join(ends)}] {unit}"
            both = student_power(self.deviation, self.margin, self.pilot, self.level, self.parts)
            now = " / ".join(f"{chance:.0%}" for chance in both)
        likely, upper = (f"over {MOST:,}" if n is None else f"{n:,}" for n in self.needed)
        return {
            "claim": self.claim,
            "n": str(self.pilot or "–"),
            "SD of a value": spread.rstrip(),
            "margin": f"{shown(self.margin, self.scale, signed=False)} {unit.split(' ')[0]}".rstrip(),
            "power": now,
            "n for 80 %": likely if likely == upper else f"{likely} to {upper}",
        }


def powers_of(verdicts: Iterable[Verdict]) -> list[Power]:
    """The power of the paired claims whose parts have at least two values that vary."""
    result = []
    for verdict in (v for one in verdicts for v in one.versions):
        claim, parts = verdict.claim, verdict.finding.parts
        pilot = min(map(len, parts.values()), default=0)
        if not isinstance(claim, PairedClaim) or pilot < 2:
            continue
        deviation = max(float(frame["difference"].astype(float).std(ddof=1)) for frame in parts.values())
        if deviation > 0:
            margin, level = claim.margin_of_parts(verdict.terms), verdict.terms.level
            common = (verdict.name, claim.unit, claim.scale, claim.effect_unit, pilot)
            result.append(Power(*common, deviation, margin, len(parts) + len(verdict.finding.evidence), level))
    return result


def powers_of_answers(accuracy: float, answers: float, terms: Terms = DEFAULT) -> list[Power]:
    """A lower bound of what the claims about accuracy need, from a baseline's accuracy and the answers of an evaluation."""
    deviation = answers_deviation(accuracy, answers)
    parts = {"C7": 1, "C10": 2, "C14": 3}
    claims = [claim for name, claim in CLAIMS.items() if name in parts and isinstance(claim, PairedClaim)]
    return [
        Power(
            c.name, c.unit, c.scale, c.effect_unit, 0, deviation, c.margin_of_parts(terms), parts[c.name], terms.level
        )
        for c in claims
    ]


def answers_of_pair(study: Study) -> tuple[float, str] | None:
    """Standard deviation of a pair's difference of accuracy from sampling answers, and at which temperature; None if unknown."""
    for temperature in (GREEDY, SAMPLED):
        for pair in study.pairing().pairs:
            runs = study.finished[pair.baseline], study.finished[pair.treatment]
            step = last_step(*runs, temperature=temperature)
            noise = [answer_noise(run, "heldout", step, temperature) for run in runs] if step is not None else []
            if len(noise) == 2 and None not in noise:
                return math.sqrt(sum(value for value in noise if value is not None)), f"T = {temperature:g}"
    return None


def power_table(powers: Sequence[Power]) -> pd.DataFrame:
    """One row per claim."""
    return pd.DataFrame([power.row() for power in powers])


def planned(configs: Mapping[str, Mapping[str, Any]], terms: Terms, baseline: str, treatment: str) -> list[str]:
    """What runs with these configurations cannot decide, one line each; see `Claim.minimal_n`.

    `configs`: name → configuration of each planned run, as in config.yaml, with the method's label as its name.
    """
    seeds: dict[str, set[int]] = {}
    for config in configs.values():
        seeds.setdefault(config["method"]["name"], set()).add(config["seed"])
    listed = ", ".join(f"{method} ({len(own)})" for method, own in sorted(seeds.items()))
    lines = [f"planned: {len(configs)} runs of {listed}"]
    for field, method in (("baseline", baseline), ("treatment", treatment)):
        if method not in seeds:
            lines.append(f"no run of the {field} {method}: no claim that compares methods can be tested")
    pairs = len(seeds.get(baseline, set()) & seeds.get(treatment, set()))
    fewest = clusters_needed(terms.level)
    if 0 < pairs < fewest:
        lines.append(
            f"{pairs} pairs of {treatment} and {baseline}: too few for a verdict; {fewest} is the least, {RECOMMENDED} or more are advised"
        )
    elif pairs:
        lines.append(
            f"{pairs} pairs of {treatment} and {baseline}"
            + ("" if pairs >= RECOMMENDED else f"; {RECOMMENDED} or more are advised")
        )
    for config in list(configs.values())[:1]:
        evaluation, probes = config.get("evaluation") or {}, config.get("probes") or {}
        if not evaluation.get("every") or 0 not in map(float, np.atleast_1d(evaluation.get("temperatures") or [0.0])):
            lines.append(
                "C7, C10, C14: no greedy evaluation; set evaluation.temperatures to [0, 1] and evaluation.every"
            )
        if "expected_failure" not in (probes.get("functionals") or ()):
            lines.append("C4, C6: no sharpness of expected_failure; add it to probes.functionals")
    return lines
