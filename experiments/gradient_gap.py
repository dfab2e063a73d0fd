"""Does the critical step of the gradient gap's theory (arXiv 2510.08539) agree with the measured one on a real model?

python -m experiments.gradient_gap --model smollm2    # SmolLM2-135M-Instruct on two-digit sums (experiments.smollm2)

For prompts with both right and wrong completions: gap = mean ∇ln π of right minus of wrong completions, w = gap/‖gap‖, G the largest
‖∇ln π(completion)‖, L the largest |eigenvalue| of the Hessian of ln π of the completion with that norm (power iteration), and the
theory's step η = ‖gap‖/(2(L + 8G²)). Measured: the critical step η_c of the surrogate −mean A·π/π_old along w (λ_c = 2/η_c), and the
success rate that importance weights give at both. Everything that the theory bounds is taken at its largest observed value, so its
step is an upper bound of what it guarantees.
"""

from __future__ import annotations

import argparse
import math

import torch
from torch import Tensor

from sharpscope import critical_sharpness
from sharpscope.config import build_config
from sharpscope.policy import Policy, Rollouts, load_policy
from sharpscope.policy.forward import Scorer
from sharpscope.policy.guard import guarded
from sharpscope.tasks import make_task
from sharpscope.training.rollouts import draw_group

PRODUCTS = 6
"""Hessian products of the power iteration."""


def score(scorer: Scorer, rows: Rollouts) -> list[Tensor]:
    """∇ ln π of one completion."""
    parameters = [p for p in scorer.model.parameters() if p.requires_grad]
    return list(torch.autograd.grad(scorer.score(rows, with_grad=True).logp.sum(), parameters))


def norm(vector: list[Tensor]) -> float:
    """Its L2 norm."""
    return math.sqrt(sum(float(v.double().square().sum()) for v in vector))


def largest_eigenvalue(policy: Policy, rows: Rollouts) -> float:
    """Largest |eigenvalue| of the Hessian of ln π of one completion, by power iteration."""
    model = policy.model
    parameters = [p for p in model.parameters() if p.requires_grad]
    with guarded(model, attention="math"):
        logits = model(
            input_ids=rows.input_ids[:, rows.input_ids.shape[1] - int(rows.attention_mask.sum()) :]
        ).logits
        start = int(rows.prompt_lengths[0])
        length = int(rows.lengths[0])
        logp = (
            logits[0, start - 1 : start - 1 + length]
            .log_softmax(-1)
            .gather(1, rows.completion_ids[0, :length, None])
        )
        gradient = torch.autograd.grad(logp.sum(), parameters, create_graph=True)
        g = torch.Generator().manual_seed(0)
        vector = [torch.randn(p.shape, generator=g) for p in parameters]
        value = 0.0
        for _ in range(PRODUCTS):
            size = norm(vector)
            vector = [v / size for v in vector]
            product = torch.autograd.grad(gradient, parameters, vector, retain_graph=True)
            vector = [p.detach() for p in product]
            value = norm(vector)
    return value


def one_prompt(policy: Policy, scorer: Scorer, rollouts: Rollouts) -> dict[str, float]:
    """The two critical steps of one prompt."""
    right = rollouts.reward > rollouts.reward.mean()
    success = float(right.double().mean())
    parameters = [p for p in policy.model.parameters() if p.requires_grad]
    gap = [torch.zeros_like(p) for p in parameters]
    largest, at = 0.0, 0
    for i in range(len(rollouts)):
        own = score(scorer, rollouts.rows(torch.tensor([i])))
        size = norm(own)
        if size > largest:
            largest, at = size, i
        share = 1 / int(right.sum()) if right[i] else -1 / int((~right).sum())
        for total, part in zip(gap, own, strict=True):
            total.add_(part, alpha=share)
    curvature = largest_eigenvalue(policy, rollouts.rows(torch.tensor([at])))
    size = norm(gap)
    theory = size / (2 * (curvature + 8 * largest**2))
    mask = rollouts.completion_mask.bool()
    old = scorer.log_probabilities(rollouts)

    def ratios() -> Tensor:
        return torch.where(mask, scorer.log_probabilities(rollouts) - old, 0.0).sum(1).exp()

    def loss() -> Tensor:
        return -((right.double() - success) * ratios()).mean()

    def reached(step: float) -> float:
        """Success rate at θ + step·w, by self-normalized importance weights."""
        with torch.no_grad():
            for parameter, part in zip(parameters, gap, strict=True):
                parameter.add_(part, alpha=step / size)
            weights = ratios()
            for parameter, kept in zip(parameters, start, strict=True):
                parameter.copy_(kept)
        return float(weights[right].sum() / weights.sum())

    found = critical_sharpness(loss, policy.model, [-g / size for g in gap], guess=1000 * theory)
    start = [p.detach().clone() for p in parameters]
    return {
        "success": success,
        "length": float(rollouts.lengths.double().mean()),
        "gap": size,
        "G": largest,
        "L": curvature,
        "theory": theory,
        "measured": found.lr,
        "after_theory": reached(theory),
        "after_half": reached(found.lr / 2) if found.outcome == "found" else math.nan,
    }


def main() -> None:
    """Print a row per prompt, and the ratio of both steps."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="folder of SmolLM2-135M-Instruct")
    parser.add_argument(
        "--prompts", type=int, default=6, help="prompts with both right and wrong completions"
    )
    parser.add_argument("--completions", type=int, default=16)
    options = parser.parse_args()
    values = {
        "policy.model": options.model,
        "policy.prompt_format": "plain",
        "policy.dtype": "float32",
        "threads": 1,
    }
    task_values = {"kind": "custom", "factory": "experiments.smollm2.sums:sums"}
    rollout = {"rollout.group_size": options.completions, "rollout.max_new_tokens": 6}
    config = build_config(values={**values, **rollout, "task": task_values})
    policy, task = load_policy(config.policy), make_task(config.task)
    scorer = Scorer(policy.model, 1.0, 4096, share_prompt=True)
    print(
        "| success | tokens | gap | G | L | η of the theory | η_c measured | measured / theory | success at η | at η_c/2 |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    shown = 0
    for number, example in enumerate(task.splits()["train"]):
        rollouts, _ = draw_group(policy, task, [example], config.rollout, number)
        share = float(rollouts.reward.double().mean())
        if not 0 < share < 1:
            continue
        row = one_prompt(policy, scorer, rollouts)
        cells = [
            f"{row[name]:.3g}"
            for name in ("success", "length", "gap", "G", "L", "theory", "measured")
        ]
        cells += [
            f"{row['measured'] / row['theory']:.0f}",
            f"{row['after_theory']:.3f}",
            f"{row['after_half']:.3f}",
        ]
        print(f"| {' | '.join(cells)} |", flush=True)
        shown += 1
        if shown == options.prompts:
            break


if __name__ == "__main__":
    main()
