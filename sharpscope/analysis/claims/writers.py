"""Verdicts as claims.json for programs, claims.md for people, and sections for terminal and page; and what n pairs can decide.

Power is in closed form: by Student's t with the spread of runs that exist, or of answers alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import pandas as pd
from scipy.stats import chi2, nct, t

from sharpscope.analysis.claims.base import Claim, Verdict, clusters_needed, shown
from sharpscope.analysis.claims.gradients import Check
from sharpscope.analysis.claims.registry import CLAIMS, judge, study_of
from sharpscope.analysis.measures import GREEDY, SAMPLED, answer_noise, last_evaluation
from sharpscope.analysis.sections import Section
from sharpscope.analysis.study import Study
from sharpscope.analysis.text import escape_markdown, number
from sharpscope.config import ClaimsSpec
from sharpscope.traces import Runs, output_folder, write_atomic

LIMITS = (
    "Small scale refutes nothing about large models: each verdict is about the runs named under it. Each test has a level of 5 % "
    "unless declared otherwise: `supported` needs a two-sided p of no effect below it, `refuted` a one-sided p of an effect as large "
    "as the margin. Primary claims are tested in a fixed order; where all up to one have the same verdict it is confirmatory. The "
    "others are exploratory. A claim is untestable where the sample could give only one of the two verdicts. p-values come from sign "
    "flips or permutations and are exact for values that are symmetric when there is no effect; a method that rarely collapses is "
    "not symmetric, so look at the median and the worst pair."
)
UNDECLARED = (
    "No declaration was checked: whether margins, level and order were fixed before the data is not known "
    "(`sharpscope study declare`)."
)


def verdict_table(verdicts: Iterable[Verdict]) -> pd.DataFrame:
    """A row for each verdict, those on second versions included."""
    rows = []
    for verdict in (v for one in verdicts for v in one.versions):
        effect = verdict.effect
        mark = "" if not verdict.primary else " (primary, confirmatory)" if verdict.confirmatory else " (primary)"
        rows.append(
            {
                "claim": verdict.name,
                "verdict": verdict.verdict,
                "title": verdict.title + mark,
                "effect": "–" if effect is None else effect.text,
                "95 % interval": "–" if effect is None else effect.ends(effect.interval or effect.t) or "–",
                "p": number(verdict.p_value),
                "n": verdict.n,
            }
        )
    return pd.DataFrame(rows)


def claims_json(verdicts: Sequence[Verdict]) -> str:
    """The verdicts as a JSON array (see `Verdict.to_dict`); no NaN in it."""
    return json.dumps([verdict.to_dict() for verdict in verdicts], indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def claims_markdown(verdicts: Sequence[Verdict], checks: Sequence[Check] = (), declared: str = UNDECLARED) -> str:
    """The verdicts as Markdown: one table, then each claim with rule and numbers; `declared`: what is known of the rules."""
    table = verdict_table(verdicts).map(escape_markdown)
    rows = [list(table.columns), ["---"] * len(table.columns), *table.to_numpy().tolist()]
    lines = ["# Claims", "", LIMITS, "", escape_markdown(declared), "", *(f"| {' | '.join(row)} |" for row in rows)]
    for verdict in (v for one in verdicts for v in one.versions):
        lines += ["", f"## {verdict.name}: {escape_markdown(verdict.title)}", "", f"**{verdict.verdict}**", ""]
        lines += [f"- {escape_markdown(line)}" for line in verdict.details()]
    if checks:
        lines += ["", "## Checks of the recording", "", *(f"- {escape_markdown(check.line())}" for check in checks)]
    return "\n".join(lines) + "\n"


def write_claims(
    verdicts: Sequence[Verdict], out: str | Path, checks: Sequence[Check] = (), declared: str = UNDECLARED
) -> list[Path]:
    """Write claims.json and claims.md into `out`; returns both paths.

    Raises:
        UserError: if the folder cannot be made.
    """
    folder = output_folder(out)
    texts = {"claims.json": claims_json(verdicts), "claims.md": claims_markdown(verdicts, checks, declared)}
    for name, text in texts.items():
        write_atomic(folder / name, text)
    return [folder / name for name in texts]


def claim_sections(runs: Runs) -> list[Section]:
    """The verdicts on all claims with their figures, the checks of the recording, and what the tests can decide."""
    from sharpscope.analysis.figures import paired_dots  # matplotlib, which `study claims` does not need

    verdicts, checked = judge(study_of(runs))
    sections = [Section("Claims", verdict_table(verdicts), f"{LIMITS} {UNDECLARED}", "Claims", "claims")]
    checks = "\n".join(check.line() for check in checked)
    sections.append(Section("Checks of the recording", checks, "", "Claims"))
    for verdict in (v for one in verdicts for v in one.versions):
        sections.append(Section(f"{verdict.name}: {verdict.verdict}", "\n".join(verdict.details()), "", "Claims"))
        if verdict.claim.direction is not None and verdict.finding.parts and not verdict.finding.missing:
            name = f"{verdict.claim.name.lower()}{'' if verdict.claim.key == verdict.claim.name else '_2'}"
            caption = f"{verdict.title}: {verdict.verdict}. A dot for each of {verdict.n} {verdict.claim.unit}; dashed: the margin."
            sections.append(Section("", paired_dots(verdict), caption, "Claims", name))
    if powers := powers_of(verdicts):
        sections.append(Section("Power", pd.DataFrame(powers), NOTE, "Claims", "power"))
    return sections


# -- Power

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


def power_row(claim: Claim, name: str, pilot: int, deviation: float, parts: int, terms: ClaimsSpec) -> dict[str, str]:
    """What a claim needs, as a row of a table.

    Args:
        claim: what is tested.
        name: of it, with its version.
        pilot: pairs that the standard deviation is from; 0 where it is that of answers alone.
        deviation: of the values tested, of the least certain part.
        parts: tests that are joined.
        terms: level and margins.
    """
    scale, margin, level = claim.scale, claim.margin_of_parts(terms), terms.level
    unit = {"points": "points", "percent": "%", "log": "% (ln)"}.get(scale, "")
    factor = 1 if scale == "plain" else 100
    spread, now, high = f"at least {factor * deviation:.3g} {unit}", "–", deviation
    if pilot > 1:
        low, high = deviation_interval(deviation, pilot)
        spread = f"{factor * deviation:.3g} [{factor * low:.3g}, {factor * high:.3g}] {unit}"
        now = " / ".join(f"{chance:.0%}" for chance in student_power(deviation, margin, pilot, level, parts))
    needed = [pairs_needed(value, margin, level, parts) for value in (deviation, high)]
    ends = dict.fromkeys(f"over {MOST:,}" if n is None else f"{n:,}" for n in needed)
    return {
        "claim": name,
        "n": str(pilot or "–"),
        "SD of a value": spread.rstrip(),
        "margin": f"{shown(margin, scale, signed=False)} {unit.split(' ')[0]}".rstrip(),
        "power": now,
        "n for 80 %": " to ".join(ends),
    }


def powers_of(verdicts: Iterable[Verdict]) -> list[dict[str, str]]:
    """Rows of the paired claims whose parts have at least two values that vary."""
    rows = []
    for verdict in (v for one in verdicts for v in one.versions if v.claim.direction is not None):
        parts = verdict.finding.parts.values()
        deviation = max((float(frame["difference"].astype(float).std(ddof=1)) for frame in parts), default=0.0)
        if deviation > 0 and (pilot := min(map(len, parts))) > 1:
            tests = len(parts) + len(verdict.finding.evidence)
            rows.append(power_row(verdict.claim, verdict.name, pilot, deviation, tests, verdict.terms))
    return rows


def powers_of_runs(study: Study, names: Sequence[str]) -> tuple[list[dict[str, str]], list[str]]:
    """Rows of the claims `names` from runs that exist, and what there is to say of these runs."""
    listed = ", ".join(f"{method} ({len(study.of(method))})" for method in study.methods)
    lines = [f"runs: {listed}; compared: {study.treatment} against {study.baseline}"]
    rows, answers = powers_of(judge(study, names)[0]), answers_of_pair(study)
    if answers is not None:
        text = "sampling answers alone gives a pair's difference of accuracy an SD of"
        lines.append(f"{text} {100 * answers[0]:.2g} points ({answers[1]})")
    if not rows:
        lines.append(study.pairing().missing or "one pair has no spread: two pairs or more give a standard deviation")
    if answers is not None and not any(row["claim"].startswith("C7 (between") for row in rows):
        rows += powers_of_answers(0.5, 0.5 / answers[0] ** 2, study.terms)
    return rows, lines


def powers_of_answers(accuracy: float, answers: float, terms: ClaimsSpec) -> list[dict[str, str]]:
    """A lower bound of what the claims about accuracy need, from a baseline's accuracy and the answers of an evaluation."""
    deviation = answers_deviation(accuracy, answers)
    return [power_row(CLAIMS[n], n, 0, deviation, parts, terms) for n, parts in (("C7", 1), ("C10", 2), ("C14", 3))]


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
