"""Time of a step by its parts, and a stop between two steps on Ctrl-C."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from sharpscope.training.display import Display


class Clock:
    """Wall time by part of a step [s]."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str, minus: float = 0.0, plus: float = 0.0) -> None:
        """Assign the time since the last lap to `name`, less `minus` and plus `plus` seconds."""
        present = time.perf_counter()
        self.laps[name] = present - self._last - minus + plus
        self._last = present


class Stoppable(Protocol):
    """A run that can be asked to stop."""

    stop_requested: bool
    display: Display


@contextmanager
def stop_after_step(run: Stoppable) -> Iterator[None]:
    """The first SIGINT or SIGTERM asks the run to stop after this step; the second interrupts it at once."""

    def handler(number: int, frame: Any) -> None:
        """Ask the run to stop; raise at the second signal."""
        if run.stop_requested:
            raise KeyboardInterrupt
        run.stop_requested = True
        run.display.status("stopping after this step; press Ctrl-C again to stop at once")

    try:
        previous = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not in the main thread, where the caller handles signals
        yield
        return
    try:
        yield
    finally:
        for number, old in previous.items():
            signal.signal(number, old)
