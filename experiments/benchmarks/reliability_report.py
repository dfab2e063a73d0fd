"""Writes reliability.md from reliability.json: `python -m experiments.benchmarks.reliability_report`."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def paragraph(text: str) -> str:
    """A paragraph, wrapped."""
    return textwrap.fill(" ".join(text.split()), 140)


def page(found: dict[str, Any]) -> str:
    """The page as Markdown."""
    rows, covered = found["reliability"], found["coverage"]
    policies, prompts = rows[0]["policies"], rows[0]["prompts"]
    lines = [
        "# Which measure of sharpness is most reliable per second",
        "",
        paragraph("""`python -m experiments.benchmarks.reliability`, then `python -m experiments.benchmarks.reliability_report`. One
        processor core, the embedded knights-and-knaves policy (0.93 M parameters)."""),
        "",
        paragraph(f"""{policies} policies: the embedded one and what 4 and 12 AdamW steps on stored solutions make of it at three
        learning rates. Each is measured on the same {prompts} training prompts. Split-half: mean Spearman correlation over the
        policies between the means of two random halves of the prompts. Reliability: of all prompts, by Spearman and Brown, and from
        it the number of prompts and the processor seconds for a reliability of 0.9. Seconds of `expected_failure` include drawing
        two completions per prompt. With so few policies a correlation has a standard error of about 0.3, so only large
        differences count."""),
        "",
        "| objective | measure | radius | split-half | reliability | prompts for 0.9 | seconds for 0.9 | standard error "
        "| spread over policies |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    ranked = sorted(rows, key=lambda row: row["seconds_for_target"] or float("inf"))
    for row in ranked:
        needed = [
            "–" if row[name] is None else f"{row[name]:.{digits}f}"
            for name, digits in (("prompts_for_target", 0), ("seconds_for_target", 1))
        ]
        lines.append(
            f"| {row['objective']} | {row['measure']} | {row['rho']:g} | {row['half']:.2f} | {row['full']:.2f} | {needed[0]} | {needed[1]} | "
            f"{row['relative_std_error']:.0%} | {row['spread']:.2f} |"
        )
    best = ranked[0]
    lines += [
        "",
        "Standard error: over prompts, relative to the value, median over policies. Spread: standard deviation of ln |value| over policies.",
        "",
        paragraph(f"""Most reliable per second: {best["measure"]} of {best["objective"]} at radius {best["rho"]:g}, which needs
        {best["prompts_for_target"]:.0f} prompts for 0.9. The defaults follow: radius 0.5 and `nll` in the preset `light`, 128 training
        and 128 held-out prompts in `standard`. `light` itself has 20 training prompts, so that ten rounds stay cheap: enough for a
        trend with its standard errors, not to compare runs. –: the halves do not correlate positively, so no number of prompts can
        be given."""),
        "",
        "## Coverage of the standard errors over prompts",
        "",
        paragraph(f"""{covered[0]["redraws"]} draws of {covered[0]["prompts"]} of {covered[0]["pool"]} prompts on the embedded policy,
        `nll`. Coverage: share of draws whose 95 % t-interval over prompts (corrected for the finite pool) holds the mean over all
        draws."""),
        "",
        "| measure | radius | spread of the draws | standard error | coverage |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['measure']} | {row['rho']:g} | {row['spread']:.3g} | {row['std_error']:.3g} | {row['coverage']:.1%} |"
        for row in covered
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    (HERE / "reliability.md").write_text(page(json.loads((HERE / "reliability.json").read_text())))
