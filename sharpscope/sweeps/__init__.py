"""Sweeps: runs from one file, checked first, then executed in worker processes or on a Ray cluster."""

from sharpscope.sweeps.execute import SweepOutcome, estimate_step_seconds, execute, run_command
from sharpscope.sweeps.plan import PlannedRun, SweepSpec, plan_sweep, read_sweep

__all__ = [
    "PlannedRun",
    "SweepOutcome",
    "SweepSpec",
    "estimate_step_seconds",
    "execute",
    "plan_sweep",
    "read_sweep",
    "run_command",
]
