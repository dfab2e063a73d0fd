"""Verdicts as claims.json for programs, claims.md for people, and sections for terminal and page."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import pandas as pd

from sharpscope.analysis.claims.base import Verdict
from sharpscope.analysis.claims.gradients import Check
from sharpscope.analysis.claims.registry import judge, study_of
from sharpscope.analysis.sections import Section
from sharpscope.analysis.text import escape_markdown, number
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
    # power imports the claims itself; the figures need matplotlib, which `study claims` does not
    from sharpscope.analysis import power
    from sharpscope.analysis.figures import paired_dots

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
    if powers := power.powers_of(verdicts):
        table = pd.DataFrame([one.row() for one in powers])
        sections.append(Section("Power", table, power.NOTE, "Claims", "power"))
    return sections
