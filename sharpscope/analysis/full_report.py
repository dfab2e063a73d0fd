"""The whole report of some runs: figures, tables, claims, Markdown and the HTML page; or the page alone."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from sharpscope.analysis.claim_pictures import save_pictures
from sharpscope.analysis.claims import write_claims
from sharpscope.analysis.html import report_html
from sharpscope.analysis.markdown import report_markdown
from sharpscope.analysis.output import AnalysisResult, analyze, collect, load_several, nothing_found
from sharpscope.analysis.report_content import ReportContent, content_of
from sharpscope.analysis.tables.endpoints import endpoint_tables
from sharpscope.analysis.tables.paper import paper_tables, write_tables
from sharpscope.errors import UserError
from sharpscope.traces import DamagedPartWarning, write_atomic

Paths = str | Path | Iterable[str | Path]
Progress = Callable[[str], None]


@dataclass(frozen=True)
class FullReport:
    """What was written.

    Attributes:
        analysis: figures, tables and messages of the studies.
        claim_figures: files of the claims' figures.
        tables: files of the paper's tables.
        html, markdown: the report as a page and as Markdown.
    """

    analysis: AnalysisResult
    claim_figures: list[Path]
    tables: list[Path]
    html: Path
    markdown: Path


def write_full_report(paths: Paths, out: str | Path = "report", *, on_progress: Progress | None = None) -> FullReport:
    """Analyse the runs below `paths` and write everything into `out`: report.html, report.md, claims.json, figures, tables.

    Raises:
        UserError: if there is no run with at least one step, or `out` cannot be written.
    """
    given = [paths] if isinstance(paths, str | Path) else list(paths)
    result = analyze(given, out, on_progress=on_progress)
    runs = result.runs
    content = content_of(runs, result.reports, result.said_first, given, on_progress)
    write_claims(content.verdicts, result.out)
    drawn = save_pictures(content.evidence, result.out)
    tables = write_tables([*paper_tables(runs), *endpoint_tables(runs)], result.out)
    if on_progress is not None:
        on_progress("writing report.html")
    made = {path.stem: path.read_text(encoding="utf-8") for path in result.out.glob("*.svg")}
    pictures = {name: made[name] for name, _ in content.pictures() if name in made}
    page = result.out / "report.html"
    write_atomic(page, _page(content, pictures))
    write_atomic(result.report, report_markdown(content))
    return FullReport(result, drawn, tables, page, result.report)


def write_page(paths: Paths, out: str | Path, *, on_progress: Progress | None = None) -> Path:
    """Write the page alone to the file `out`. Runs without a step make a page too, which says so.

    Raises:
        UserError: if there is no readable run, or `out` cannot be written.
    """
    given = [paths] if isinstance(paths, str | Path) else list(paths)
    file = Path(out)
    if file.suffix != ".html":
        raise UserError(f"out: {file} does not end in .html; give the page's file, such as report.html")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DamagedPartWarning)  # what they say is in the messages
        warnings.filterwarnings("ignore", message=".* is left out: ")
        runs = load_several(given)
    if not len(runs):
        raise UserError(nothing_found(given, runs))
    reports, messages = collect(runs, on_progress)
    content = content_of(runs, reports, messages, given, on_progress)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(file, _page(content, {}))
    except OSError as error:
        raise UserError(f"out: {file} cannot be written ({error.strerror}); choose another --out") from error
    return file


def _page(content: ReportContent, pictures: dict[str, str]) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DamagedPartWarning)
        return report_html(content, pictures)
