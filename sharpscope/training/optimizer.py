"""AdamW, its schedule, and the size of the step that it really took."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from sharpscope import distributed
from sharpscope.config.training import OptimizerSpec


def build_optimizer(model: nn.Module, spec: OptimizerSpec) -> torch.optim.AdamW:
    """AdamW over the trainable parameters; weight decay acts on tensors of two or more dimensions only.

    Parameters that are divided over processes have groups of their own: AdamW's joint operations take one kind at a time.
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {
            "params": [p for p in trainable if (p.ndim >= 2) is matrices and _divided(p) is divided],
            "weight_decay": spec.weight_decay if matrices else 0.0,
        }
        for divided in (False, True)
        for matrices in (True, False)
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=spec.lr, betas=(spec.beta1, spec.beta2), eps=spec.eps
    )


def learning_rate(spec: OptimizerSpec, step: int, steps: int) -> float:
    """Learning rate of `step` (counted from 1) in a run of `steps` steps.

    With w warm-up steps: lr·step/w up to step w, then constant, or a decay from lr at step max(w, 1) to 0 at step `steps`:
    linear lr·(1 − d), cosine lr·(1 + cos πd)/2 with d = (step − max(w, 1))/(steps − max(w, 1)). These are transformers'
    schedules after `step` calls of the scheduler. A run of one step has no decay.
    """
    if step <= spec.warmup_steps:
        return spec.lr * step / spec.warmup_steps
    peak = max(spec.warmup_steps, 1)
    done = (step - peak) / max(steps - peak, 1)
    if spec.schedule == "linear":
        return spec.lr * (1 - done)
    if spec.schedule == "cosine":
        return spec.lr * 0.5 * (1 + math.cos(math.pi * done))
    return spec.lr


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give every parameter group the same learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def _divided(tensor: Tensor) -> bool:
    """Whether this process holds a part of the tensor only (FSDP2)."""
    return hasattr(tensor, "to_local")


def _norm(parts: Iterable[Tensor]) -> float:
    """Global L2 norm, summed in float64; of a tensor that is divided over processes each contributes its part."""
    whole = own = 0.0
    divided = False
    for part in parts:
        local: Any = part
        square = float(torch.linalg.vector_norm(local.to_local() if _divided(part) else part, dtype=torch.float64)) ** 2
        if _divided(part):
            own, divided = own + square, True
        else:
            whole += square
    return math.sqrt(whole + (distributed.sum_values(own) if divided else 0.0))


def gradient_norm(parameters: Iterable[Tensor]) -> float:
    """Global L2 norm of `.grad` over the parameters, summed in float64; parameters without a gradient count 0."""
    return _norm(p.grad for p in parameters if p.grad is not None)


def scale_gradients(parameters: Iterable[Tensor], factor: float) -> None:
    """Multiply every `.grad` in place."""
    if factor != 1.0:
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)


def updates_done(optimizer: torch.optim.AdamW) -> int:
    """How many updates it has made, those before a checkpoint included; AdamW counts them, parameter by parameter."""
    return max((int(state["step"]) for state in optimizer.state.values() if "step" in state), default=0)


@torch.no_grad()
def update_norm(optimizer: torch.optim.AdamW) -> float:
    """‖Δθ‖₂ of the update that `optimizer.step()` has just made, over all parameters, weight decay included.

    Computed from AdamW's state, one parameter at a time, so that no copy of the weights is needed:
    Δθ = −lr·m̂/(√v̂ + ε) − lr·λ·θ_before with θ_before = (θ_after + lr·m̂/(√v̂ + ε)) / (1 − lr·λ).
    """
    return _norm(_steps_taken(optimizer))


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
