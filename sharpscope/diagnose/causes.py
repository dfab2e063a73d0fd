"""Causes in front of a diagnosis: of a recorded run by its identities, of a log by what the log alone shows."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sharpscope.causes import Cause, causes_of_log, verdict
from sharpscope.traces import load_run

if TYPE_CHECKING:
    from sharpscope.diagnose.logs import Log

MOST = 3
"""Causes that are shown."""
UNCERTAIN = ("wrong_end_token", "reference_moves")
"""Causes that a log without tokens cannot tell from a short length limit, or from a KL that is not computed."""


def shown_causes(log: Log) -> list[Cause]:
    """The causes that a log shows, by its tokens where it is a recorded run."""
    if (log.path / "run.json").is_file():
        return verdict(load_run(log.path)).causes[:MOST]
    if log.framework == "sharpscope" or log.training != "rewards":
        return []
    # a reward that is not finite is a cause; of other quantities the causes are made of finite values
    frame = log.frame.where(np.isfinite(log.frame), np.nan)
    if "reward" in log.frame:
        frame["reward"] = log.frame["reward"]
    found = causes_of_log(frame.join(log.components))
    return [cause for cause in found if cause.name not in UNCERTAIN][:MOST]


def stopped_causes(path: Path) -> list[Cause]:
    """The causes of a recording that stopped before its first step, which has no log; none of another path."""
    if not (path / "run.json").is_file():
        return []
    run = load_run(path)
    return verdict(run).causes[:MOST] if run.steps.empty else []
