"""Global L2 norms of a gradient and of the step that AdamW took, and the factor of clipping."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from sharpscope import distributed
from sharpscope.policy.sharding import copies, is_shard


def total_norm(parts: Iterable[Tensor | None]) -> float:
    """Global L2 norm, summed in float64; None counts 0, of a sharded tensor each process contributes its part."""
    whole = own = 0.0
    divided = False
    for part in parts:
        if part is None:
            continue
        local: Any = part
        square = float(torch.linalg.vector_norm(local.to_local() if is_shard(part) else part, dtype=torch.float64)) ** 2
        if is_shard(part):
            own, divided = own + square / copies(part), True
        else:
            whole += square
    return math.sqrt(whole + (distributed.sum_values(own) if divided else 0.0))


def gradient_norm(parameters: Iterable[Tensor]) -> float:
    """Global L2 norm of `.grad` over the parameters, summed in float64; parameters without a gradient count 0."""
    return total_norm(p.grad for p in parameters)


@torch.no_grad()
def update_norm(optimizer: torch.optim.AdamW) -> float:
    """‖Δθ‖₂ of the update that `optimizer.step()` has just made, over all parameters, weight decay included.

    Computed from AdamW's state, one parameter at a time, so that no copy of the weights is needed:
    Δθ = −lr·m̂/(√v̂ + ε) − lr·λ·θ_before with θ_before = (θ_after + lr·m̂/(√v̂ + ε)) / (1 − lr·λ).
    """
    return total_norm(_steps_taken(optimizer))


def _steps_taken(optimizer: torch.optim.AdamW) -> Iterator[Tensor]:
    """Δθ of one parameter after the other."""
    for group in optimizer.param_groups:
        lr, decay, eps = group["lr"], group["weight_decay"], group["eps"]
        beta1, beta2 = group["betas"]
        for parameter in group["params"]:
            if parameter.grad is None:
                continue  # AdamW leaves a parameter without a gradient alone, decay included
            state = optimizer.state[parameter]
            step = float(state["step"])
            root = (state["exp_avg_sq"] / (1 - beta2**step)).sqrt_().add_(eps)
            adaptive = (state["exp_avg"] / (1 - beta1**step)).div_(root).mul_(lr)
            before = (parameter + adaptive) / (1 - lr * decay) if decay else parameter
            yield adaptive + lr * decay * before if decay else adaptive


def clip_factor(norm: float, limit: float | None) -> float:
    """Factor by which clipping multiplies a gradient of this norm: min(1, limit/(norm + 1e-6)), as in torch; 1 without a limit."""
    return 1.0 if limit is None else min(1.0, limit / (norm + 1e-6))
