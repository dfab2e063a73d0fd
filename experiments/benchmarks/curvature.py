"""The top eigenvalue against PyHessian's, and a Hessian product with and without its graph kept.

`python -m experiments.benchmarks curvature` prints the table of curvature.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from sharpscope.config import build_config
from sharpscope.policy import load_policy
from sharpscope.probes import Objective, curvature, lm_surface, rollout_batch
from sharpscope.recording.probe_sets import Drawer
from sharpscope.tasks import make_task


def timed(work: Callable[[], object]) -> float:
    """Processor seconds of the second of two calls."""
    work()
    began = time.process_time()
    work()
    return time.process_time() - began


def table(prompts: int = 12, samples: int = 2, seeds: int = 2) -> str:
    """Markdown rows: relative error against a converged reference, products and processor seconds, means over seeds."""
    config = build_config()
    policy, task = load_policy(config.policy), make_task(config.task)
    drawn = Drawer(config, policy, task)(task.splits()["train"][:prompts], samples, 0)
    objective = Objective("nll", rollout_batch(drawn.rollouts))
    lines = ["| | relative error | products | processor seconds |", "|---|---|---|---|"]
    with lm_surface(policy.model, objective, check="off") as surface:
        quiet = {"smallest": False, "trace_probes": 0, "density_samples": 0, "check": "off"}
        truth = curvature(surface, None, 99, tolerance=1e-6, **quiet).largest  # type: ignore[arg-type]
        for name, options in (
            ("sharpscope, tolerance 0.01", {"tolerance": 1e-2}),
            ("PyHessian, its defaults", {"tolerance": 1e-3, "max_products": 100, "backend": "pyhessian"}),
        ):
            errors, products, seconds = [], [], []
            for seed in range(seeds):
                began = time.process_time()
                found = curvature(surface, None, seed, **quiet, **options)  # type: ignore[arg-type]
                seconds.append(time.process_time() - began)
                errors.append(abs(found.largest / truth - 1))
                products.append(found.products)
            means = [sum(values) / seeds for values in (errors, products, seconds)]
            counted = "–" if "backend" in options else f"{means[1]:.1f}"  # PyHessian counts none
            lines.append(f"| {name} | {means[0]:.1e} | {counted} | {means[2]:.1f} |")
        vector = torch.randn(sum(p.numel() for p in surface.parameters))
        kept = surface.hessian()
        lines.append(f"| a product, graphs kept | | 1 | {timed(lambda: kept @ vector):.2f} |")
    with lm_surface(policy.model, objective, memory_mb=1e-6, check="off") as surface:
        built = surface.hessian()
        lines.append(f"| a product, graphs built again | | 1 | {timed(lambda: built @ vector):.2f} |")
    return "\n".join(lines)
