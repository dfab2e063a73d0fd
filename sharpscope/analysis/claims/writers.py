"""Verdicts as claims.json for programs, claims.md for people, and sections for terminal and page; and what n pairs can decide.

Power is in closed form: by Student's t with the spread of runs that exist.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import pandas as pd
from scipy.stats import chi2, nct, t

from sharpscope.analysis.claims.base import Verdict, clusters_needed, shown
from sharpscope.analysis.claims.gradients import Check
from sharpscope.analysis.claims.registry import judge, study_of
from sharpscope.analysis.sections import Section
from sharpscope.analysis.text import escape_markdown, number
from sharpscope.traces import Runs, output_folder, write_atomic

LIMITS = (
    "Small scale refutes nothing about large models: each verdict is about the runs named under it. `supported` needs a two-sided p of "
    "no effect below the level, `refuted` a one-sided p of an effect as large as the margin. Primary claims are tested in a fixed order; "
    "where all up to one have the same verdict it is confirmatory. p-values come from sign flips and are exact for values that are "
    "symmetric when there is no effect; a method that rarely collapses is not symmetric, so look at the median and the worst pair."
)
UNDECLARED = "Whether margins, level and order were fixed before the data was not checked (`sharpscope study declare`)."


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
    sections.append(Section("Checks of the recording", "\n".join(check.line() for check in checked), "", "Claims"))
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
    "n: pairs of runs with one seed, or the claim's own unit. SD: its 90 % interval in brackets. Power here: chance of supported with the "
    "effect at the margin / of refuted without an effect, by Student's t. n for 80 % of both: at this SD, and at its interval's upper end. "
    f"At least {RECOMMENDED} pairs are advised: sign flips of fewer need near unanimity."
)


def student_power(deviation: float, margin: float, n: int, level: float, parts: int = 1) -> tuple[float, float]:
    """(chance of `supported` with the effect at the margin, of `refuted` without an effect) for n ≥ 2 pairs, deviation > 0.

    Two-sided at `level` and one-sided at level/parts; several parts must all support, as if they were independent.
    """
    shift = margin / deviation * math.sqrt(n)
    support = float(nct.sf(t.ppf(1 - level / 2, n - 1), n - 1, shift))
    return support**parts, float(nct.sf(t.ppf(1 - level / parts, n - 1), n - 1, shift))


def pairs_needed(deviation: float, margin: float, level: float, parts: int = 1) -> int | None:
    """The fewest pairs, at least RECOMMENDED, at which both chances reach TARGET; None if more than MOST."""
    sizes = range(max(RECOMMENDED, clusters_needed(level, parts)), MOST + 1)
    return next((n for n in sizes if min(student_power(deviation, margin, n, level, parts)) >= TARGET), None)


def deviation_interval(deviation: float, n: int) -> tuple[float, float]:
    """90 % interval of a standard deviation estimated from n ≥ 2 normal values."""
    low, high = chi2.ppf([0.95, 0.05], n - 1)
    return deviation * math.sqrt((n - 1) / low), deviation * math.sqrt((n - 1) / high)


def powers_of(verdicts: Iterable[Verdict]) -> list[dict[str, str]]:
    """What the paired claims need whose parts have at least two values that vary, as rows of a table."""
    rows = []
    for verdict in (v for one in verdicts for v in one.versions if v.claim.direction is not None):
        claim, found, level = verdict.claim, verdict.finding.parts.values(), verdict.terms.level
        deviation = max((float(frame["difference"].astype(float).std(ddof=1)) for frame in found), default=0.0)
        if not deviation > 0 or (pilot := min(map(len, found))) < 2:
            continue
        parts, margin = len(found) + len(verdict.finding.evidence), claim.margin_of_parts(verdict.terms)
        unit = {"points": "points", "percent": "%", "log": "% (ln)"}.get(claim.scale, "")
        low, high = deviation_interval(deviation, pilot)
        ends = [f"{(1 if claim.scale == 'plain' else 100) * value:.3g}" for value in (deviation, low, high)]
        chances = student_power(deviation, margin, pilot, level, parts)
        needed = [pairs_needed(value, margin, level, parts) for value in (deviation, high)]
        pairs = dict.fromkeys(f"over {MOST:,}" if n is None else f"{n:,}" for n in needed)
        rows.append(
            {
                "claim": verdict.name,
                "n": str(pilot),
                "SD of a value": f"{ends[0]} [{ends[1]}, {ends[2]}] {unit}".rstrip(),
                "margin": f"{shown(margin, claim.scale, signed=False)} {unit.split(' ')[0]}".rstrip(),
                "power": " / ".join(f"{chance:.0%}" for chance in chances),
                "n for 80 %": " to ".join(pairs),
            }
        )
    return rows
