"""Small runs with rotations, sharpness by prompt and evaluations, for the tests of sections."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from sharpscope.traces import TraceWriter, create_run_dir, create_run_info, update_run_info
from tests.traces.rows import INFO, rows

STEPS, PROMPTS = 6, 5
ROTATION = {1: 10.0, 3: 20.0, 6: 33.0}


def values_of(method: str, step: int) -> np.ndarray:
    """SAM sharpness of each prompt: falls by 0.1 a step with grpo-sg, with noise that both methods share."""
    base = np.random.default_rng(step).normal(1.0, 0.3, PROMPTS)
    return base - (0.1 * step if method == "grpo-sg" else 0.0)


def write_small(
    path: Path, method: str, seed: int = 0, recorded: bool = True, config: dict | None = None, **probe: object
) -> Path:
    """A run of STEPS steps; `recorded`: rotations and probes too; `probe`: columns of its SAM estimates."""
    folder = create_run_dir(path)
    config = config or {"recording": {}, "probes": {}}
    config = {"seed": seed, "steps": STEPS, "method": {"name": method}, "optimizer": {"lr": 1e-4}} | config
    create_run_info(folder, INFO | {"method": method, "seed": seed, "config": config})
    blank = {"parameters": "all", "rho": 0.5, "seed": 0, "functional": "nll", "probe_set": "set/train@1"}
    with TraceWriter(folder) as writer:
        for step in range(STEPS + 1):
            if step:
                turned = ROTATION.get(step) if recorded else None
                turned = turned * 1e-5 if turned and method == "grpo" else turned  # rounding
                angles = {"gradient_rotation": turned, "update_rotation": turned and 2 * turned}
                angles["noise_rotation"] = turned and 45.0
                writer.append("steps", rows("steps", step, 1, seed) | {"reward_mean": 0.1 * step + seed} | angles)
            if recorded and step in (0, STEPS):
                values = values_of(method, step)
                place = blank | {"step": step, "quantity": "sam"}
                writer.append("probe_prompts", place | {"prompt": np.arange(PROMPTS), "value": values})
                row = rows("probes", step, 1) | place | {"converged": None, "ceiling": None, "saturation": None} | probe
                error = values.std(ddof=1) / math.sqrt(PROMPTS)
                writer.append("probes", row | {"value": values.mean(), "prompt_std_error": error})
            if recorded and step in (1, STEPS):  # of an update, on prompts of its own
                row = rows("probes", step, 1) | blank | {"quantity": "critical_sharpness", "converged": True}
                place = {"probe_set": "", "functional": "surrogate", "rho": None, "seed": None}
                writer.append("probes", row | place | {"value": 100.0 * step, "prompt_std_error": 10.0})
            if step in (1, STEPS):
                row = {"step": step, "task": INFO["task"], "split": "heldout", "n": 40, "k": 1, "std_error": 0.07}
                row |= {"pass_at_k": 0.5, "reward_mean": 0.0}
                for heat in (0.0, 1.0):
                    for level, accuracy in (("2", 0.2), ("3", 0.4)):
                        value = accuracy + 0.05 * step + 0.1 * (heat == 0)
                        writer.append("eval", row | {"level": level, "accuracy": value, "temperature": heat})
    update_run_info(folder, status="finished", steps_done=STEPS)
    return folder
