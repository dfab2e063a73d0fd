"""The report as Markdown, for a pull request: the same verdicts, tables, figures and tokens as the page."""

from __future__ import annotations

from collections.abc import Sequence

from sharpscope.analysis import report_sections as sections
from sharpscope.analysis.claims import Verdict
from sharpscope.analysis.claims.writers import LIMITS
from sharpscope.analysis.completions import choose
from sharpscope.analysis.figures.study import Picture
from sharpscope.analysis.report import StudyReport, escape
from sharpscope.analysis.report_content import ReportContent
from sharpscope.analysis.spikes import Spike
from sharpscope.analysis.text import shown
from sharpscope.analysis.token_text import piece_maker
from sharpscope.traces import Run

AROUND = 6
"""Tokens shown on either side of a spike's token."""
WIDTH = 80
"""Characters of the token, and on either side of it."""


def report_markdown(content: ReportContent) -> str:
    """The whole report; images are the files beside it."""
    lines = ["# sharpscope report", ""]
    if content.messages:
        lines += ["## What to know first", "", *(f"- {escape(message)}" for message in content.messages), ""]
    lines += _verdicts(content)
    lines += ["## Runs side by side", ""]
    if len(content.reports) > 1:
        lines += ["The runs belong to different tasks, task settings or initial policies. These are not compared.", ""]
    for report in content.reports:
        tables = (
            sections.result_grid(report),
            sections.difference_grid(report.study),
            sections.setting_grid(report.study),
        )
        lines += [f"### {escape(report.study.name)}", ""]
        lines += [line for table in tables if table is not None for line in _grid(table, 4)]
    lines += _grid(sections.run_grid(content.runs), 3)
    lines += ["## Figures", "", *(line for report in content.reports for line in _figures(report))]
    lines += _spikes(content)
    events = sections.event_grid(content.runs)
    lines += ["## Events", "", "No rule warned in these runs.", ""] if events is None else _grid(events, 2)
    lines += _grid(sections.cost_grid(content.runs), 2)
    lines += ["## Make it again", ""]
    lines += [f"- {escape(makes)}: {_code(command)}" for makes, command in sections.commands(content)]
    return "\n".join([*lines, ""])


def _verdicts(content: ReportContent) -> list[str]:
    lines = [
        "## Verdicts",
        "",
        escape(LIMITS),
        "",
        "| claim | | verdict | effect | 95 % interval | p | n |",
        "|---|---|---|---|---|---|---|",
    ]
    for v in content.verdicts:
        effect = "–" if v.effect is None else sections.number(v.effect.value)
        interval = "–" if v.interval is None else str(v.interval)
        cells = [v.claim, v.title, f"**{v.verdict}**", effect, interval, sections.number(v.p_adjusted), str(v.n)]
        lines.append("| " + " | ".join(cell if cell.startswith("**") else escape(cell) for cell in cells) + " |")
    pictures = {name: picture for name, picture in content.pictures() if picture.claim}
    for v in content.verdicts:
        own = {name: picture for name, picture in pictures.items() if picture.claim == v.claim}
        lines += ["", *_verdict(v, own, content)]
    return [*lines, ""]


def _verdict(v: Verdict, pictures: dict[str, Picture], content: ReportContent) -> list[str]:
    lines = [f"<details><summary>{v.claim}: {v.verdict}</summary>", "", f"{escape(v.title)}: {escape(v.reason)}.", ""]
    for name, picture in pictures.items():
        lines += _image(name, picture)
    for table in (sections.number_grid(v), sections.read_grid(v)):
        lines += [] if table is None else _grid(table, 4)
    lines += [
        f"- rule: {escape(v.rule.text)}",
        f"- level {v.rule.level:g}; at least {v.rule.minimal_n} {escape(v.rule.unit)}, here {v.n}",
    ]
    lines += [f"- confounder: {escape(c.name)}: {escape(c.handling)}" for c in v.confounders]
    lines += [f"- note: {escape(note)}" for note in v.notes]
    lines += [f"- what would settle it: {escape(v.settles)}"] if v.settles else []
    command = f"sharpscope claims {content.source} --claim {v.claim} --details"
    return [*lines, f"- again: {_code(command)}", "", "</details>"]


def _figures(report: StudyReport) -> list[str]:
    lines = [
        line for p in report.pictures if p.figure is not None for line in _image(f"{report.study.slug}{p.name}", p)
    ]
    missing = [picture.missing for picture in report.pictures if picture.missing]
    return [*lines, *(["Not shown:", "", *(f"- {escape(text)}" for text in missing), ""] if missing else [])]


def _image(name: str, picture: Picture) -> list[str]:
    return [f"![{escape(picture.name)}]({name}.png)", "", f"{escape(picture.caption)} ([SVG]({name}.svg))", ""]


def _spikes(content: ReportContent) -> list[str]:
    table = sections.spike_grid(content.runs)
    lines = ["## Spikes and what made them", ""] + ([] if table is None else _grid(table, 0))
    for name, choice in choose(content.runs.by_name).items():
        for spike in choice.spikes:
            if spike.tokens is not None:
                lines += [f"{escape(name)}, step {spike.step}, by share of the squared gradient norm:", ""]
                lines += [*_tokens(choice.run, spike), ""]
    lines += [sections.no_spikes(content.runs), ""] if len(lines) == 2 else []
    left_out = sections.not_kept(content.runs)
    return [*lines, *([escape(left_out), ""] if left_out else [])]


def _tokens(run: Run, spike: Spike) -> list[str]:
    """One line a token, in its sentence."""
    maker = piece_maker(run)
    everything = run.tokens(steps=[spike.step], columns=["rollout", "position", "token_id"])
    lines = []
    for row in [] if spike.tokens is None else spike.tokens.to_dict("records"):
        own = everything[everything["rollout"] == row["rollout"]].sort_values("position").reset_index(drop=True)
        ids = [int(token) for token in own["token_id"]]
        texts = [f"⟨{token}⟩" for token in ids] if maker is None else maker(ids)
        at = int(own.index[own["position"] == row["position"]][0])
        before, after = "".join(texts[max(0, at - AROUND) : at]), "".join(texts[at + 1 : at + 1 + AROUND])
        said = f"{before[-WIDTH:]}▸{texts[at][:WIDTH]}◂{after[:WIDTH]}"
        share = f"{row['attribution']:+.1%}"
        lines.append(f"- {share}, π = {row['probability']:.3g}, completion {row['rollout']}: {escape(shown(said))}")
    return lines


def _grid(table: sections.Grid, level: int) -> list[str]:
    """A grid with its heading (none at level 0) and note."""
    lines = [f"{'#' * level} {escape(table.title)}", ""] if level else []
    lines += [escape(table.note), ""] if table.note else []
    lines += [_row(table.columns), "|" + "---|" * len(table.columns), *map(_row, table.rows)]
    return [*lines, ""]


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(escape(cell) for cell in cells) + " |"


def _code(command: str) -> str:
    """A command as code; a backtick in a path would end it, so such a command is escaped text."""
    line = " ".join(shown(command).split())
    return f"`{line}`" if "`" not in line else escape(line)
