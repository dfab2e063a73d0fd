"""Causes in front of a diagnosis: of a recorded run by its identities, of a log by what the log alone shows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sharpscope.causes import Cause, causes_of_log, verdict
from sharpscope.causes.verdict import Verdict, open_text
from sharpscope.traces import load_run

if TYPE_CHECKING:
    from sharpscope.diagnose.findings import Finding
    from sharpscope.diagnose.logs import Log

MOST = 3
"""Causes that are shown."""
UNCERTAIN = {"wrong_end_token": {"truncation"}, "reference_moves": set[str]()}
"""Causes that a log without tokens cannot tell from a harmless one, and the rules whose findings they explain.

Their sentences name both. They are shown where no other finding has a warning, which would say more.
"""
WEAK = "reference_differs"
"""Cause that is no fault where another reference is meant, and explains nothing that is critical."""


def recorded_verdict(log: Log) -> Verdict | None:
    """What the identities of a recorded run say; None of another log."""
    return verdict(load_run(log.path)) if (log.path / "run.json").is_file() else None


def shown_causes(log: Log, findings: Sequence[Finding], told: Verdict | None) -> list[Cause]:
    """The causes that a log with these findings shows, by its tokens where it is a recorded run."""
    if told is not None:
        return told.causes[:MOST]
    if log.framework == "sharpscope" or log.training != "rewards":
        return []
    # a reward that is not finite is a cause; of other quantities the causes are made of finite values
    frame = log.frame.where(np.isfinite(log.frame), np.nan)
    if "reward" in log.frame:
        frame["reward"] = log.frame["reward"]
    found = causes_of_log(frame.join(log.components))
    grave = {finding.rule.name for finding in findings if finding.severity != "info"}
    left_out = {name for name, explained in UNCERTAIN.items() if grave - explained}
    if any(finding.severity == "critical" for finding in findings):
        left_out.add(WEAK)
    return [cause for cause in found if cause.name not in left_out][:MOST]


def checked_identities(told: Verdict | None) -> str:
    """How many identities of a recorded run hold, and which do not; empty where none could be checked."""
    if told is None or not told.results:
        return ""
    return ". ".join([told.count, *map(open_text, told.violated)])


def stopped_causes(path: Path) -> list[Cause]:
    """The causes of a recording that stopped before its first step, which has no log; none of another path."""
    if not (path / "run.json").is_file():
        return []
    run = load_run(path)
    return verdict(run).causes[:MOST] if run.steps.empty else []
