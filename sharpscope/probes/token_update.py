"""What the optimizer is about to do, split over the tokens of the round, momentum and weight decay."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sharpscope.config.probes import Check
from sharpscope.errors import UserError
from sharpscope.probes.attribution import Way, attribute


@dataclass(frozen=True)
class UpdateSplit:
    """AdamW's next step Δθ = −(lr/b₁)·D⁻¹(β₁m + (1 − β₁)·κ∇L) − lr·λ·θ, D = √v̂ + ε, with clip factor κ and b₁ = 1 −
    β₁^k.

    `gradient` + `momentum` + `weight_decay` = 1, the parts of ‖Δθ‖² = ⟨Δθ, Δθ⟩.

    Attributes:
        direction: u with ⟨∇L, u⟩ = what ∇L adds to ‖Δθ‖²; like the trainable parameters.
        squared_length: ‖Δθ‖².
        gradient: share of this round's gradient: the tokens' shares and, if the loss has other terms, a remainder.
        momentum, weight_decay: shares of m and of λ.
    """

    direction: list[Tensor]
    squared_length: float
    gradient: float
    momentum: float
    weight_decay: float


@torch.no_grad()
def coming_update(
    optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter], clip_factor: float = 1.0
) -> UpdateSplit:
    """The step that `optimizer.step()` will take, from `.grad` before clipping, before it is taken.

    It is known beforehand, and must be: the tokens' gradients belong to the weights before the step.

    Args:
        optimizer: AdamW (or Adam without weight decay).
        parameters: the trainable parameters in the model's order; those without a gradient stay as they are.
        clip_factor: κ, what the gradients will be multiplied by.

    Raises:
        UserError: another optimizer, or an option whose step is not the one above.
    """
    settings = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    direction = []
    squared = from_gradient = from_momentum = from_decay = 0.0
    for parameter in parameters:
        group = settings.get(id(parameter))
        if group is None or parameter.grad is None:
            direction.append(torch.zeros_like(parameter))
            continue
        _check(optimizer, group)
        beta1, beta2 = group["betas"]
        lr, decay = float(group["lr"]), group["weight_decay"]
        state = optimizer.state.get(parameter, {})
        k = float(state.get("step", 0)) + 1
        m = state.get("exp_avg", torch.zeros_like(parameter))
        v = state.get("exp_avg_sq", torch.zeros_like(parameter))
        g = parameter.grad * clip_factor
        root = (v * beta2).addcmul_(g, g, value=1 - beta2).div_(1 - beta2**k).sqrt_().add_(group["eps"])
        rate = lr / (1 - beta1**k) / root
        kept, fresh, shrunk = -beta1 * rate * m, -(1 - beta1) * rate * g, -lr * decay * parameter
        step = kept + fresh + shrunk
        squared += _inner(step, step)
        from_gradient += _inner(fresh, step)
        from_momentum += _inner(kept, step)
        from_decay += _inner(shrunk, step)
        direction.append(step.mul_(rate).mul_(-(1 - beta1) * clip_factor))
    if squared == 0.0:
        return UpdateSplit(direction, 0.0, math.nan, math.nan, math.nan)
    return UpdateSplit(direction, squared, from_gradient / squared, from_momentum / squared, from_decay / squared)


def update_attribution(
    model: nn.Module,
    input_ids: Tensor,
    mask: Tensor,
    coef: Tensor,
    split: UpdateSplit,
    attention_mask: Tensor | None = None,
    temperature: float = 1.0,
    method: Way = "auto",
    *,
    check: Check = "first",
) -> Tensor:
    """Each token's share of ‖Δθ‖², (N, S); with `split.momentum`, `split.weight_decay` and any remainder they sum to 1.

    The remainder, of terms of the loss that do not go through log π, is `split.gradient` minus the tokens' sum. Call it
    before the optimizer's step. NaN at every token if Δθ = 0. Arguments as in `attribute`.
    """
    if split.squared_length == 0.0:
        return torch.where(mask.bool(), math.nan, 0.0).to(coef.dtype)
    shares = attribute(model, input_ids, mask, coef, split.direction, attention_mask, temperature, method, check=check)
    return shares / split.squared_length


def _inner(a: Tensor, b: Tensor) -> float:
    return float(torch.dot(a.flatten().double(), b.flatten().double()))


def _check(optimizer: torch.optim.Optimizer, group: dict) -> None:
    decoupled = isinstance(optimizer, torch.optim.AdamW) or group.get("weight_decay") == 0
    if not isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW) or not decoupled:
        raise UserError(
            f"optimizer, {type(optimizer).__name__}: update attribution knows AdamW (and Adam without weight decay)"
        )
    for option in ("amsgrad", "maximize"):
        if group.get(option):
            raise UserError(f"optimizer, {option}: update attribution does not know it; switch it off")
