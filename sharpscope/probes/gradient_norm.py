"""An unbiased estimate of the squared gradient norm: the inner product of two independent gradients.

The squared norm of a batch gradient g has expectation ‖E g‖² + tr Cov g, of which the second term dominates for policy
gradients. For independent g_A, g_B with the same expectation, E⟨g_A, g_B⟩ = ‖E g‖².
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn

from sharpscope.config.probes import Check
from sharpscope.errors import UserError
from sharpscope.probes.estimate import Estimate
from sharpscope.probes.language_model import lm_surface
from sharpscope.probes.objectives import Objective, group_normalized, rollout_batch
from sharpscope.probes.probe_set import Drawn
from sharpscope.probes.surface import common_dtype, inner, size_of

GradientOf = Literal["surrogate", "expected_failure"]
NAMES: tuple[GradientOf, ...] = ("surrogate", "expected_failure")


def squared_gradient_norm(
    model: nn.Module,
    drawn: Drawn,
    names: Sequence[GradientOf] = NAMES,
    *,
    temperature: float = 1.0,
    microbatch_tokens: int = 4096,
    memory_mb: float = 2048.0,
    seed: int | None = None,
    check: Check = "first",
) -> list[Estimate]:
    """⟨g_A, g_B⟩ over two halves of each prompt's completions.

    - `expected_failure`: g = −mean_i (R_i − b_i) ∇log π(y_i) with b_i the mean success of the prompt's other completions in the
      same half. b_i is independent of y_i, so E g = ∇(1 − E R), and ⟨g_A, g_B⟩ is unbiased for its squared norm.
    - `surrogate`: the first GRPO update on half a group, with advantage (R − mean)/(std_{n−1} + 1e-4) within the half, averaged
      over tokens, then over completions; unbiased for the squared norm of that update's expectation.

    The standard error treats prompts (or blocks of prompts, if memory requires blocks) as independent; for a fixed set of
    prompts it is too large.

    Args:
        model: Hugging Face causal language model; its state is restored afterwards.
        drawn: completions of the model: at least 2 prompts with the same even number n ≥ 4 of completions.
        names: objectives to take the gradient of.
        temperature: softmax temperature of the completions.
        microbatch_tokens: see `lm_surface`.
        memory_mb: memory for gradients of blocks of prompts [MiB]; there are at least two blocks.
        seed: seed of the completions, for the rows.
        check: see `lm_surface`.

    Returns:
        For each objective the rows `squared_gradient_norm` and `squared_gradient_norm_naive`, ‖(g_A + g_B)/2‖², which includes
        the noise.

    Raises:
        UserError: fewer than 2 prompts, or a number of completions that is odd, below 4, or not the same for each.
    """
    began = time.perf_counter()
    halves = _halves(drawn.rollouts.group)
    batch = rollout_batch(drawn.rollouts)
    weights = {name: _coefficients(name, drawn.correct.double(), batch.scored, halves) for name in names}
    # Only the rows of this objective are used; nll needs no anchors.
    with lm_surface(
        model, Objective("nll", batch, temperature), microbatch_tokens=microbatch_tokens, check=check
    ) as surface:
        size = size_of(surface.parameters)
        each = 2 * len(names) * size * torch.finfo(common_dtype(surface.parameters)).bits / 8
        blocks = halves.tensor_split(max(2, min(len(halves), int(memory_mb * 2**20 / each))))
        # gradients[half][block][name] (P,)
        gradients = [
            [surface.pull_back(block[:, half].reshape(-1), list(weights.values())) for block in blocks]
            for half in (0, 1)
        ]
    seconds = (time.perf_counter() - began) / len(names)
    rows: list[Estimate] = []
    for number, name in enumerate(names):
        a, b = (torch.stack([block[number] for block in half]).double() for half in gradients)  # (B, P)
        value, std_error = _product(a, b)
        finite = math.isfinite(value)
        common = {"samples": len(batch), "functional": name, "seed": seed}
        one = Estimate("gradient", "squared_gradient_norm", value, std_error, seconds=seconds, **common)  # type: ignore[arg-type]
        one = replace(one, prompts=len(halves), prompt_std_error=std_error if len(a) == len(halves) else math.nan)
        naive = float(((a.sum(0) + b.sum(0)) / 2).square().sum())
        rows += [
            one if finite else replace(one, converged=False, why="the gradient is not finite"),
            Estimate("gradient", "squared_gradient_norm_naive", naive, **common),  # type: ignore[arg-type]
        ]
    return rows


def _halves(group: Tensor) -> Tensor:
    """(prompts, 2, n/2) rows: each prompt's first and second half.

    Raises:
        UserError: see `squared_gradient_norm`.
    """
    counts = group.unique(return_counts=True)[1]
    n = int(counts[0])
    if len(counts) < 2 or bool((counts != n).any()) or n % 2 or n < 4:
        raise UserError(
            f"gradient_samples: {len(counts)} prompts with {sorted(set(counts.tolist()))} completions; two halves need at "
            "least 2 prompts, and of each the same even number, at least 4"
        )
    return group.argsort(stable=True).view(len(counts), 2, n // 2)


def _coefficients(name: GradientOf, success: Tensor, scored: Tensor, halves: Tensor) -> Tensor:
    """C (N, S) such that a half's gradient is Σ_it c_it ∇log π_it over its rows."""
    within = success[halves]  # (prompts, 2, n/2)
    n = halves.shape[2]
    if name == "expected_failure":
        advantage = (within - within.mean(2, keepdim=True)) * (n / (n - 1))  # R_i less the mean of the others
        per_row = torch.ones_like(success)
    else:
        label = torch.arange(halves[..., 0].numel()).repeat_interleave(n)
        advantage = group_normalized(within.reshape(-1).cpu(), label).view_as(within).to(within)
        per_row = scored.sum(1).clamp(min=1).double()
    spread = torch.zeros_like(success)
    spread[halves.reshape(-1)] = advantage.reshape(-1)
    return scored * (-2 * spread / (len(success) * per_row))[:, None]


def _product(a: Tensor, b: Tensor) -> tuple[float, float]:
    """⟨Σ a, Σ b⟩ and its standard error for blocks a, b (B, P) that are independent of each other.

    To first order block k contributes ⟨a_k, Σ b⟩ + ⟨Σ a, b_k⟩, whose variance over the blocks gives the standard error. The
    product of both halves' noise enters twice, so the error is not understated where ∇J is small.
    """
    whole_a, whole_b = a.sum(0), b.sum(0)
    influence = inner(a, whole_b) + inner(b, whole_a)  # (B,)
    return float(inner(whole_a[None], whole_b)), math.sqrt(len(a)) * float(influence.std())
