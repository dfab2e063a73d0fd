"""Share of a default run's time that recording takes, without evaluation: what `run.json` says, for any settings."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from typing import Any

from sharpscope.config import build_config
from sharpscope.traces import load_run
from sharpscope.training import train


def default_share(steps: int = 100, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Train with the default configuration, without evaluation, and return what `run.json` says of the time of measuring.

    Returns:
        `steps`, `tokens` (mean of a step), `step_s` (generation and training), `share` of the run's time that recording took,
        and `seconds` by measure.
    """
    with tempfile.TemporaryDirectory(prefix="sharpscope-bench-") as folder:
        own = [f"steps={steps}", f"out={folder}/bench", "evaluation.every=0", "checkpoint.every=0"]
        run = load_run(train(build_config(None, [*own, *overrides])).run_dir)
        times = run.steps["generation_s"] + run.steps["training_s"]
        step = {"steps": steps, "tokens": float(run.steps["tokens"].mean()), "step_s": float(times.mean())}
        return {**step, **run.info["measuring"]}
