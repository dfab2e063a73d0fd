"""A recorder's errors end the recording and never the training, also where only one of several processes has an error."""

from __future__ import annotations

import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from sharpscope import distributed
from sharpscope.errors import UserError

T = TypeVar("T")


class Guard(ABC):
    """Does the work of a recorder."""

    recording = False  # whether it records now
    _problem: Exception | None = None  # of this process, not yet known to the others

    @abstractmethod
    def give_up(self, error: Exception) -> None:
        """End the recording because of an error."""

    def safely(self, work: Callable[[], T]) -> T | None:
        """Do some work of this process alone.

        Where several processes record, an error ends the recording at the next `together`: the others wait for this one there.
        """
        if not self.recording or self._problem is not None:
            return None
        try:
            return work()
        except Exception as error:
            self._problem = error
            if distributed.world_size() == 1:
                self.give_up(error)
            return None

    def together(self, work: Callable[[], T]) -> T | None:
        """Do some work in which processes exchange values; all of them call it at the same places of the training.

        An error in one of them ends the recording in all.
        """
        if not self.recording:
            return None
        try:
            if self._problem is not None:
                raise self._problem
            distributed.gather(None)
            result = work()
            # no process goes on with the training before all have done the work
            distributed.gather(None)
            return result
        except Exception as error:
            if not isinstance(error, distributed.PeerError):
                with suppress(distributed.PeerError):
                    distributed.gather(distributed.Failure(reason_of(error)))
            self.give_up(error)
            return None

    def end(self, work: Callable[[], None]) -> None:
        """Do the last work; it follows no `together` any more."""
        if self.recording and self._problem is not None:
            self.give_up(self._problem)
        self.safely(work)


def reason_of(error: Exception) -> str:
    """An error in one line."""
    text = " ".join(str(error).split())
    return (
        text
        if isinstance(error, UserError | distributed.PeerError)
        else f"{type(error).__name__}: {text}"
    )


def ended_by(error: BaseException) -> tuple[str, str]:
    """Status and reason of a run whose training an error has ended."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", "stopped by the user"
    return "failed", f"{type(error).__name__}: {error}"


def warn_stopped(step: int, error: Exception) -> None:
    """Warn that recording has ended at a step."""
    text = f"sharpscope stopped recording at step {step} ({reason_of(error)}); the training goes on as without it"
    try:
        warnings.warn(text, stacklevel=2)
    except UserWarning:  # where warnings are errors, which must not end the training
        say(text)


def say(text: str) -> None:
    """Print a line to standard error, in the first process; where there is none, nothing."""
    if distributed.is_rank_zero() and sys.stderr is not None:
        with suppress(OSError, ValueError):  # closed
            sys.stderr.write(f"sharpscope: {text}\n")
