"""How long something will still take."""

from __future__ import annotations

import time

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
        if seconds < WORTH_SAYING:
            return ""
        return (
            f"  about {seconds:.0f} s left"
            if seconds < 90
            else f"  about {seconds / 60:.0f} min left"
        )
