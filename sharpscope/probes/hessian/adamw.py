"""AdamW's preconditioner and its stability threshold (Cohen et al., arXiv 2207.14484)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sharpscope.errors import UserError


def adamw_preconditioner(optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> list[Tensor]:
    """D = (1 − β₁ᵗ)·(√(v/(1 − β₂ᵗ)) + ε) for each parameter, with the optimizer's second moments v after t updates.

    AdamW's update is −lr·D⁻¹m; the gradient descent that it amounts to is stable while the largest eigenvalue of
    D^(−1/2) H D^(−1/2) is below `adamw_threshold`. Decoupled weight decay shifts it by the decay, which is ignored.

    Args:
        optimizer: `torch.optim.Adam` or `AdamW` after at least one step, without amsgrad.
        parameters: which tensors.

    Raises:
        UserError: a parameter without second moments (never updated, or another optimizer).
    """
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    diagonals = []
    for parameter in parameters:
        state = optimizer.state.get(parameter, {})
        if id(parameter) not in groups or "exp_avg_sq" not in state or "step" not in state:
            raise UserError(
                f"preconditioner, parameter of shape {tuple(parameter.shape)}: the optimizer has no moments of it; "
                "take a step of Adam or AdamW first, or leave it out"
            )
        group, step = groups[id(parameter)], float(state["step"])
        beta1, beta2 = group["betas"]
        second = state["exp_avg_sq"].detach().to(dtype=torch.promote_types(parameter.dtype, torch.float32))
        diagonals.append((1 - beta1**step) * ((second / (1 - beta2**step)).sqrt() + group["eps"]))
    return diagonals


def adamw_threshold(lr: float, beta1: float) -> float:
    """(2 + 2β₁)/((1 − β₁)·lr): largest stable eigenvalue of the preconditioned Hessian; 38/lr at β₁ = 0.9."""
    if lr <= 0 or not 0 <= beta1 < 1:
        raise UserError(f"lr, {lr}, beta1, {beta1}: lr must be positive and beta1 in [0, 1)")
    return (2 + 2 * beta1) / ((1 - beta1) * lr)
