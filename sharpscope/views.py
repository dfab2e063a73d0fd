"""Figures and pages of runs, as `Run` and `Runs` offer them: `run.plot`, `run.show()`, `run.show_tokens()`.

Reading a run needs no figures. So `traces` knows only the names of these views, and this module, which is imported with
`sharpscope.load_run`, says what makes them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sharpscope.traces import Run, Runs, load_run, load_runs
from sharpscope.traces.reader import VIEWS

if TYPE_CHECKING:
    from sharpscope.analysis.output import Html
    from sharpscope.analysis.plots import PlotsOf

__all__ = ["load_run", "load_runs"]


def plots(runs: Runs) -> PlotsOf:
    """The figures of some runs."""
    from sharpscope.analysis.plots import PlotsOf

    return PlotsOf(runs)


def page(runs: Runs, height: int) -> Html:
    """The page of some runs for a notebook."""
    from sharpscope.analysis.output import show

    return show(runs, height)


def tokens(run: Run, step: int | None, height: int) -> Html:
    """The completions of a step for a notebook."""
    from sharpscope.analysis.output import show_tokens

    return show_tokens(run, step, height)


VIEWS.update(plots=plots, page=page, tokens=tokens)
