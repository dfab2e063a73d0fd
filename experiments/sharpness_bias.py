"""How SAM sharpness depends on the number of prompts, and how often intervals cover the pool's value.

    python -m experiments.sharpness_bias [REDRAWS]

A pool of 240 prompts of `embedded:math` with 4 completions each is the truth. Subsets are drawn without replacement; an estimate covers
where its value ± 1.96 standard errors over prompts (corrected for the finite pool) holds the pool's plain value. Prints a Markdown table.
"""

from __future__ import annotations

import math
import sys

import numpy as np
import torch

from sharpscope.config import build_config
from sharpscope.policy import draw_scored, load_policy
from sharpscope.surface import Drawn, rollout_objective, sharpness
from sharpscope.surface.language_model import lm_surface
from sharpscope.surface.perturbation import cross_fitted
from sharpscope.tasks import make_task

POOL, SAMPLES, RHO = 240, 4, 0.05
SIZES = (6, 12, 24, 48, 96, 192)


def main(redraws: int) -> None:
    torch.set_num_threads(1)
    config = build_config(values={"policy.model": "embedded:math", "task.kind": "math"})
    policy, task = load_policy(config.policy), make_task(config.task)
    examples = task.splits()["train"][:POOL]
    drawn, rewards = draw_scored(policy, task, examples, SAMPLES, config.rollout, 7)
    correct = torch.tensor([float(r.correct) for r in rewards])
    objective = rollout_objective("expected_failure", Drawn(drawn.with_reward(correct), correct))
    with lm_surface(policy.model, objective, check="off") as surface:
        base = surface.by_prompt()
        prompts, count = torch.tensor(surface.objective.batch.prompts), len(base)
        truth = sharpness(surface, None, RHO, base=base).value
        print(
            f"{count} prompts, {redraws} redraws: pool's SAM sharpness {truth:.4f} at radius {RHO}\n"
        )
        print(
            "| prompts | plain / pool | covers | cross-fitted / pool | covers | bracket holds the pool |"
        )
        print("|---|---|---|---|---|---|", flush=True)
        draws = torch.Generator().manual_seed(0)
        for size in SIZES:
            found = []
            correction = math.sqrt(1 - size / count)
            for seed in range(redraws):
                chosen = torch.randperm(count, generator=draws)[:size]
                part = surface.prompts(torch.isin(prompts, chosen))
                start = part.by_prompt()
                plain = sharpness(part, None, RHO, base=start).estimates()[0]
                crossed = cross_fitted(part, RHO, seed, start)
                row = []
                for one in (plain, crossed):
                    half = 1.96 * one.prompt_std_error * correction
                    row += [one.value / truth, abs(one.value - truth) <= half]
                found.append([*row, crossed.value <= truth <= plain.value])
            means = np.mean(np.array(found, dtype=float), axis=0)
            cells = [f"{means[0]:.2f}", f"{means[1]:.0%}", f"{means[2]:.2f}", f"{means[3]:.0%}"]
            print(f"| {size} | {' | '.join(cells)} | {means[4]:.0%} |", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 40)
