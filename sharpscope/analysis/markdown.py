"""A report as Markdown, for a pull request: the same verdicts, tables, figures and tokens as the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sharpscope.analysis.claims import LIMITS, versions
from sharpscope.analysis.figures.style import Picture
from sharpscope.analysis.report import Grid, Report, VerdictSection
from sharpscope.analysis.spikes import Spike
from sharpscope.analysis.text import escape_markdown, number, shown
from sharpscope.analysis.token_text import piece_maker
from sharpscope.traces import Run

AROUND = 6
"""Tokens shown on either side of a spike's token."""
WIDTH = 80
"""Characters of the token, and on either side of it."""


def report_markdown(report: Report) -> str:
    """The whole report; images are the files beside it."""
    lines = ["# sharpscope report", ""]
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
    lines += _grid(report.sampler_grid, 3) if report.sampler_grid else []
    lines += _grid(report.cost_grid, 2)
    lines += [
        "## Make it again",
        "",
        *(f"- {escape_markdown(makes)}: {_code(text)}" for makes, text in report.commands.rows),
    ]
    return "\n".join([*lines, ""])


def _verdicts(report: Report) -> list[str]:
    lines = ["## Verdicts", "", escape_markdown(LIMITS), ""]
    lines += ["| claim | | verdict | effect | 95 % interval | p | n |", "|---|---|---|---|---|---|---|"]
    for section in report.verdicts:
        for v in versions(section.verdict):
            title = f"{v.title} ({v.version})" if v.version else v.title
            effect = "–" if v.effect is None else v.effect.text
            interval = "–" if v.effect is None or v.interval is None else v.effect.interval_text
            cells = [v.claim, title, f"**{v.verdict}**", effect, interval, number(v.p_value), str(v.n)]
            lines.append(
                "| " + " | ".join(cell if cell.startswith("**") else escape_markdown(cell) for cell in cells) + " |"
            )
    return [*lines, *(line for section in report.verdicts for line in ["", *_verdict(section)]), ""]


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
                lines += [*_tokens(choice.run, spike), ""]
    lines += [report.no_spikes, ""] if len(lines) == 2 else []
    return [*lines, *([escape_markdown(report.not_kept), ""] if report.not_kept else [])]


def _tokens(run: Run, spike: Spike) -> list[str]:
    """One line per token, in its sentence."""
    maker = piece_maker(run)
    everything = run.tokens(steps=[spike.step], columns=["rollout", "position", "token_id"])
    lines = []
    for row in [] if spike.tokens is None else spike.tokens.to_dict("records"):
        own = everything[everything["rollout"] == row["rollout"]].sort_values("position").reset_index(drop=True)
        ids = [int(token) for token in own["token_id"]]
        texts = [f"⟨{token}⟩" for token in ids] if maker is None else maker(ids)
        at = int(own.index[own["position"] == row["position"]][0])
        before, after = "".join(texts[max(0, at - AROUND) : at]), "".join(texts[at + 1 : at + 1 + AROUND])
        text = f"{before[-WIDTH:]}▸{texts[at][:WIDTH]}◂{after[:WIDTH]}"
        share = f"{row['attribution']:+.1%}"
        lines.append(
            f"- {share}, π = {row['probability']:.3g}, completion {row['rollout']}: {escape_markdown(shown(text))}"
        )
    return lines


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
