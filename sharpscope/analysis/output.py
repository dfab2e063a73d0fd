"""What is made of runs: `analyze` writes page, figures and tables as files; in a notebook the page is an object that Jupyter shows.

The page is one file that needs nothing from outside, in which text from runs and models is inert.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from importlib.resources import files
from pathlib import Path

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from sharpscope import __version__
from sharpscope.analysis.headline import largest_update
from sharpscope.analysis.report import Page, page_of
from sharpscope.analysis.sections import Marked, cell_text, is_text
from sharpscope.analysis.study import Paths, last_step, nothing_found, quiet
from sharpscope.analysis.summary import head_of
from sharpscope.analysis.text import csv_text, shown
from sharpscope.analysis.token_view import of_step, token_view
from sharpscope.errors import UserError
from sharpscope.traces import Run, Runs, load_runs, output_folder, write_atomic


@dataclass(frozen=True)
class AnalysisResult:
    """What `analyze` wrote.

    Attributes:
        out: the folder.
        page: report.html.
        figures: name → its files (PNG, SVG); empty unless asked for.
        tables: name → its CSV file.
    """

    out: Path
    page: Path
    figures: dict[str, list[Path]]
    tables: dict[str, Path]


def analyze(
    paths: Paths,
    out: str | Path | None = None,
    *,
    claims: bool = False,
    figures: bool = False,
    on_progress: Callable[[str], None] | None = None,
) -> AnalysisResult:
    """Analyze the runs below `paths` (one folder or several): write a page and its tables.

    Runs of different tasks, task settings or initial policies are never compared. Files of an earlier analysis in the same folder
    are refreshed.

    Args:
        paths: run folders, or folders of runs.
        out: folder of report.html, tables/ and figures/; None: `report` beside the runs.
        claims: test the published claims too, with their figures.
        figures: write every figure for papers that the runs have the numbers of.
        on_progress: called with what is being done.

    Raises:
        UserError: if no run has a step or a counterfactual update, or `out` cannot be written.
    """
    given = [paths] if isinstance(paths, str | Path) else list(paths)
    tell = on_progress or (lambda text: None)
    with quiet():
        runs = load_runs(given)
        if not any(last_step(run) or run.rows("forks") for run in runs):
            raise UserError(nothing_found(given, runs))
        beside = os.path.commonpath([Path(run.path).absolute().parent for run in runs])
        folder = output_folder(Path(os.path.relpath(beside)) / "report" if out is None else out)
        tell("comparing the runs" + (" and testing the claims" if claims else ""))
        content = page_of(runs, " ".join(shlex.quote(str(path)) for path in given), claims)
        figures_of = [s for s in content.sections if not isinstance(s.content, str | pd.DataFrame)]
        pictures: dict[str, object] = {section.name: section.content for section in figures_of}
        saved = {}
        if pictures or figures:
            from sharpscope.analysis.plots import all_figures, save

            drawn = all_figures(runs) if figures else ()
            for name, figure in (*pictures.items(), *drawn):
                tell(f"{name}.png")
                saved[name] = save(figure, output_folder(folder / "figures"), name)
        tables = {}
        for name, table in content.tables.items():
            if len(table):
                tables[name] = output_folder(folder / "tables") / f"{name}.csv"
                write_atomic(tables[name], csv_text(table))
        tell("writing the page")
        svg = {name: saved[name][1].read_text(encoding="utf-8") for name in pictures}
        page = folder / "report.html"
        write_atomic(page, report_html(content, svg))
    return AnalysisResult(folder, page, saved, tables)


@dataclass(frozen=True, repr=False)
class Html:
    """A page. Jupyter shows it in a frame of its own, whose scripts reach nothing of the notebook.

    Attributes:
        page: the HTML file as text.
        height: of the frame [pixels].
    """

    page: str
    height: int = 900

    def save(self, path: str | Path) -> None:
        """Write the page to a file, which works offline."""
        write_atomic(Path(path), self.page)

    def _repr_html_(self) -> str:
        frame = f'width="100%" height="{int(self.height)}" frameborder="0" title="sharpscope"'
        return f'<iframe sandbox="allow-scripts" {frame} srcdoc="{escape(self.page)}"></iframe>'

    def __repr__(self) -> str:
        return f"Html({len(self.page):,} characters; shown by Jupyter, or save(path))"


def show(runs: Runs, height: int = 900) -> Html:
    """The page of `runs`, as `sharpscope analyze` writes it."""
    with quiet():
        return Html(report_html(page_of(runs, str(runs.root)), {}), height)


def show_tokens(run: Run, step: int | None = None, height: int = 700) -> Html:
    """The completions of a step, token by token; see `Run.show_tokens`."""
    with quiet():
        steps = list(run.step_rows("rollouts"))
        if step is None and steps:
            largest = largest_update(run)
            step = steps[-1] if largest is None else largest.step
        if step not in steps:
            there = f"; those of steps {', '.join(map(str, steps[:12]))} were" if steps else ""
            raise UserError(f"step {step}: no completion of it was recorded in {run.name}{there}")
        only = Runs(run.path, {run.name: run}, {})
        rule = f"Completions of step {step}, by prompt, that of the largest token first."
        content = Page(only, str(run.path), [], [], {}, of_step(run, int(step)), rule)
        return Html(report_html(content, {}), height)


# -- The page as HTML

PARTS = (
    "Found",
    "Tokens",
    "Curves",
    "Compare",
    "Sharpness",
    "Counterfactual updates",
    "Causes and identities",
    "Events and cost",
    "Claims",
    "Make it again",
)
"""The parts of the page in order."""
MARK = (
    '<circle class="lens" cx="20" cy="20" r="17"/>'
    '<path class="peak" d="M6 28H13.5L20 7L26.5 28H34"/>'
)
"""The project's mark, a sharp peak under a lens, as elements of an SVG of 40 by 40; pages give it its colors."""
_SVG = "data:image/svg+xml;base64,"


def report_html(page: Page, pictures: Mapping[str, str], live: bool = False) -> str:
    """The whole page.

    Args:
        page: what it says.
        pictures: name of a figure → its SVG text.
        live: it is served by `live` and asks there for what is new.
    """
    view = token_view(page.runs.by_name, page.choices)
    scripts = [_asset("page.js")]
    data = {}
    charts = [group for group in page.charts if group["charts"]]
    if view["completions"]:
        data["tokens"] = Markup(script_json(view))
        scripts = [*map(_asset, ("colors.js", "tokens.js", "view.js")), *scripts]
    if charts:
        data["curves"] = Markup(script_json(charts))
        scripts += map(_asset, ("uplot/uPlot.iife.min.js", "curves.js"))
    if live:
        scripts.append(_asset("live.js"))
    css = _asset("report.css") + (_asset("uplot/uPlot.min.css") if charts else "")
    names = list(page.runs.by_name)
    numbers = {name: n for n, name in enumerate(page.choices)}
    there = {(view["runs"][c["r"]], c["s"], c["n"]) for c in view["completions"] if "t" in c}

    def link(cell: Marked) -> str:
        """Address of a token in the token view; empty if its completion is not shown there."""
        known = cell.run in numbers and (shown(cell.run), cell.step, cell.rollout) in there
        return (
            f"#token-{numbers[cell.run]}-{cell.step}-{cell.rollout}-{cell.position}"
            if known
            else ""
        )

    parts = {name: [section for section in page.sections if section.part == name] for name in PARTS}
    shown_always = {"Tokens", "Curves"} if charts else {"Tokens"}
    held = {name: some for name, some in parts.items() if some or name in shown_always}
    head = head_of(page)
    html = _environment().get_template("report.html.j2")
    return html.render(
        version=__version__,
        source=page.source,
        policy=policy(scripts, [css]) + ("; connect-src 'self'" if live else ""),
        css=Markup(css),
        scripts=list(map(Markup, scripts)),
        data=data,
        parts=held,
        kind=lambda section: {str: "text", pd.DataFrame: "table"}.get(
            type(section.content), "figure"
        ),
        # the address of an SVG file inside the page, in which nothing can run
        picture=lambda section: Markup(
            _SVG + base64.b64encode(pictures[section.name].encode()).decode()
        ),
        link=link,
        is_marked=lambda cell: isinstance(cell, Marked),
        text_columns=lambda frame: [is_text(frame.iloc[:, n]) for n in range(frame.shape[1])],
        cell_text=cell_text,
        one_line=lambda text: " ".join(text.replace("\n", " ⏎ ").split(" ")),
        title=head.name if len(names) == 1 else f"{head.name}: {head.facts}",
        head=head,
        mark=Markup(MARK),
        steps=dict.fromkeys(section.step for section in page.sections if section.step is not None),
        token_count=len(view["completions"]),
        token_rule=page.rule,
        token_notes=view["notes"],
    )


def policy(scripts: Sequence[str], styles: Sequence[str]) -> str:
    """The Content-Security-Policy: nothing from outside, no form, no frame, and only the inline code that is hashed here."""
    rules = ["default-src 'none'", "img-src data:", "base-uri 'none'", "form-action 'none'"]
    rules += [
        "script-src " + " ".join(map(_source_hash, scripts)),
        "style-src " + " ".join(map(_source_hash, styles)),
    ]
    return "; ".join(rules)


def script_json(value: object) -> str:
    """`value` as JSON for the inside of a script element: no character in it can end the element or open a comment."""
    text = json.dumps(
        value,
        ensure_ascii=False,
        allow_nan=False,
        separators=(",", ":"),
    )
    for char in "<>&\u2028\u2029":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return text


def _source_hash(text: str) -> str:
    """The source expression of the policy that allows exactly this inline script or style."""
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"


@cache
def _environment() -> Environment:
    """Every expression is escaped, and every control and bidirectional mark in it made visible."""
    return Environment(
        loader=PackageLoader("sharpscope.analysis", "html/templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: (
            shown(value) if isinstance(value, str) and not isinstance(value, Markup) else value
        ),
    )


@cache
def _asset(name: str) -> str:
    return files("sharpscope.analysis").joinpath("html", "assets", name).read_text(encoding="utf-8")
