"""AdamW and its learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from sharpscope.config.training import OptimizerSpec
from sharpscope.policy.sharding import is_shard


def build_optimizer(model: nn.Module, spec: OptimizerSpec) -> torch.optim.AdamW:
    """AdamW over the trainable parameters; weight decay acts on tensors of two or more dimensions only.

    Sharded parameters have groups of their own: AdamW's fused operations take one kind of tensor at a time.
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {
            "params": [p for p in trainable if (p.ndim >= 2) is matrices and is_shard(p) is divided],
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


def scale_gradients(parameters: Iterable[Tensor], factor: float) -> None:
    """Multiply every `.grad` in place."""
    if factor != 1.0:
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)


def updates_done(optimizer: torch.optim.AdamW) -> int:
    """Updates that the optimizer has made, including those before a checkpoint, by AdamW's own count."""
    return max((int(state["step"]) for state in optimizer.state.values() if "step" in state), default=0)
