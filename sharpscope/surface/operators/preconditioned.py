"""The Hessian, or another operator A, as an adaptive optimizer sees it: P^(−1/2) A P^(−1/2) with AdamW's diagonal P."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sharpscope.errors import UserError
from sharpscope.surface.operators.base import Operator, flatten


class Preconditioned(Operator):
    """P^(−1/2) A P^(−1/2) of an operator A and the diagonal `scale` of P^(−1/2), (P,)."""

    def __init__(self, operator: Operator, scale: Tensor) -> None:
        self.inside, self.scale = operator, scale
        self.size = operator.size
        self.device = operator.device
        self.dtype = operator.dtype
        self.products = 0
        if scale.shape != (operator.size,):
            raise UserError(
                f"scale, of shape {tuple(scale.shape)}: one number for each of the {operator.size} parameters"
            )
        self._product = lambda vector: (operator @ (vector * scale)) * scale


def adam_scale(optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> Tensor:
    """The diagonal of P^(−1/2), (P,), of Adam's or AdamW's present moments.

    P = (1 − β₁^t)·(√(v/(1 − β₂^t)) + ε) after t steps, so that on a quadratic loss training is stable below the largest eigenvalue
    (2 + 2β₁)/((1 − β₁)·lr) of P^(−1/2) H P^(−1/2), without weight decay (Cohen et al., arXiv 2207.14484).

    Raises:
        UserError: another optimizer, no step made yet, or a parameter that the optimizer does not have.
    """
    if not isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
        raise UserError(
            f"optimizer, {type(optimizer).__name__}: Adam and AdamW have second moments"
        )
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    scales = []
    for number, parameter in enumerate(parameters):
        group = groups.get(id(parameter))
        state = optimizer.state.get(parameter, {})
        if group is None or not float(state.get("step", 0)) > 0:
            raise UserError(
                f"optimizer, parameter {number} of shape {tuple(parameter.shape)}: it has no second moment yet; take a step first"
            )
        steps = float(state["step"])
        (beta1, beta2) = group["betas"]
        root = (state["exp_avg_sq"] / (1 - beta2**steps)).sqrt() + group["eps"]
        scales.append(((1 - beta1**steps) * root).rsqrt())
    return flatten(scales, parameters)


def threshold(optimizer: torch.optim.Optimizer) -> float:
    """The largest stable eigenvalue of P^(−1/2) H P^(−1/2) at the learning rate, (2 + 2β₁)/((1 − β₁)·lr), of the first group."""
    group = optimizer.param_groups[0]
    beta1 = group["betas"][0]
    lr = float(group["lr"])
    return (2 + 2 * beta1) / ((1 - beta1) * lr)
