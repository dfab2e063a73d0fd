"""`analyze` and `write_page`: a report as files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from sharpscope.analysis.claims import write_claims
from sharpscope.analysis.figures.study import main_figures
from sharpscope.analysis.figures.style import save
from sharpscope.analysis.html import report_html
from sharpscope.analysis.loading import Paths, load_several, nothing_found, quiet
from sharpscope.analysis.markdown import report_markdown
from sharpscope.analysis.report import Report, StudySection, VerdictSection, build
from sharpscope.analysis.study import last_step
from sharpscope.analysis.tables.paper import write_tables
from sharpscope.analysis.text import csv_text, escape_markdown
from sharpscope.errors import UserError
from sharpscope.traces import Runs, output_folder, write_atomic

Progress = Callable[[str], None]


@dataclass(frozen=True)
class AnalysisResult:
    """What `analyze` wrote.

    Attributes:
        out: the folder.
        figures: name → its files (PNG, SVG).
        tables: name → its CSV file.
        messages: what a reader should know, one line each: runs left out, damaged parts, missing data.
        report, html: the report as Markdown and as a page.
        content: what was rendered.
    """

    out: Path
    figures: dict[str, list[Path]]
    tables: dict[str, Path]
    messages: list[str]
    report: Path
    html: Path
    content: Report

    @property
    def summary(self) -> pd.DataFrame:
        """The table behind summary.csv."""
        return self.content.summary


def analyze(paths: Paths, out: str | Path = "report", *, on_progress: Progress | None = None) -> AnalysisResult:
    """Analyze the runs below `paths` (one folder or several) and write everything into `out`.

    Written are report.html, report.md, claims.json and claims.md, every figure as PNG and SVG, summary.csv, runs.csv,
    forks.csv if there are counterfactual updates, and the tables as CSV, Markdown and LaTeX. Runs of different tasks, task
    settings or initial policies are never compared; runs that cannot be read and data that were not recorded are named in
    `messages` and in the report.

    Raises:
        UserError: if no run has a step or a counterfactual update, or `out` cannot be written.
    """
    given = [paths] if isinstance(paths, str | Path) else list(paths)
    with quiet():
        runs = load_several(given)
        if not any(last_step(run) or run.rows("forks") for run in runs):
            raise UserError(nothing_found(given, runs))
    folder = output_folder(out)
    report = build(runs, given, on_progress=on_progress)
    figures = {}
    for name, figure in report.figures.items():
        if on_progress is not None:
            on_progress(f"{name}.png")
        figures[name] = save(figure, folder, name)
    tables = {"summary": folder / "summary.csv", "runs": folder / "runs.csv"}
    write_atomic(tables["summary"], csv_text(report.summary))
    write_atomic(tables["runs"], csv_text(runs.table))
    if report.forks:
        tables["forks"] = folder / "forks.csv"
        write_atomic(tables["forks"], csv_text(pd.concat([section.differences for section in report.forks])))
    tables |= {path.stem: path for path in write_tables(report.tables, folder) if path.suffix == ".csv"}
    write_claims([section.verdict for section in report.verdicts], folder)
    page, text = folder / "report.html", folder / "report.md"
    svg = {name: files[1].read_text(encoding="utf-8") for name, files in figures.items()}
    with quiet():
        write_atomic(page, report_html(report, svg))
        write_atomic(text, report_markdown(report))
    return AnalysisResult(folder, figures, tables, [*report.messages, *report.missing], text, page, report)


def write_page(paths: Paths, out: str | Path, *, on_progress: Progress | None = None) -> Path:
    """Write only the page, to the file `out`. Runs without a step make a page too, which says so.

    Raises:
        UserError: if there is no readable run, or `out` cannot be written.
    """
    given = [paths] if isinstance(paths, str | Path) else list(paths)
    file = Path(out)
    if file.suffix != ".html":
        raise UserError(f"out: {file} does not end in .html; give the page's file, such as report.html")
    with quiet():
        runs = load_several(given)
        if not len(runs):
            raise UserError(nothing_found(given, runs))
        text = report_html(build(runs, given, on_progress=on_progress))
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(file, text)
    except OSError as error:
        raise UserError(f"out: {file} cannot be written ({error.strerror}); choose another --out") from error
    return file


def write_figures(runs: Runs, out: str | Path) -> dict[str, list[Path]]:
    """Draw every figure of `runs` into folders below `out`, each as PNG and SVG.

    `paper/` has the main figures, at most eight at the width of a paper's column, with captions.md; `supplement/` has all
    others under the names of `figures_of`. Files in these folders that are not written now are kept.

    Returns:
        Folder name → the PNG files in it.

    Raises:
        UserError: if `out` cannot be written.
    """
    report = build(runs)
    sections: list[StudySection | VerdictSection] = [*report.studies, *report.verdicts]
    pictures = {name: picture for section in sections for name, picture in section.figures.items()}
    main = main_figures(pictures)
    folders = {name: output_folder(Path(out) / name) for name in ("paper", "supplement")}
    written: dict[str, list[Path]] = {name: [] for name in folders}
    for name, figure in report.figures.items():
        kind = "paper" if name in main else "supplement"
        written[kind].append(save(figure, folders[kind], name)[0])
    text = [
        f"**Figure {n}** (`{name}`). {escape_markdown(picture.caption)}"
        for n, (name, picture) in enumerate(main.items(), 1)
    ]
    write_atomic(folders["paper"] / "captions.md", "\n\n".join(["# Main figures", *text]) + "\n")
    return written


def figures_of(runs: Runs) -> dict[str, Figure]:
    """Every figure that `analyze` would write of `runs`, by name, for a notebook; nothing is written."""
    return build(runs).figures
