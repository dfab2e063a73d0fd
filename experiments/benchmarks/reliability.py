"""Which objective, radius and number of prompts ranks policies most reliably per second, and whether standard errors cover.

Policies of different sharpness are the embedded policy and what a few AdamW steps at three learning rates make of it. Each is
measured on the same prompts; the reliability of a measure is the correlation over policies between two halves of the prompts.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats

from sharpscope.analysis.statistics.reliability import split_half
from sharpscope.config import RunConfig, build_config
from sharpscope.policy import Policy, load_policy, render_prompts
from sharpscope.probes import Objective, ProbeSet, build_probe_set, rollout_objective
from sharpscope.probes.hessian.causal_lm import lm_surface
from sharpscope.probes.objectives import TokenBatch
from sharpscope.probes.perturbation import gradient_norm, sharpness_of
from sharpscope.recording import Drawer
from sharpscope.tasks import make_task

MEASURES = (("sam", False), ("asam", True), ("average", False))
RADII = {"nll": (0.05, 0.5, 1.0), "expected_failure": (0.5,)}
RATES, LENGTHS = (1e-4, 3e-4, 1e-3), (4, 12)
TARGET = 0.9


def policies(policy: Policy, batch: TokenBatch) -> Iterator[str]:
    """The policy itself, then after some AdamW steps on the solutions `batch` at each rate; the caller measures in between."""
    start = copy.deepcopy(policy.model.state_dict())
    yield "initial"
    for rate in RATES:
        policy.model.load_state_dict(start)
        optimizer = torch.optim.AdamW(policy.model.parameters(), lr=rate, weight_decay=0.0)
        for step in range(1, max(LENGTHS) + 1):
            rows = torch.arange(len(batch))[(step % 2) :: 2]
            with lm_surface(policy.model, Objective("nll", batch.rows(rows)), check="off") as surface:
                gradients = torch.autograd.grad(surface.loss(), surface.parameters)
            for parameter, gradient in zip(surface.parameters, gradients, strict=True):
                parameter.grad = gradient.detach()
            optimizer.step()
            optimizer.zero_grad()
            if step in LENGTHS:
                yield f"lr {rate:g}, {step} steps"
    policy.model.load_state_dict(start)


def measured(policy: Policy, objective: Objective) -> dict[tuple[str, float], tuple[np.ndarray, float]]:
    """Values by prompt and processor seconds of each measure and radius; the gradient is part of each."""
    found: dict[tuple[str, float], tuple[np.ndarray, float]] = {}
    with lm_surface(policy.model, objective, check="off") as surface:
        began = time.process_time()
        loss, gradient, base = surface.gradient_by_prompt()
        first = time.process_time() - began
        for rho in RADII[objective.name]:
            for kind, adaptive in MEASURES:
                began = time.process_time()
                one = sharpness_of(surface, rho, kind, adaptive=adaptive, samples=2, at=(loss, gradient), base=base)  # type: ignore[arg-type]
                assert one.by_prompt is not None
                own = time.process_time() - began + (0.0 if kind == "average" else first)
                found[kind, rho] = (one.by_prompt.numpy(), own)
    return found


def reliability(config: RunConfig, probe_set: ProbeSet, training: TokenBatch) -> list[dict[str, Any]]:
    """A row for each objective, measure and radius."""
    policy, task = load_policy(config.policy), make_task(config.task)
    drawer = Drawer(config, policy, task)
    values: dict[tuple[str, str, float], list[np.ndarray]] = {}
    seconds: dict[tuple[str, str, float], list[float]] = {}
    for _ in policies(policy, training):
        began = time.process_time()
        drawn = probe_set.draw("train", 2, drawer, 0)
        drawing = time.process_time() - began
        for objective in (Objective("nll", probe_set.solutions("train")), rollout_objective("expected_failure", drawn)):
            for (kind, rho), (by_prompt, spent) in measured(policy, objective).items():
                key = objective.name, kind, rho
                values.setdefault(key, []).append(by_prompt)
                seconds.setdefault(key, []).append(spent + (drawing if objective.name == "expected_failure" else 0.0))
    rows = []
    for key, parts in values.items():
        found, table = split_half(np.stack(parts)), np.stack(parts)
        spent = float(np.median(seconds[key]))
        needed = found.prompts_for(TARGET)
        rows.append(
            dict(zip(("objective", "measure", "rho"), key, strict=True))
            | {
                "policies": found.runs,
                "prompts": found.prompts,
                "half": found.half,
                "full": found.full,
                "relative_std_error": float(
                    np.median(table.std(1, ddof=1) / np.sqrt(found.prompts) / np.abs(table.mean(1)))
                ),
                "spread": float(np.std(np.log(np.abs(table.mean(1))), ddof=1)),
                "seconds": spent,
                "prompts_for_target": needed if math.isfinite(needed) else None,
                "seconds_for_target": spent * needed / found.prompts if math.isfinite(needed) else None,
            }
        )
    return rows


def coverage(config: RunConfig, batch: TokenBatch, prompts: int, redraws: int, rho: float) -> list[dict[str, Any]]:
    """How often value ± t·(standard error over prompts) holds the mean over redraws of the prompts from a pool."""
    policy = load_policy(config.policy)
    generator = torch.Generator().manual_seed(0)
    values: dict[str, list[tuple[float, float]]] = {}
    with lm_surface(policy.model, Objective("nll", batch), check="off") as surface:
        for _ in range(redraws):
            rows = torch.randperm(len(batch), generator=generator)[:prompts]
            part = surface.over(surface.objective.rows(rows))
            loss, gradient, base = part.gradient_by_prompt()
            found = {"gradient_norm": gradient_norm(part, (loss, gradient), base, rho)}
            for kind, adaptive in (("sam", False), ("asam", True)):
                one = sharpness_of(part, rho, kind, adaptive=adaptive, at=(loss, gradient), base=base)  # type: ignore[arg-type]
                found[kind] = one.estimates()[0]
            for name, one in found.items():
                values.setdefault(name, []).append((one.value, one.prompt_std_error))
    finite = (1 - prompts / len(batch)) ** 0.5  # the pool is the population
    rows_out = []
    for name, pairs in values.items():
        value, error = np.array(pairs).T
        reach = stats.t.ppf(0.975, prompts - 1) * error * finite
        rows_out.append(
            {
                "measure": name,
                "rho": rho,
                "pool": len(batch),
                "prompts": prompts,
                "redraws": redraws,
                "mean": float(value.mean()),
                "spread": float(value.std(ddof=1)),
                "std_error": float(np.sqrt((error**2).mean()) * finite),
                "coverage": float((np.abs(value - value.mean()) <= reach).mean()),
            }
        )
    return rows_out


def main() -> None:
    """Measure and write reliability.json beside this file; `python -m experiments.benchmarks.reliability_report` makes the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--pool", type=int, default=160)
    parser.add_argument("--redraws", type=int, default=200)
    parser.add_argument("--redrawn", type=int, default=12)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    config = build_config()
    policy, task = load_policy(config.policy), make_task(config.task)
    pool = build_probe_set(
        task,
        Drawer(config, policy, task),
        lambda examples: render_prompts(examples, policy),
        policy=config.policy.model,
        train=given.pool,
        heldout=24,
        tries=2,
    )
    solved = [item for item in pool.items if item.solution and item.split == "train"]
    probe_set = ProbeSet(pool.task, pool.policy, pool.seed, tuple(solved[: given.prompts]))
    found = {"reliability": reliability(config, probe_set, pool.solutions("heldout"))}
    given.out.write_text(json.dumps(found, indent=1) + "\n")
    found["coverage"] = coverage(config, pool.solutions("train"), given.redrawn, given.redraws, 0.5)
    given.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
