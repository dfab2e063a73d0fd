"""Verdicts as claims.json for programs, claims.md for people, and text for a terminal."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from sharpscope.analysis.claims.base import Estimate, Verdict
from sharpscope.analysis.text import number
from sharpscope.traces import output_folder, write_atomic

LIMITS = (
    "Small scale refutes nothing about large models: each verdict is about the runs named under it. The rules, levels, "
    "minimal samples and margins were written before the data. C4, C7 and C10 are primary and share one error rate of "
    "5 % (Holm); the others are exploratory, each at its own 5 %. p-values come from sign flips or permutations "
    "and are "
    "exact for values that are symmetric when there is no effect. Verdicts follow p-values; the 95 % intervals beside "
    "them were measured to cover 95 % (6 to 14 clusters) or 92 to 93 % (15 to 30, BCa) of normal samples, with heavy "
    "tails 95 % or 88 to 89 %, with strong skew 85 to 89 %."
)


def claims_json(verdicts: Sequence[Verdict]) -> str:
    """The verdicts as a JSON array (see `Verdict.to_dict`); no NaN in it."""
    return json.dumps([verdict.to_dict() for verdict in verdicts], indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def claims_markdown(verdicts: Sequence[Verdict]) -> str:
    """The verdicts as Markdown: one table, then each claim with rule, numbers, confounders and what was read."""
    pair = verdicts[0].methods if verdicts else ("", "")
    lines = ["# Claims", "", LIMITS, ""]
    lines += [f"Treatment `{_plain(pair[1])}`, baseline `{_plain(pair[0])}`.", ""] if verdicts else []
    lines += ["| | claim | verdict | effect | 95 % interval | p | n |", "|---|---|---|---|---|---|---|"]
    for v in verdicts:
        effect = "–" if v.effect is None else number(v.effect.value)
        interval = "–" if v.interval is None else str(v.interval)
        mark = " (primary)" if v.role == "primary" else ""
        p = number(v.p_adjusted)
        lines.append(f"| {v.claim} | {_plain(v.title)}{mark} | **{v.verdict}** | {effect} | {interval} | {p} | {v.n} |")
    for v in verdicts:
        lines += ["", f"## {v.claim}: {_plain(v.title)}", "", f"**{v.verdict}**: {_plain(v.reason)}.", ""]
        lines += [f"- {_plain(line)}" for line in _details(v)]
    return "\n".join(lines) + "\n"


def verdict_text(verdict: Verdict) -> str:
    """One claim in full, as plain text."""
    return "\n".join([verdict.line(), f"  {verdict.reason}", *(f"  {line}" for line in _details(verdict))])


def write_claims(verdicts: Sequence[Verdict], out: str | Path) -> list[Path]:
    """Write claims.json and claims.md into `out`; returns both paths.

    Raises:
        UserError: if the folder cannot be made.
    """
    folder = output_folder(out)
    paths = [folder / "claims.json", folder / "claims.md"]
    for path, text in zip(paths, (claims_json(verdicts), claims_markdown(verdicts)), strict=True):
        write_atomic(path, text)
    return paths


def _details(v: Verdict) -> list[str]:
    lines = [f"source: {v.source}", f"rule: {v.rule.text}"]
    margin = "" if v.rule.margin is None else f", margin {v.rule.margin:g}"
    lines.append(f"level {v.rule.level:g}{margin}; at least {v.rule.minimal_n} {v.rule.unit}, here {v.n}")
    if v.effect is not None:
        lines.append("effect: " + _estimate(v.effect))
    if v.p_value is not None:
        corrected = "" if v.role == "exploratory" else f", after Holm {number(v.p_adjusted)}"
        lines.append(f"p = {number(v.p_value)}{corrected}")
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
    interval = "" if e.interval is None else f" {e.interval} ({e.interval.level:.0%}, {e.interval.kind})"
    p = "" if e.p_value is None else f", p = {number(e.p_value)}"
    n = "" if e.n is None else f", n = {e.n}"
    note = f" ({e.note})" if e.note else ""
    return f"{e.name}: {number(e.value)} {'' if e.unit == '1' else e.unit}".rstrip() + f"{interval}{p}{n}{note}"


def _plain(text: str) -> str:
    """Text on one line, escaped for Markdown tables, HTML and code."""
    return " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|").replace("`", "'")
