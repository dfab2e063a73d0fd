"""How often the printed ± of λ_max and λ_c over prompts covers the value of a pool of prompts.

    python -m experiments.curvature_coverage [SECONDS]

The pool is the `nll` of the solutions that `embedded:math` finds to 240 prompts; λ_c is along the sign of the gradient of 48 of them,
which are no part of the pool, as AdamW's first step is. Subsets are drawn without replacement for SECONDS of processor time a size; an
estimate covers where its value ± 1.96 standard errors over prompts (corrected for the finite pool) holds the pool's value. Prints a
Markdown table.
"""

from __future__ import annotations

import math
import sys
import tempfile
import time

import numpy as np
import torch

from sharpscope.config import build_config
from sharpscope.policy import load_policy
from sharpscope.recording.probe_sets import run_probe_set
from sharpscope.surface import Estimate, critical_sharpness, curvature
from sharpscope.surface.language_model import LmSurface, Objective, lm_surface
from sharpscope.surface.operators import unflatten
from sharpscope.tasks import make_task

PROMPTS, OTHERS = 240, 48
SIZES = (12, 24, 48)


def largest(surface: LmSurface) -> Estimate:
    """λ_max with its error over prompts."""
    found = curvature(
        surface, None, 0, top=1, smallest=False, tolerance=1e-2, max_products=60, trace_probes=0,
        check="off", by_prompt=True,
    )  # fmt: skip
    return next(row for row in found.estimates() if row.quantity == "largest")


def critical(surface: LmSurface, direction: list[torch.Tensor], guess: float) -> Estimate:
    """λ_c along a fixed direction with its error over prompts."""
    found = critical_sharpness(
        surface.by_prompt, surface.parameters, direction, guess=guess, tolerance=0.05
    )
    return found.estimates()[0]


def main(seconds: float) -> None:
    torch.set_num_threads(1)
    settings = {"policy.model": "embedded:math", "task.kind": "math", "probes.prompts": PROMPTS}
    with tempfile.TemporaryDirectory() as folder:
        config = build_config(values=settings | {"out": folder})
        solutions = run_probe_set(config, make_task(config.task)).solutions("train")
    model = load_policy(config.policy).model
    with lm_surface(model, Objective("nll", solutions), check="off") as whole:
        prompts = torch.tensor(whole.objective.batch.prompts)
        count = int(prompts.max()) + 1 - OTHERS
        step = whole.prompts(prompts >= count).gradient()[1].sign()
        direction = [
            part.view_as(parameter)
            for part, parameter in zip(
                unflatten(step, whole.parameters), whole.parameters, strict=True
            )
        ]
        pool = whole.prompts(prompts < count)
        truth = {"λ_max": largest(pool).value, "λ_c": critical(pool, direction, 1e-4).value}
        guess = 2 / truth["λ_c"]
        print(f"{count} prompts: " + ", ".join(f"{k} {v:.4g}" for k, v in truth.items()) + "\n")
        print("| prompts | draws | λ_max / pool | covers | λ_c / pool | covers | no λ_c |")
        print("|---|---|---|---|---|---|---|", flush=True)
        draws = torch.Generator().manual_seed(0)
        for size in SIZES:
            found: dict[str, list[tuple[float, bool]]] = {name: [] for name in truth}
            start, correction = time.process_time(), math.sqrt(1 - size / count)
            while time.process_time() < start + seconds:
                chosen = torch.randperm(count, generator=draws)[:size]
                part = whole.prompts(torch.isin(prompts, chosen))
                for row, (name, value) in zip(
                    (largest(part), critical(part, direction, guess)), truth.items(), strict=True
                ):
                    half = 1.96 * row.prompt_std_error * correction
                    found[name].append((row.value / value, abs(row.value - value) <= half))
            cells = [str(size), str(len(found["λ_c"]))]
            for rows in found.values():
                each = np.array([row for row in rows if math.isfinite(row[0])])
                cells += [f"{np.median(each[:, 0]):.2f}", f"{each[:, 1].mean():.0%}"]
            missing = [not math.isfinite(value) for value, _ in found["λ_c"]]
            print(f"| {' | '.join([*cells, f'{np.mean(missing):.0%}'])} |", flush=True)


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 60)
