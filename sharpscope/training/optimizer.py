"""AdamW, its schedule, and the size of the step that it really took."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from sharpscope.training.spec import OptimizerSpec


def build_optimizer(model: nn.Module, spec: OptimizerSpec) -> torch.optim.AdamW:
    """AdamW over the trainable parameters; weight decay acts on tensors of two or more dimensions only."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": spec.weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=spec.lr, betas=(spec.beta1, spec.beta2), eps=spec.eps
    )


def learning_rate(spec: OptimizerSpec, step: int, steps: int) -> float:
    """Learning rate of `step` (counted from 1) in a run of `steps` steps."""
    if step <= spec.warmup_steps:
        return spec.lr * step / spec.warmup_steps
    # The last step still learns: the decay reaches zero one step after it.
    done = (step - spec.warmup_steps - 1) / max(steps - spec.warmup_steps, 1)
    if spec.schedule == "linear":
        return spec.lr * (1 - done)
    if spec.schedule == "cosine":
        return spec.lr * 0.5 * (1 + math.cos(math.pi * done))
    return spec.lr


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give every parameter group the same learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def gradient_norm(parameters: Iterable[Tensor]) -> float:
    """Global L2 norm of `.grad` over the parameters, summed in float64; parameters without a gradient count 0."""
    total = 0.0
    for parameter in parameters:
        if parameter.grad is not None:
            total += float(torch.linalg.vector_norm(parameter.grad, dtype=torch.float64)) ** 2
    return math.sqrt(total)


def scale_gradients(parameters: Iterable[Tensor], factor: float) -> None:
    """Multiply every `.grad` in place."""
    if factor != 1.0:
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)


@torch.no_grad()
def update_norm(optimizer: torch.optim.AdamW) -> float:
    """‖Δθ‖₂ of the update that `optimizer.step()` has just made, over all parameters, weight decay included.

    Computed from AdamW's state, one parameter at a time, so that no copy of the weights is needed:
    Δθ = −lr·m̂/(√v̂ + ε) − lr·λ·θ_before with θ_before = (θ_after + lr·m̂/(√v̂ + ε)) / (1 − lr·λ).
    """
    total = 0.0
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
            delta = adaptive + lr * decay * before if decay else adaptive
            total += float(torch.linalg.vector_norm(delta, dtype=torch.float64)) ** 2
    return math.sqrt(total)
