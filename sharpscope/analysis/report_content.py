"""Everything a report says, gathered once: the HTML page and the Markdown file both tell it."""

from __future__ import annotations

import shlex
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sharpscope.analysis.claim_pictures import claim_pictures
from sharpscope.analysis.claims import Verdict, test_claims
from sharpscope.analysis.figures.study import Picture
from sharpscope.analysis.report import StudyReport
from sharpscope.traces import DamagedPartWarning, Runs


@dataclass(frozen=True)
class ReportContent:
    """What a report tells.

    Attributes:
        runs: all readable runs.
        reports: each study with its table and pictures; none where no run has a step.
        verdicts: of every claim, in their order.
        evidence: the claims' pictures.
        messages: what a reader should know first.
        paths: where the runs were read from, as given.
    """

    runs: Runs
    reports: Sequence[StudyReport]
    verdicts: Sequence[Verdict]
    evidence: Sequence[Picture]
    messages: Sequence[str]
    paths: Sequence[str]

    @property
    def source(self) -> str:
        """`paths` as a shell takes them."""
        return " ".join(shlex.quote(path) for path in self.paths)

    def pictures(self) -> list[tuple[str, Picture]]:
        """(file name without ending, picture) of every picture that was drawn: the studies', then the claims'."""
        own = [(f"{r.study.slug}{p.name}", p) for r in self.reports for p in r.pictures if p.figure is not None]
        return own + [(p.name, p) for p in self.evidence if p.figure is not None]


def content_of(
    runs: Runs,
    reports: Sequence[StudyReport],
    messages: Sequence[str],
    paths: str | Path | Iterable[str | Path],
    on_progress: Callable[[str], None] | None = None,
) -> ReportContent:
    """Test the claims on the runs and put everything together."""
    if on_progress is not None:
        on_progress("testing the claims")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DamagedPartWarning)  # said in `messages`
        verdicts = test_claims(runs)
        evidence = list(claim_pictures(runs, verdicts))
    given = [paths] if isinstance(paths, str | Path) else list(paths)
    return ReportContent(runs, reports, verdicts, evidence, messages, [str(path) for path in given])
