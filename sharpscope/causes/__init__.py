"""Named causes: identities that recorded columns must satisfy, and what a violation means by where it occurs."""

from __future__ import annotations

from sharpscope.causes import rewards, sampling, supervised, updates
from sharpscope.causes.identity import REGISTRY, Identity, Result, check_recorded
from sharpscope.causes.log import causes_of_log
from sharpscope.causes.named import Cause, name_causes
from sharpscope.causes.recorded import Recorded
from sharpscope.causes.verdict import Verdict
from sharpscope.traces import Run


def verdict(run: Run) -> Verdict:
    """The identities of a run, and the causes that they show."""
    return Verdict.of(Recorded.of(run))
