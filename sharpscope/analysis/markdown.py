"""A report as Markdown, for a pull request: the same verdicts, tables, figures and tokens as the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sharpscope.analysis.claims import LIMITS, versions
from sharpscope.analysis.figures.style import Picture
from sharpscope.analysis.overview import Overview, Spot, spots_of
from sharpscope.analysis.report import Report, VerdictSection
from sharpscope.analysis.text import Grid, escape_markdown, number, shown


def report_markdown(report: Report) -> str:
    """The whole report; images are the files beside it."""
    lines = ["# sharpscope report", "", *(_overview(report.overview) if report.overview is not None else [])]
    if report.messages:
        lines += ["## What to know first", "", *(f"- {escape_markdown(message)}" for message in report.messages), ""]
    lines += _verdicts(report)
    lines += ["## Runs side by side", ""]
    if len(report.studies) > 1:
        lines += ["The runs belong to different tasks, task settings or initial policies. These are not compared.", ""]
    for section in report.studies:
        lines += [f"### {escape_markdown(section.study.name)}", ""]
        lines += [line for table in section.grids for line in _grid(table, 4)]
    lines += [*_grid(report.run_grid, 3), "## Figures", ""]
    for section in report.studies:
        lines += _images(section.figures)
        lines += (
            ["Not shown:", "", *(f"- {escape_markdown(text)}" for text in section.missing), ""]
            if section.missing
            else []
        )
    lines += ["## Counterfactual updates", ""] if report.forks else []
    for fork in report.forks:
        lines += [f"### {escape_markdown(fork.name)}", ""] if len(report.forks) > 1 else []
        lines += _images({fork.picture.name: fork.picture}) if fork.picture.figure is not None else []
        lines += [line for table in fork.grids for line in _grid(table, 4)]
    lines += _spikes(report)
    events = report.event_grid
    lines += ["## Events", "", "No rule warned in these runs.", ""] if events is None else _grid(events, 2)
    if isinstance(report.sampler, Grid):
        lines += _grid(report.sampler, 3)
    elif report.sampler is not None:
        lines += ["### Sampler against trainer", "", escape_markdown(report.sampler), ""]
    lines += _grid(report.cost_grid, 2)
    lines += [
        "## Make it again",
        "",
        *(f"- {escape_markdown(makes)}: {_code(text)}" for makes, text in report.commands.rows),
    ]
    return "\n".join([*lines, ""])


def _overview(screen: Overview) -> list[str]:
    """The first screen."""
    lines = [escape_markdown(screen.finding), ""] if screen.finding else []
    lines += ["## What moved the model", ""]
    for moved in screen.moved:
        lines += [f"{escape_markdown(moved.run)}, {escape_markdown(moved.text)}, by share of its square:", ""]
        lines += _tokens(moved.spots)
        lines += [f"- prompt {share:+.1%}: {escape_markdown(shown(text))}" for share, text in moved.prompts]
        lines += [""]
    lines += [escape_markdown(screen.moved_text), ""] if screen.moved_text else []
    for part in (screen.rotation, screen.sharpness, screen.result):
        lines += (
            _grid(part.grid, 2) if part.grid is not None else [f"## {part.title}", "", escape_markdown(part.text), ""]
        )
    lines += [f"Not in these tables: {escape_markdown(screen.more)}.", ""] if screen.more else []
    return lines


def _verdicts(report: Report) -> list[str]:
    lines = ["## Verdicts", ""]
    lines += [escape_markdown(report.verdict_line), ""] if report.verdict_line else []
    lines += ["| claim | | verdict | effect | 95 % interval | p | n |", "|---|---|---|---|---|---|---|"]
    for section in report.judged:
        for v in versions(section.verdict):
            title = f"{v.title} ({v.version})" if v.version else v.title
            effect = "–" if v.effect is None else v.effect.text
            interval = "–" if v.effect is None or v.interval is None else v.effect.interval_text
            cells = [v.claim, title, f"**{v.verdict}**", effect, interval, number(v.p_value), str(v.n)]
            lines.append(
                "| " + " | ".join(cell if cell.startswith("**") else escape_markdown(cell) for cell in cells) + " |"
            )
    if not report.judged:
        lines = lines[:-2]
    lines += [line for section in report.judged for line in ["", *_verdict(section)]]
    if report.untestable:
        names = ", ".join(section.verdict.claim for section in report.untestable)
        lines += ["", f"<details><summary>Untestable with these runs: {names}</summary>"]
        lines += [line for section in report.untestable for line in ["", *_verdict(section)]]
        lines += ["", "</details>"]
    return [*lines, "", escape_markdown(LIMITS), ""]


def _verdict(section: VerdictSection) -> list[str]:
    v = section.verdict
    lines = [
        f"<details><summary>{v.claim}: {v.verdict}</summary>",
        "",
        f"{escape_markdown(v.title)}: {escape_markdown(v.reason)}.",
        "",
    ]
    lines += _images(section.figures)
    lines += [line for table in (section.numbers, section.read) if table is not None for line in _grid(table, 4)]
    lines += [
        f"- rule: {escape_markdown(v.rule.text)}",
        f"- level {v.rule.level:g}; at least {v.rule.minimal_n} {escape_markdown(v.rule.unit)}, here {v.n}",
    ]
    lines += [f"- confounder: {escape_markdown(c.name)}: {escape_markdown(c.handling)}" for c in v.confounders]
    lines += [f"- note: {escape_markdown(note)}" for note in v.notes]
    lines += [f"- what would settle it: {escape_markdown(v.settles)}"] if v.settles else []
    return [*lines, f"- again: {_code(section.command)}", "", "</details>"]


def _images(figures: Mapping[str, Picture]) -> list[str]:
    lines = []
    for name, picture in figures.items():
        caption = f"{escape_markdown(picture.caption)} ([SVG]({name}.svg))"
        lines += [f"![{escape_markdown(picture.name)}]({name}.png)", "", caption, ""]
    return lines


def _spikes(report: Report) -> list[str]:
    lines = ["## Spikes and what made them", "", *(_grid(report.spike_grid, 0) if report.spike_grid else [])]
    for name, choice in report.choices.items():
        for spike in choice.spikes:
            if spike.tokens is not None:
                lines += [f"{escape_markdown(name)}, step {spike.step}, by share of the squared gradient norm:", ""]
                lines += [*_tokens(spots_of(choice.run, spike)), ""]
    lines += [report.no_spikes, ""] if len(lines) == 2 else []
    return [*lines, *([escape_markdown(report.not_kept), ""] if report.not_kept else [])]


def _tokens(spots: Sequence[Spot]) -> list[str]:
    """One line per token, in its sentence."""
    return [
        f"- {spot.share:+.1%}, π = {spot.probability:.3g}, completion {spot.rollout}: "
        + escape_markdown(shown(f"{spot.before}▸{spot.token}◂{spot.after}"))
        for spot in spots
    ]


def _grid(table: Grid, level: int) -> list[str]:
    """A grid with its heading (none at level 0) and note."""
    lines = [f"{'#' * level} {escape_markdown(table.title)}", ""] if level else []
    lines += [escape_markdown(table.note), ""] if table.note else []
    lines += [_row(table.columns), "|" + "---|" * len(table.columns), *map(_row, table.rows)]
    return [*lines, ""]


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(escape_markdown(cell) for cell in cells) + " |"


def _code(command: str) -> str:
    """A command as code; a backtick in a path would end it, so such a command is escaped text."""
    line = " ".join(shown(command).split())
    return f"`{line}`" if "`" not in line else escape_markdown(line)
