"""Named causes and identities of recorded runs, as sections for `show` and the page."""

from __future__ import annotations

from itertools import islice

import pandas as pd

from sharpscope.analysis.sections import Section
from sharpscope.analysis.study import per_run
from sharpscope.analysis.text import number, printable
from sharpscope.causes import verdict
from sharpscope.causes.verdict import open_text
from sharpscope.traces import Run, Runs

PART = "Causes and identities"
MOST_CAUSES = 3
"""Causes of a run that are shown."""
MOST_RUNS = 12
"""Runs whose identities a page checks."""

checked = per_run(verdict)
"""`verdict` of a run, computed once."""


def cause_sections(run: Run) -> list[Section]:
    """The causes that a run shows, the first one first; without one, identities that are violated for an open reason."""
    found = checked(run)
    sections = list[Section]()
    for cause in found.causes[:MOST_CAUSES]:
        title = "Also fits" if sections else "Cause"
        lines = [printable(line) for line in (cause.sentence, *cause.details)]
        sections.append(Section(title, "\n".join(lines), part=PART))
    if not sections and found.violated:
        lines = [found.count, *(open_text(result) for result in found.violated)]
        sections.append(Section("No cause is named", "\n".join(lines), part=PART))
    if found.note:
        sections.append(Section("Not checked", printable(found.note), part=PART))
    return sections


def identity_sections(runs: Runs) -> list[Section]:
    """Causes and every identity of one run; of several, a row for each of the first MOST_RUNS."""
    if len(runs) == 1:
        return [*cause_sections(runs[0]), *identity_table(runs[0])]
    rows = []
    for name, run in islice(runs.by_name.items(), MOST_RUNS):
        found = checked(run)
        cause = found.causes[0].sentence if found.causes else "none is named"
        rows.append({"run": name, "cause": cause, "identities": found.count})
    note = f"Of the first {MOST_RUNS} runs." if len(runs) > MOST_RUNS else ""
    return [Section("Causes", pd.DataFrame(rows), note, PART)] if rows else []


def identity_table(run: Run) -> list[Section]:
    """What must hold of the recorded columns of a run and what was found, violations first."""
    found = checked(run)
    rows = [
        {
            "identity": result.identity.statement,
            "found": number(result.value),
            "limit": f"{result.identity.threshold:g}",
            "unit": result.identity.unit,
            "holds": "yes" if result.holds else "no",
        }
        for result in sorted(found.results, key=lambda result: result.holds)
    ]
    note = "Relations between recorded columns that a sound training keeps, whatever it learns."
    return [Section(found.count, pd.DataFrame(rows), note, PART)] if rows else []
