"""Which measure of sharpness tells policies apart most reliably per second, at radii where none is at its ceiling.

Policies of different sharpness are the embedded policy and what a few AdamW steps at three learning rates make of it. Each is
measured on the same prompts; the reliability of a measure is the correlation over policies between two halves of the prompts.
Radii are multiples of the one that `find_radius` chooses on the embedded policy. `python -m experiments.benchmarks.reliability`
prints the table of reliability.md.
"""

from __future__ import annotations

import argparse
import copy
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from scipy.stats import spearmanr

from sharpscope.config import build_config
from sharpscope.policy import Policy, load_policy, render_prompts
from sharpscope.probes import (
    Objective,
    ProbeSet,
    build_probe_set,
    find_radius,
    lm_surface,
    rollout_objective,
    sharpness,
)
from sharpscope.probes.objectives import TokenBatch
from sharpscope.recording.probe_sets import Drawer
from sharpscope.tasks import make_task

FACTORS = (0.5, 1.0, 2.0)
RATES, LENGTHS = (1e-4, 3e-4, 1e-3), (4, 12)
TARGET = 0.9


@dataclass(frozen=True)
class SplitHalf:
    """Split-half reliability of a mean over prompts.

    Attributes:
        half: mean Spearman correlation over runs between the means of two random halves of the prompts.
        full: reliability with all prompts, 2r/(1 + r) by Spearman and Brown; NaN unless half > −1.
        runs: number of runs.
        prompts: number of prompts.
    """

    half: float
    full: float
    runs: int
    prompts: int

    def prompts_for(self, target: float) -> float:
        """Number of prompts at which the reliability is `target`, by Spearman and Brown; infinite if `full` ≤ 0."""
        if not self.full > 0:
            return math.inf
        return self.prompts * target * (1 - self.full) / (self.full * (1 - target))


def split_half(values: np.ndarray, splits: int = 200, seed: int = 0) -> SplitHalf:
    """Split-half reliability of the mean over prompts as a measure of runs.

    Ranks are compared, so a monotone transformation such as the logarithm changes nothing.

    Args:
        values: (runs, prompts) one value for each prompt; the same prompts in every run.
        splits: number of random halves.
        seed: of the halves.

    Returns:
        The reliability; NaN for fewer than 3 runs, fewer than 4 prompts, or halves that do not vary over runs.
    """
    runs, prompts = values.shape
    if runs < 3 or prompts < 4 or not np.isfinite(values).all():
        return SplitHalf(math.nan, math.nan, runs, prompts)
    rng = np.random.default_rng(seed)
    correlations = []
    for _ in range(splits):
        order = rng.permutation(prompts)
        first, second = (values[:, part].mean(axis=1) for part in (order[: prompts // 2], order[prompts // 2 :]))
        if np.ptp(first) == 0 or np.ptp(second) == 0:
            return SplitHalf(math.nan, math.nan, runs, prompts)
        correlations.append(spearmanr(first, second).statistic)
    half = float(np.mean(correlations))
    return SplitHalf(half, 2 * half / (1 + half) if half > -1 else math.nan, runs, prompts)


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


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--samples", type=int, default=8)
    given = parser.parse_args()
    torch.set_num_threads(1)
    config = build_config()
    policy, task = load_policy(config.policy), make_task(config.task)
    drawer = Drawer(config, policy, task)
    pool = build_probe_set(
        task,
        drawer,
        lambda examples: render_prompts(examples, policy),
        policy=config.policy.model,
        train=4 * given.prompts,
        heldout=24,
        tries=2,
    )
    solved = [item for item in pool.items if item.solution and item.split == "train"]
    probe_set = ProbeSet(pool.task, pool.policy, pool.seed, tuple(solved[: given.prompts]))
    nll, radius = Objective("nll", probe_set.solutions("train")), 0.0
    values: dict[tuple[str, str, float], list[tuple[np.ndarray, float, float]]] = {}
    for _ in policies(policy, pool.solutions("heldout")):
        began = time.process_time()
        drawn = probe_set.draw("train", given.samples, drawer, 0)
        drawing = time.process_time() - began
        for objective in (rollout_objective("expected_failure", drawn), nll):
            with lm_surface(policy.model, objective, check="off") as surface:
                if not radius:
                    found = find_radius(surface)
                    radius = found.rho
                    print(f"radius {radius:.3g}: saturation {found.saturation:.2f} after {found.evaluations} losses\n")
                began = time.process_time()
                loss, gradient, base = surface.gradient_by_prompt()
                first = time.process_time() - began + (drawing if objective is not nll else 0.0)
                for factor in FACTORS:
                    for kind in ("sam", "asam"):
                        began = time.process_time()
                        one = sharpness(surface, None, factor * radius, kind, at=(loss, gradient), base=base)
                        assert one.by_prompt is not None
                        row = one.by_prompt.numpy(), one.saturation, time.process_time() - began + first
                        values.setdefault((objective.name, kind, factor), []).append(row)
    print(
        "| objective | measure | radius | saturation | split-half | reliability | prompts for 0.9 | seconds for 0.9 | s.e. |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for (name, kind, factor), rows in values.items():
        table, seconds = np.stack([row[0] for row in rows]), float(np.median([row[2] for row in rows]))
        half, needed = split_half(table), split_half(table).prompts_for(TARGET)
        error = np.median(table.std(1, ddof=1) / np.sqrt(half.prompts) / np.abs(table.mean(1)))
        saturation = np.median([row[1] for row in rows])
        print(
            f"| {name} | {kind} | {factor:g} × | {saturation:.2f} | {half.half:.2f} | {half.full:.2f} | {needed:.0f} | "
            f"{seconds * needed / half.prompts:.1f} | {error:.0%} |"
        )


if __name__ == "__main__":
    main()
