"""Verdicts as claims.json for programs, claims.md for people, and text for a terminal."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from sharpscope.analysis.claims.base import Estimate, Verdict, margin_text
from sharpscope.analysis.text import escape_markdown, number
from sharpscope.traces import output_folder, write_atomic

LIMITS = (
    "Small scale refutes nothing about large models: each verdict is about the runs named under it. Each test has a level of 5 % "
    "unless declared otherwise: `supported` needs a two-sided p of no effect below it, `refuted` a one-sided p of an effect as large "
    "as the margin. Primary claims are tested in a fixed order (C7, C4, C10 unless declared otherwise); where all up to one have the "
    "same verdict it is confirmatory, and the chance that any confirmatory verdict of that kind is wrong is at most the level. The "
    "other verdicts are exploratory, each tested by itself. A claim is "
    "untestable where the sample could give only one of the two verdicts. p-values come from sign flips or permutations and are exact "
    "for values that are symmetric when there is no effect. Verdicts follow p-values; the 95 % intervals beside them were measured to "
    "cover 95 % (6 to 14 clusters) or 92 to 93 % (15 to 30, BCa) of normal samples, with heavy tails 95 % or 88 to 89 %, with strong "
    "skew 85 to 89 %."
)
UNDECLARED = (
    "No declaration was checked: whether margins, level and order were fixed before the data is not known "
    "(`sharpscope study declare`)."
)


def claims_json(verdicts: Sequence[Verdict]) -> str:
    """The verdicts as a JSON array (see `Verdict.to_dict`); no NaN in it."""
    return json.dumps([verdict.to_dict() for verdict in verdicts], indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def claims_markdown(verdicts: Sequence[Verdict], declared: str = UNDECLARED) -> str:
    """The verdicts as Markdown: one table, then each claim with rule, numbers, confounders and what was read.

    `declared`: what is known of the declaration of the rules.
    """
    pair = verdicts[0].methods if verdicts else ("", "")
    lines = ["# Claims", "", LIMITS, "", escape_markdown(declared), ""]
    lines += [f"Treatment {escape_markdown(pair[1])}, baseline {escape_markdown(pair[0])}.", ""] if verdicts else []
    lines += ["| | claim | verdict | effect | 95 % interval | p | n |", "|---|---|---|---|---|---|---|"]
    lines += [_row(v) for verdict in verdicts for v in versions(verdict)]
    for verdict in verdicts:
        for v in versions(verdict):
            name = f"{verdict.claim}{f' ({v.version})' if v is not verdict else ''}"
            lines += [
                "",
                f"## {name}: {escape_markdown(v.title)}",
                "",
                f"**{v.verdict}**: {escape_markdown(v.reason)}.",
                "",
            ]
            lines += [f"- {escape_markdown(line)}" for line in _details(v)]
    return "\n".join(lines) + "\n"


def versions(verdict: Verdict) -> list[Verdict]:
    """A verdict, and that on the other version of its claim if there is one."""
    return [verdict] if verdict.beside is None else [verdict, verdict.beside]


def _row(v: Verdict) -> str:
    effect = "–" if v.effect is None else v.effect.text
    interval = "–" if v.effect is None or v.interval is None else v.effect.interval_text
    marks = [v.version] if v.version else []
    marks += ["primary, confirmatory" if v.confirmatory else "primary"] if v.role == "primary" else []
    mark = f" ({'; '.join(marks)})" if marks else ""
    title, effect = escape_markdown(v.title), escape_markdown(effect)
    return f"| {v.claim} | {title}{mark} | **{v.verdict}** | {effect} | {interval} | {number(v.p_value)} | {v.n} |"


def verdict_text(verdict: Verdict) -> str:
    """One claim in full, as plain text."""
    parts = []
    for v in versions(verdict):
        line = replace(v, beside=None).line()
        parts += [line, f"  {v.reason}", *(f"  {detail}" for detail in _details(v))]
    return "\n".join(parts)


def write_claims(verdicts: Sequence[Verdict], out: str | Path, declared: str = UNDECLARED) -> list[Path]:
    """Write claims.json and claims.md into `out`; returns both paths.

    `declared`: what is known of the declaration of the rules.

    Raises:
        UserError: if the folder cannot be made.
    """
    folder = output_folder(out)
    paths = [folder / "claims.json", folder / "claims.md"]
    for path, text in zip(paths, (claims_json(verdicts), claims_markdown(verdicts, declared)), strict=True):
        write_atomic(path, text)
    return paths


def _details(v: Verdict) -> list[str]:
    lines = [f"source: {v.source}", f"rule: {v.rule.text}"]
    margin = "" if v.rule.margin is None else f", margin {margin_text(v.rule.margin, v.rule.scale)}"
    least = "" if v.rule.least_rotation is None else f", least rotation of the update {v.rule.least_rotation:g}°"
    lines.append(
        f"level {100 * v.rule.level:g} %{margin}{least}; at least {v.rule.minimal_n} {v.rule.unit}, here {v.n}"
    )
    if v.effect is not None:
        lines.append("effect: " + _estimate(v.effect))
    if v.p_value is not None:
        lines.append(f"p = {number(v.p_value)}")
    if v.role == "primary":
        lines.append(
            f"primary; {'confirmatory' if v.confirmatory else 'not confirmatory: a claim before it has another verdict'}"
        )
    lines += ["also: " + _estimate(estimate) for estimate in v.others]
    lines += [f"confounder: {c.name}: {c.handling}" for c in v.confounders]
    lines += [f"note: {note}" for note in v.notes]
    by_what: dict[tuple[str, str, str], list[str]] = {}
    for rows in v.rows:
        by_what.setdefault((rows.table, ", ".join(rows.columns), rows.filter), []).append(rows.run)
    lines += [
        f"read: {table} ({columns}), {filter_}, of {len(runs)} runs: "
        f"{', '.join(runs[:3])}{' …' if len(runs) > 3 else ''}"
        for (table, columns, filter_), runs in by_what.items()
    ]
    if v.settles:
        lines.append(f"what would settle it: {v.settles}")
    return lines


def _estimate(e: Estimate) -> str:
    interval = "" if e.interval is None else f" {e.interval_text} ({e.interval.level:.0%}, {e.interval.kind})"
    p = "" if e.p_value is None else f", p = {number(e.p_value)}"
    n = "" if e.n is None else f", n = {e.n}"
    note = f" ({e.note})" if e.note else ""
    return f"{e.name}: {e.text}{interval}{p}{n}{note}"
