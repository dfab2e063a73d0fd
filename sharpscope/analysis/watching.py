"""`watch`: a run's view in the terminal, again and again while it trains."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.text import Text

from sharpscope.analysis.studies import last_step
from sharpscope.analysis.terminal import show
from sharpscope.analysis.text import printable
from sharpscope.traces import DamagedPartWarning, Run, load_run

GOING_ON = "running"


def watch(
    path: str | Path,
    console: Console,
    *,
    every: float = 2.0,
    once: bool = False,
    sleep: Callable[[float], None] = time.sleep,
) -> str:
    """Show a run and refresh the view every `every` seconds until the run ends; returns its last status.

    On a terminal the view is drawn in place. On a pipe each new step is one line, and the whole view comes at the end.
    `once`: show what there is and return. Only reads; what another process appends is seen at the next look.

    Raises:
        UserError: if `path` holds no readable run.
    """
    run = _look(path)
    if once or run.status != GOING_ON:
        console.print(show(run))
        return run.status
    if console.is_terminal:
        with Live(show(run), console=console, auto_refresh=False, vertical_overflow="visible") as live:
            while run.status == GOING_ON:
                sleep(every)
                run = _look(path)
                live.update(show(run), refresh=True)
    else:
        done = -1
        while run.status == GOING_ON:
            done = _tell(run, done, console)
            sleep(every)
            run = _look(path)
        console.print(show(run))
    console.print(Text(f"{printable(run.name)}: {run.status} after {last_step(run)} steps"))
    return run.status


def _look(path: str | Path) -> Run:
    """The run as it is now; its small tables are read, so that drawing does not fail half-way."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DamagedPartWarning)  # the view says which parts are set aside
        run = load_run(path)
        for table in ("steps", "eval", "events"):
            getattr(run, table)
    return run


def _tell(run: Run, done: int, console: Console) -> int:
    """One line for the newest step, if there is a new one."""
    last = last_step(run)
    if last > done and len(run.steps):
        row = run.steps.sort_values("step").iloc[-1]
        console.print(Text(f"step {last}: reward {row['reward_mean']:+.3f}, accuracy {row['accuracy']:.1%}"))
    return last
