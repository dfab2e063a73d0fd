"""The Hessian of a scalar loss: by two reverse passes, or by finite differences where an operation has no second derivative."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sharpscope.policy.directions import length
from sharpscope.surface.operators.base import Operator, common_dtype, flatten, unflatten

FACTOR, FACTORS = 4.0, 8
"""Ratio of the steps that are tried for a finite difference, and their largest number."""


def graph_product(loss: Tensor, parameters: Sequence[Tensor]) -> Callable[[Tensor], Tensor]:
    """Hessian products v ↦ H v of a scalar loss, by a second reverse pass through the kept graph of its gradient."""
    gradients = torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True)
    active = [i for i, g in enumerate(gradients) if g is not None and g.requires_grad]
    outputs = [gradients[i] for i in active]

    def product(vector: Tensor) -> Tensor:
        """H·vector, flat."""
        if not active:
            return flatten([None] * len(parameters), parameters)
        parts = unflatten(vector, parameters)
        chosen = [parts[i] for i in active]
        second = torch.autograd.grad(
            outputs,
            parameters,
            chosen,
            retain_graph=True,
            allow_unused=True,
        )
        return flatten(second, parameters)

    return product


class FiniteDifference(Operator):
    """Hessian products by central differences of gradients, H v ≈ (g(θ + εv) − g(θ − εv))/2ε, with their measured `error`.

    They need first derivatives only, so that fused attention kernels and sharded parameters are no obstacle. The first product
    chooses ε: of two neighboring steps, ε and 4ε, it takes the pair whose products agree best. `error` is their relative
    difference, which is above the truncation error of the smaller step (15 times it, where that dominates) and about its rounding.

    Args:
        parameters: leaf tensors of the loss.
        gradient_at: ∇L(θ + s) (P,) at a displacement s (P,).
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        gradient_at: Callable[[Tensor], Tensor],
    ) -> None:
        super().__init__(parameters, self._difference)
        self.error = math.nan
        self._gradient_at = gradient_at
        self._step = math.nan  # ε, as a length ‖εv‖
        scale = math.sqrt(sum(length(p.detach()) ** 2 for p in parameters)) or 1.0
        self._first = torch.finfo(common_dtype(parameters)).eps ** (1 / 3) * scale / FACTOR**3

    def _difference(self, vector: Tensor) -> Tensor:
        """H v of a vector (P,)."""
        size = length(vector)
        if size == 0:
            return torch.zeros_like(vector)
        if math.isnan(self._step):
            self._calibrate(vector / size)
        return self._at(vector / size, self._step) * size

    def _at(self, unit: Tensor, step: float) -> Tensor:
        upper = self._gradient_at(unit * step)
        lower = self._gradient_at(unit * -step)
        return (upper - lower) / (2 * step)

    def _calibrate(self, unit: Tensor) -> None:
        """Choose the step along a unit vector, and measure the error there."""
        step = self._first
        worse = 0
        self.error = math.inf
        last = self._at(unit, step)
        for _ in range(FACTORS - 1):
            wider = self._at(unit, FACTOR * step)
            size = max(length(last), length(wider))
            error = length(wider - last) / size if size > 0 else 0.0
            worse = worse + 1 if error > self.error else 0
            if error < self.error or not math.isfinite(self._step):
                self.error, self._step = error, step
            if worse == 2 or error == 0:
                break
            last = wider
            step = FACTOR * step
