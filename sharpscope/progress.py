"""How long something will still take."""

from __future__ import annotations

import time
from collections.abc import Callable

Tell = Callable[[str], None]
"""Prints a line on what is done or will be."""
WORTH_SAYING = 20.0
"""Estimates below this are not said [s]."""


class Remaining:
    """Estimates the time that is left of equal pieces of work, from the time of those that are done."""

    def __init__(self, total: int, done: int = 0) -> None:
        """Start the clock.

        Args:
            total: pieces of work.
            done: those that were done before.
        """
        self._total, self._before, self._began = total, done, time.monotonic()

    def after(self, done: int) -> str:
        """Text to append to a line, such as `"  about 4 min left"`; empty where little or nothing is known to be left."""
        made = done - self._before
        if made <= 0:
            return ""
        seconds = (time.monotonic() - self._began) / made * (self._total - done)
        return f"  {duration(seconds)} left" if seconds >= WORTH_SAYING else ""


def tell_price(tell: Tell, what: str, seconds: float) -> None:
    """Say how long something will take at most, where that is worth saying."""
    if seconds >= WORTH_SAYING:
        tell(f"{what}: at most {duration(seconds)}")


def silent(line: str) -> None:
    """A `Tell` that prints nothing."""


def duration(seconds: float) -> str:
    """A time in words: `"about 40 s"`, `"about 4 min"`."""
    return f"about {seconds:.0f} s" if seconds < 90 else f"about {seconds / 60:.0f} min"
