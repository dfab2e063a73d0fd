"""Named causes: identities that recorded columns must satisfy, and what a violation means by where it occurs."""

from __future__ import annotations

from sharpscope.causes import rewards, sampling, supervised, updates
from sharpscope.causes.identity import REGISTRY, Identity, Result, check_recorded
from sharpscope.causes.named import Cause, name_causes
from sharpscope.causes.recorded import Recorded
from sharpscope.traces import Run


def check(run: Run) -> list[Result]:
    """The identities of a run whose columns were recorded, each with its value and whether it holds."""
    return list(check_recorded(Recorded.of(run)).values())


def causes_of(run: Run) -> list[Cause]:
    """The causes that a run shows, the first to look at first; empty if every identity holds."""
    recorded = Recorded.of(run)
    return name_causes(check_recorded(recorded), recorded)
