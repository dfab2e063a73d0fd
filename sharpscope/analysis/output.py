"""What is made of runs: `analyze` writes page, figures and tables as files; in a notebook the page is an object that Jupyter shows."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import pandas as pd

from sharpscope.analysis.headline import largest_update
from sharpscope.analysis.html.page import report_html
from sharpscope.analysis.html.tokens import of_step
from sharpscope.analysis.report import Page, page_of
from sharpscope.analysis.study import Paths, last_step, nothing_found, quiet
from sharpscope.analysis.text import csv_text
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
        figures: write figures for papers.
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
        pictures: dict[str, Any] = {section.name: section.content for section in figures_of}
        saved = {}
        if pictures or figures:
            from sharpscope.analysis.figures import run_pictures, save

            for name, figure in (*pictures.items(), *(run_pictures(runs) if figures else ())):
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
        steps = sorted(int(one) for one in run.rollouts["step"].unique())
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
