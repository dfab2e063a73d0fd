"""`analyze`: from whatever runs there are to figures, tables and a report in one folder."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from sharpscope.analysis.figures.study import Picture, Pictures
from sharpscope.analysis.figures.style import save
from sharpscope.analysis.frames import runs_of
from sharpscope.analysis.report import StudyReport, report_text
from sharpscope.analysis.studies import Study, studies
from sharpscope.analysis.tables.summary import SUMMARY, summary
from sharpscope.analysis.text import csv_text
from sharpscope.errors import UserError
from sharpscope.traces import DamagedPartWarning, Runs, load_runs, output_folder, write_atomic


@dataclass(frozen=True)
class AnalysisResult:
    """What `analyze` made.

    Attributes:
        out: the folder.
        figures: name -> its files (PNG, SVG).
        tables: name -> its CSV file.
        summary: the table behind summary.csv (SUMMARY columns).
        messages: what a person should know, one line each: left out runs, damaged parts, missing data.
        report: the Markdown file.
        runs: every readable run.
        reports: each study with its table and pictures.
        said_first: the part of `messages` that a report begins with: all but what is missing for a figure.
    """

    out: Path
    figures: dict[str, list[Path]]
    tables: dict[str, Path]
    summary: pd.DataFrame
    messages: list[str]
    report: Path
    runs: Runs
    reports: list[StudyReport]
    said_first: list[str]


def analyze(
    paths: str | Path | Iterable[str | Path],
    out: str | Path = "report",
    *,
    on_progress: Callable[[str], None] | None = None,
) -> AnalysisResult:
    """Analyse the runs below `paths` (one folder or several); write PNG, SVG, summary.csv and report.md into `out`.

    Runs of different tasks, task settings or initial policies are never compared; runs that cannot be read, and data
    that were not recorded, are named in `messages` and in the report. `on_progress` hears each figure's name.

    Raises:
        UserError: if there is no run with at least one step, or `out` cannot be written.
    """
    with warnings.catch_warnings():  # what they say is in the messages
        warnings.simplefilter("ignore", DamagedPartWarning)
        warnings.filterwarnings("ignore", message=".* is left out: ")
        runs = load_several(paths)
        found = [study for study in studies(runs) if study.settings]
        if not found:
            raise UserError(nothing_found(paths, runs))
        folder = output_folder(out)
        tell = on_progress or (lambda text: None)
        figures: dict[str, list[Path]] = {}

        def keep(name: str, figure: Figure) -> None:
            tell(name)
            figures[name] = save(figure, folder, name)

        reports, messages = _collect(runs, found, keep)
    table = pd.concat([r.table for r in reports if len(r.table)] or [pd.DataFrame(columns=SUMMARY)], ignore_index=True)
    tables = {"summary": folder / "summary.csv", "runs": folder / "runs.csv"}
    write_atomic(tables["summary"], csv_text(table))
    write_atomic(tables["runs"], csv_text(runs.table))
    report = folder / "report.md"
    write_atomic(report, report_text(reports, runs.table, messages))
    missing = _missing(reports)
    return AnalysisResult(
        folder, figures, tables, table, [*messages, *missing], report, runs=runs, reports=reports, said_first=messages
    )


def collect(runs: Runs, on_progress: Callable[[str], None] | None = None) -> tuple[list[StudyReport], list[str]]:
    """Every study with its table and pictures, and what a person should know first; nothing is written.

    Empty where no run has a step yet; the messages say so.
    """
    with warnings.catch_warnings():  # what they say is in the messages
        warnings.simplefilter("ignore", DamagedPartWarning)
        every = studies(runs)
        found = [study for study in every if study.settings]
        tell = on_progress or (lambda text: None)
        reports, messages = _collect(runs, found, lambda name, figure: tell(name))
    return reports, [*messages, *(note for study in every if not study.settings for note in study.notes)]


def _collect(
    runs: Runs, found: list[Study], keep: Callable[[str, Figure], None]
) -> tuple[list[StudyReport], list[str]]:
    """The studies' reports and messages; `keep` gets every figure's name and the figure."""
    reports = []
    for study in found:
        pictures = []
        for picture in Pictures(study):
            if picture.figure is not None:
                keep(f"{study.slug}{picture.name}", picture.figure)
            pictures.append(picture)
        reports.append(StudyReport(study, summary(study), pictures))
    return reports, _messages(runs, reports)


def figures_of(runs: Runs) -> dict[str, Figure]:
    """Every figure that `analyze` would make of `runs`, by name, for a notebook; nothing is written."""
    return {
        f"{study.slug}{picture.name}": picture.figure
        for study in studies(runs)
        if study.settings
        for picture in Pictures(study)
        if picture.figure is not None
    }


def load_several(paths: str | Path | Iterable[str | Path]) -> Runs:
    """The runs below one folder or several; a name that stands twice becomes the run's path."""
    if isinstance(paths, str | Path):
        return load_runs(paths)
    several = [load_runs(path) for path in paths]
    if len(several) == 1:
        return several[0]
    names: dict[str, object] = {}
    for runs in several:
        for name, run in runs.by_name.items():
            names[name if name not in names else str(run.path)] = run
    skipped = {str(runs.root / name): why for runs in several for name, why in runs.skipped.items()}
    return Runs(several[0].root if several else Path(), names, skipped)  # type: ignore[arg-type]


def nothing_found(paths: Any, runs: Runs) -> str:
    """What to tell someone below whose `paths` there is nothing to analyse."""
    where = runs.root if isinstance(paths, str | Path) else ", ".join(map(str, paths))
    if runs.skipped:
        name, why = next(iter(runs.skipped.items()))
        return f"runs: none of the {len(runs.skipped)} below {where} can be read; {name}: {why}"
    if len(runs):
        return f"runs: none below {where} has a finished step yet; wait for one, or look at run.json of {runs[0].name}"
    return f"runs: no run below {where}; make one with `sharpscope run --steps 20`, or give the folder that holds yours"


def _messages(runs: Runs, reports: list[StudyReport]) -> list[str]:
    messages = [f"{name} is left out: {why}" for name, why in runs.skipped.items()]
    for run in runs:
        messages += [f"{run.name}: {part} is set aside: {why}" for part, why in run.damaged.items()]
    for report in reports:
        messages += report.study.notes
        messages += _not_numbers(report.study)
        messages += _warnings_of(report.study)
    return messages


def _not_numbers(study: Study) -> list[str]:
    found = []
    for _, _, run in runs_of(study):
        bad = run.steps.loc[run.steps["reward_mean"].isna(), "step"].tolist()
        if bad:
            found.append(
                f"{run.name}: the reward is not a number in {len(bad)} of {len(run.steps)} steps (first: {bad[0]}); "
                "curves have gaps there and means over them are not numbers."
            )
    return found


def _warnings_of(study: Study) -> list[str]:
    """One line for each rule that spoke in a run, with how often."""
    found = []
    for _, _, run in runs_of(study):
        loud = run.events[run.events["severity"] != "info"]
        for rule, events in loud.groupby("rule"):
            last = events.iloc[-1]
            found.append(f"{run.name}: {rule} × {len(events)}, last at step {last['step']}: {last['message']}")
    return found


def _missing(reports: list[StudyReport]) -> list[str]:
    def say(study: Study, picture: Picture) -> str:
        return f"{study.name}: {picture.missing}" if len(reports) > 1 else picture.missing

    return [say(report.study, picture) for report in reports for picture in report.pictures if picture.missing]
