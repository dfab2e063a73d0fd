"""The Markdown report: what was found, what is missing, every figure; text from files is escaped."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from sharpscope.analysis.figures.study import Picture
from sharpscope.analysis.studies import Study
from sharpscope.analysis.tables.summary import method_table

_MARKUP = re.compile(r"([\\`*_{}\[\]<>|#!~$&])")


@dataclass(frozen=True)
class StudyReport:
    """A study with its table and its pictures, as the report shows them."""

    study: Study
    table: pd.DataFrame
    pictures: Sequence[Picture]


def escape(text: object) -> str:
    """Text that Markdown and HTML show as it is, on one line."""
    line = " ".join("".join(char if char.isprintable() else " " for char in str(text)).split())
    return _MARKUP.sub(r"\\\1", line)


def markdown_table(frame: pd.DataFrame) -> str:
    """A frame of text as a Markdown table."""
    rows = ["| " + " | ".join(escape(name) for name in frame.columns) + " |", "|" + "---|" * len(frame.columns)]
    rows += ["| " + " | ".join(escape(cell) for cell in row) + " |" for row in frame.itertuples(index=False)]
    return "\n".join(rows)


def report_text(reports: Sequence[StudyReport], runs: pd.DataFrame, messages: Sequence[str]) -> str:
    """The whole report. `runs`: one row a run, as Runs.table; `messages`: what a reader should know first."""
    lines = ["# sharpscope report", ""]
    if len(reports) > 1:
        lines += ["The runs belong to different tasks, task settings or initial policies. These are not compared:", ""]
        lines += [f"- {escape(report.study.name)}: {len(report.study.settings)} settings" for report in reports] + [""]
    if messages:
        lines += ["## What to know first", ""] + [f"- {escape(message)}" for message in messages] + [""]
    for report in reports:
        lines += _study_lines(report)
    shown = runs[["run", "method", "seed", "status", "steps_done", "started"]].astype(str)
    return "\n".join([*lines, "## Runs", "", markdown_table(shown), ""])


def _study_lines(report: StudyReport) -> list[str]:
    study = report.study
    lines = [f"## {escape(study.name)}", ""]
    if len(report.table):
        text = (
            f"All settings at step {study.horizon}, the last that all have. ±: half of the 95 % t-interval over seeds"
        )
        single = bool((report.table["runs"] == 1).any())
        text += "; one run alone has none, and says nothing about other seeds." if single else "."
        table = method_table(report.table)
        flipped = table.set_index("setting").T.reset_index(names="metric")
        units = dict(zip(report.table["metric"], report.table["unit"], strict=True))
        flipped.insert(1, "unit", [units.get(name, "") for name in flipped["metric"]])
        lines += [text, "", markdown_table(flipped), ""]
    for picture in report.pictures:
        if picture.figure is not None:
            name = f"{study.slug}{picture.name}"
            lines += [
                f"![{escape(picture.name)}]({name}.png)",
                "",
                f"{escape(picture.caption)} ([SVG]({name}.svg))",
                "",
            ]
    missing = [picture.missing for picture in report.pictures if picture.missing]
    if missing:
        lines += ["Not shown:", ""] + [f"- {escape(text)}" for text in missing] + [""]
    return lines
