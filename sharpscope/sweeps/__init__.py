"""Grids of runs from one file: planned and checked first, then executed in worker processes or on a Ray cluster."""

from sharpscope.sweeps.execute import SweepOutcome, execute, run_command
from sharpscope.sweeps.plan import PlannedRun, plan_sweep, read_sweep
from sharpscope.sweeps.spec import SweepSpec

__all__ = ["PlannedRun", "SweepOutcome", "SweepSpec", "execute", "plan_sweep", "read_sweep", "run_command"]
