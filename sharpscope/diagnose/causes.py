"""Causes in front of a diagnosis: of a recorded run by its identities, of a log by what the log alone shows."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sharpscope.causes import Cause, causes_of_log, verdict
from sharpscope.causes.log import components
from sharpscope.traces import load_run

if TYPE_CHECKING:
    from sharpscope.diagnose.logs import Log

MOST = 3
"""Causes that are shown."""


def shown_causes(log: Log) -> list[Cause]:
    """The causes that a log shows, by its tokens where it is a recorded run."""
    if (log.path / "run.json").is_file():
        return verdict(load_run(log.path)).causes[:MOST]
    if log.framework == "sharpscope":
        return []
    parts = components(log.path)
    return causes_of_log(log.frame.join(parts) if len(parts) else log.frame)[:MOST]


def stopped_causes(path: Path) -> list[Cause]:
    """The causes of a recording that stopped before its first step, which has no log; none of another path."""
    if not (path / "run.json").is_file():
        return []
    run = load_run(path)
    return verdict(run).causes[:MOST] if run.steps.empty else []
