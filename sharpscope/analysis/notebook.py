"""Runs in a notebook: the page, or one step's tokens, as objects that Jupyter shows."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from pathlib import Path

from sharpscope.analysis.completions import of_step
from sharpscope.analysis.headline import largest_update
from sharpscope.analysis.html.page import report_html
from sharpscope.analysis.loading import quiet
from sharpscope.analysis.report import Page, page_of
from sharpscope.errors import UserError
from sharpscope.traces import Run, Runs, write_atomic


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
