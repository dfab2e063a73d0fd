"""Progress of a training run: lines of text, and on a terminal a bar below them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from sharpscope.rules.judging import Event

LINE_EVERY = 60.0
"""Every tenth step is printed, and a step that ends this long after the last line [s]."""
_SHOWN = (
    ("reward", "reward_mean", "{:+.3f}"),
    ("accuracy", "accuracy", "{:.1%}"),
    ("grad norm", "grad_norm", "{:.3g}"),
    ("entropy [nats]", "entropy_mean", "{:.3f}"),
    ("weight mean", "weight_mean", "{:.3f}"),
    ("length [tokens]", "completion_length_mean", "{:.1f}"),
)


class Display:
    """Shows the progress of a run on a console; without one, nothing."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(quiet=True)
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("[dim]{task.fields[status]}"),
            console=self.console,
            disable=self.console.quiet or not self.console.is_terminal,
        )
        self._fired: Counter[str] = Counter()

    def start(self, title: str, steps: int, done: int) -> None:
        """The run starts, or continues after `done` steps."""
        self._steps, self._done, self._began = steps, done, time.monotonic()
        self._task = self._progress.add_task(escape(title), total=steps, completed=done, status="")
        self._progress.start()
        if done:
            self._print(f"continuing after step {done} of {steps}")
        self._printed = self._began

    def status(self, text: str) -> None:
        """The run starts another activity."""
        self._progress.update(self._task, status=escape(text))

    def step(self, row: Mapping[str, Any]) -> None:
        """A step is done; `row` is its row of the steps table. Every tenth step and slow ones are printed."""
        step, now = int(row["step"]), time.monotonic()
        self._progress.update(self._task, completed=step)
        if step % 10 == 0 or step == 1 or now - self._printed >= LINE_EVERY:
            values = "  ".join(
                f"{name} {'–' if row.get(key) is None else form.format(row[key])}" for name, key, form in _SHOWN
            )
            left = (now - self._began) / max(step - self._done, 1) * (self._steps - step)
            self._print(f"step {step} of {self._steps}: {values}  left {timedelta(seconds=round(left))}")

    def evaluation(self, rows: list[dict[str, Any]]) -> None:
        """An evaluation is done."""
        if self.console.quiet:
            return
        from sharpscope.analysis.statistics import accuracy_interval  # scipy is slow to import

        texts = [
            f"{row['split']} level {row['level']}, T={row['temperature']:g}: {row['accuracy']:.1%} "
            + accuracy_interval(row["accuracy"], row["std_error"], row["n"], row["k"]).percent()
            for row in rows
        ]
        self._print(f"step {rows[0]['step']}, accuracy [95 % interval over prompts, %]: " + "; ".join(texts))

    def event(self, event: Event) -> None:
        """A health rule applied; only its first event is printed (all are in the events table)."""
        self._fired[event.rule] += 1
        if self._fired[event.rule] == 1:
            color = {"error": "red", "warning": "yellow"}.get(event.severity, "cyan")
            self.console.print(
                f"[{color}]step {event.step}: {escape(event.rule)}[/] {event.value:.3g}: {escape(event.message)}"
            )

    def stop(self) -> None:
        """The run ended, for whatever reason."""
        self._progress.stop()

    def _print(self, line: str) -> None:
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)
        self._printed = time.monotonic()
