"""Progress of a training run on a terminal or as lines of text; nothing in tests, sweeps and pipes."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from sharpscope.rules import Event


class Display:
    """Shows the progress of a run. This one shows nothing; `RichDisplay` does."""

    def start(self, title: str, steps: int, done: int) -> None:
        """The run starts, or continues after `done` steps."""

    def status(self, text: str) -> None:
        """The run starts another activity."""

    def step(self, row: Mapping[str, Any]) -> None:
        """A step is done; `row` is its row of the steps table."""

    def evaluation(self, rows: list[dict[str, Any]]) -> None:
        """An evaluation is done."""

    def event(self, event: Event) -> None:
        """A health rule applied."""

    def stop(self) -> None:
        """The run ended, for whatever reason."""


_SHOWN = (
    ("reward", "reward_mean", "{:+.3f}"),
    ("accuracy", "accuracy", "{:.1%}"),
    ("grad norm", "grad_norm", "{:.3g}"),
    ("entropy [nats]", "entropy_mean", "{:.3f}"),
    ("weight mean", "weight_mean", "{:.3f}"),
    ("length [tokens]", "completion_length_mean", "{:.1f}"),
)


LINE_EVERY = 60.0
"""Without a terminal, every tenth step is printed, and a step that ends this long after the last line [s]."""


class RichDisplay(Display):
    """A live panel on a terminal; elsewhere lines: every tenth step, slow steps, and evaluations."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.console,
        )
        self._live: Live | None = None
        self._rows: list[Mapping[str, Any]] = []
        self._evaluations: list[str] = []
        self._status = ""
        self._fired: dict[str, int] = {}
        self._steps = self._done = 0
        self._began = self._printed = time.monotonic()

    def start(self, title: str, steps: int, done: int) -> None:
        """Start the panel; a resumed run says from which step."""
        self._steps, self._done, self._began = steps, done, time.monotonic()
        self._task = self._progress.add_task(escape(title), total=steps, completed=done)
        if done:
            self._print(f"continuing after step {done} of {steps}")
        if self.console.is_terminal:
            self._live = Live(self._render(), console=self.console, refresh_per_second=4)
            self._live.start()

    def status(self, text: str) -> None:
        """Show the present activity."""
        self._status = text
        self._refresh()

    def step(self, row: Mapping[str, Any]) -> None:
        """Add a step to the table."""
        self._rows = [*self._rows[-4:], row]
        self._progress.update(self._task, completed=int(row["step"]))
        self._refresh()
        step, now = int(row["step"]), time.monotonic()
        if self._live is None and (step % 10 == 0 or step == 1 or now - self._printed >= LINE_EVERY):
            values = "  ".join(f"{name} {_format(row.get(key), form)}" for name, key, form in _SHOWN)
            left = (now - self._began) / max(step - self._done, 1) * (self._steps - step)
            self._print(f"step {step} of {self._steps}: {values}  left {minutes(left)}")

    def evaluation(self, rows: list[dict[str, Any]]) -> None:
        """Show the newest evaluation."""
        from sharpscope.analysis.statistics import accuracy_interval  # scipy is slow to import

        self._evaluations = [
            f"{row['split']} level {row['level']}, T={row['temperature']:g}: {row['accuracy']:.1%} "
            + accuracy_interval(row["accuracy"], row["std_error"], row["n"], row["k"]).percent()
            for row in rows
        ]
        self._refresh()
        if self._live is None and rows:
            self._print(
                f"step {rows[0]['step']}, accuracy [95 % interval over prompts, %]: " + "; ".join(self._evaluations)
            )

    def event(self, event: Event) -> None:
        """Print a health event above the panel; a rule that fires again is only counted (all are in the events table)."""
        self._fired[event.rule] = self._fired.get(event.rule, 0) + 1
        if self._fired[event.rule] > 1:
            return
        color = {"error": "red", "warning": "yellow"}.get(event.severity, "cyan")
        self.console.print(
            f"[{color}]step {event.step}: {escape(event.rule)}[/] {event.value:.3g}: {escape(event.message)}"
        )

    def stop(self) -> None:
        """Leave the last state on the screen."""
        if self._live is not None:
            self._refresh()
            self._live.stop()
            self._live = None

    def _print(self, line: str) -> None:
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)
        self._printed = time.monotonic()

    def _refresh(self) -> None:
        if self._live is not None:
            self._live.update(self._render())

    def _render(self) -> Table:
        steps = Table(box=None, pad_edge=False, header_style="dim")
        steps.add_column("step", justify="right")
        for name, _, _ in _SHOWN:
            steps.add_column(name, justify="right")
        for row in self._rows:
            steps.add_row(str(row["step"]), *(_format(row.get(key), form) for _, key, form in _SHOWN))
        grid = Table.grid()
        grid.add_row(self._progress)
        grid.add_row(steps)
        repeated = [f"{rule} × {count}" for rule, count in self._fired.items() if count > 1]
        if repeated:
            grid.add_row("[yellow]events[/]  " + escape("  ·  ".join(repeated)))
        if self._evaluations:
            grid.add_row("accuracy  " + escape("  ·  ".join(self._evaluations)))
        grid.add_row(f"[dim]{escape(self._status)}[/]")
        return grid


def minutes(seconds: float) -> str:
    """`45 s`, `12 min` or `3 h 05 min`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    whole = round(seconds / 60)
    return f"{whole} min" if whole < 120 else f"{whole // 60} h {whole % 60:02d} min"


def _format(value: Any, form: str) -> str:
    return "–" if value is None else form.format(value)
