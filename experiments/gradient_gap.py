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
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor

from sharpscope import critical_sharpness
from sharpscope.config import build_config
from sharpscope.policy import Policy, Rollouts, load_policy
from sharpscope.policy.forward import Scorer
from sharpscope.policy.guard import guarded
from sharpscope.tasks import make_task
from sharpscope.traces import Run, load_run
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


GRADIENT_SQUARES = 8.0
"""Coefficient of G² in the bound of the gradient gap's step (arXiv 2510.08539)."""


def gap_of_run(run: Run) -> pd.DataFrame:
    """Largest learning rate of the gradient gap's theory beside the measured critical one, for runs with two rewards.

    The theory (arXiv 2510.08539) bounds a step θ + η·w, ‖w‖ = 1, by η ≤ [⟨w, gap⟩]₊/(2(L + 8G²)), gap the difference of
    E ∇ln π(completion) between correct and wrong completions, G and L bounds of the norms of ∇ ln π(completion) and its Hessian.
    Along the optimizer's update Δ per learning rate, ⟨Δ, gap⟩ = Δᵀ(−g)/K with g the gradient of the loss and K = Σ |c| over
    the completions with A > 0, c the mean coefficient of a completion's tokens; hence lr ≤ (Δᵀ(−g)/K)/(2·‖Δ‖²·8·G²) with L = 0
    and G² the largest Σ_t ‖∇ ln π_t‖² over completions.

    Columns step, success (share of correct completions), lr, critical_lr (measured, 2/λ_c; NaN if not found) and gap_lr, a row for
    each step with both; empty where rewards have more than two values or something was not recorded.
    """
    probes = run.probes[run.probes["probe"] == "critical"]
    found = probes.pivot_table(index="step", columns="quantity", values="value", aggfunc="first")
    rewards = run.rollouts["reward"].dropna().unique()
    if found.empty or "update_slope" not in found or len(rewards) != 2:
        return pd.DataFrame()
    updates = run.updates[run.updates["update"] == 0].set_index("step")
    columns = ["rollout", "update", "advantage", "loss_coef", "score_norm_local"]
    rows = []
    for step, probed in zip(map(int, found.index), found.to_dict("records"), strict=True):
        tokens = run.tokens(steps=step, columns=columns)
        first = tokens[(tokens["update"] == 0) & (tokens["loss_coef"] != 0)]
        means = first.groupby("rollout")[["loss_coef", "advantage"]].mean()
        gain = float(means.loc[means["advantage"] > 0, "loss_coef"].abs().sum())
        squares = (
            (first["score_norm_local"].astype(float) ** 2)
            .groupby(first["rollout"])
            .agg(lambda x: x.sum(skipna=False))
        )
        if step not in updates.index or squares.isna().all() or gain == 0:
            continue
        lr, length = (float(updates[name][step]) for name in ("lr", "update_norm"))
        rise = max(float(probed["update_slope"]), 0.0) / gain
        bound = rise / (2 * (length / lr) ** 2 * GRADIENT_SQUARES * float(squares.max()))
        row = {
            "step": step,
            "success": float(run.rollouts.loc[run.rollouts["step"] == step, "correct"].mean()),
            "lr": lr,
        }
        sharpness = float(probed.get("critical_sharpness", math.nan))
        rows.append(row | {"critical_lr": 2 / sharpness, "gap_lr": bound})
    return pd.DataFrame(rows)


def main() -> None:
    """Print a row per prompt, and the ratio of both steps."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="folder of SmolLM2-135M-Instruct")
    parser.add_argument("--run", type=Path, help="or: the steps of a recorded run")
    parser.add_argument(
        "--prompts", type=int, default=6, help="prompts with both right and wrong completions"
    )
    parser.add_argument("--completions", type=int, default=16)
    options = parser.parse_args()
    if options.run is not None:
        print(gap_of_run(load_run(options.run)).to_string())
        return
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
