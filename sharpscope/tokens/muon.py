"""Muon and Pion: optimizers whose step of a matrix is a polynomial of its averaged gradient, with the step as a function."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

MUON = (3.4445, -4.7750, 2.0315)
"""Coefficients a, b, c of aX + bXXᵀX + c(XXᵀ)²X that bring singular values to about 1 (Muon)."""
PROMOTION = (1.875, -1.25, 0.375)
"""Those that bring them to 1, without passing it (Pion)."""
SUPPRESSION = (0.0, 2.5, -1.5)
"""Those that leave 1 where it is and bring smaller ones towards 0, the high-pass filter (Pion)."""
ITERATIONS = 5
SCALE = 0.2
"""Step of a matrix at singular values of 1, in lr·√(larger side): the size of AdamW's, so that its learning rates carry over."""


class Muon(torch.optim.Optimizer):
    """Orthogonalizes the averaged gradient of each matrix (Muon), or keeps its large singular values (Pion); AdamW for the rest.

    M ← momentum·M + (1 − momentum)·h with the clipped gradient h; X = M/‖M‖_F goes through five Newton–Schulz iterations to f(X), which
    acts on its singular values; θ ← θ − lr·λ·θ − lr·0.2·√max(rows, columns)·f(X). With `filter_steps` 0 all iterations are Muon's; else
    5 − filter_steps promote, and the rest suppress small singular values (Pion, arXiv 2605.19282).

    Args:
        groups: parameter groups; those with `matrices` are stepped as matrices, (m, n) each, and the others by AdamW.
        lr: learning rate.
        betas, eps: of AdamW.
        weight_decay: decoupled, λ.
        momentum: of the averaged gradient.
        filter_steps: iterations that suppress, at most 5.

    Examples:
        >>> weight = torch.nn.Parameter(torch.zeros(2, 2))
        >>> optimizer = Muon([{"params": [weight], "matrices": True}], lr=1.0)
        >>> weight.grad = torch.tensor([[3.0, 0.0], [0.0, 3.0]])
        >>> optimizer.step()
        >>> (-weight).diagonal() > 0.15  # 0.2·√2 times a singular value of about 1
        tensor([True, True])
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        lr: float,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        filter_steps: int = 0,
    ) -> None:
        if not 0 <= filter_steps <= ITERATIONS:
            raise ValueError(f"filter_steps = {filter_steps}: must be from 0 to {ITERATIONS}")
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "filter_steps": filter_steps,
            "matrices": False,
            "decoupled_weight_decay": True,
        }
        super().__init__(groups, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Make the step of the gradients in `.grad`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(self.moved(group, parameter))
        return loss

    def moved(self, group: dict[str, Any], parameter: Tensor) -> Tensor:
        """Δ of a parameter by its gradient; the state moves on."""
        state = self.state[parameter]
        h = parameter.grad
        assert h is not None
        if group["matrices"]:
            step = matrix_step(group, state, parameter, h)
            state["momentum_buffer"] = averaged(group, state, h)
            return step
        (beta1, beta2), lr = group["betas"], float(group["lr"])
        zeros = torch.zeros_like(parameter)
        number = float(state.get("step", 0)) + 1
        state["step"] = torch.as_tensor(number)
        m = state["exp_avg"] = state.get("exp_avg", zeros) * beta1 + h * (1 - beta1)
        v = state["exp_avg_sq"] = state.get("exp_avg_sq", zeros) * beta2 + h * h * (1 - beta2)
        root = (v / (1 - beta2**number)).sqrt() + group["eps"]
        return -lr * (m / (1 - beta1**number) / root + group["weight_decay"] * parameter)


def averaged(group: dict[str, Any], state: dict[str, Any], h: Tensor) -> Tensor:
    """M, the averaged gradient after h; it starts at 0, and its length does not matter."""
    own = h * (1 - group["momentum"])
    buffer = state.get("momentum_buffer")
    return own if buffer is None else buffer * group["momentum"] + own


def matrix_step(group: dict[str, Any], state: dict[str, Any], theta: Tensor, h: Tensor) -> Tensor:
    """Δ of a matrix, differentiable in h."""
    scale = float(group["lr"]) * SCALE * math.sqrt(max(theta.shape))
    step = newton_schulz(averaged(group, state, h), int(group["filter_steps"])) * -scale
    decay = float(group["lr"]) * float(group["weight_decay"])
    return step - decay * theta if decay else step


def newton_schulz(matrix: Tensor, filter_steps: int = 0) -> Tensor:
    """f(X) of X = matrix/‖matrix‖_F, whose singular values f maps to about 1, or with `filter_steps` to 1 and 0."""
    promoting = [PROMOTION] * (ITERATIONS - filter_steps) + [SUPPRESSION] * filter_steps
    wide = matrix.shape[0] <= matrix.shape[1]
    x = matrix if wide else matrix.mT
    x = x / x.norm().clamp(min=1e-30)  # a gradient of 0 stays 0
    for a, b, c in promoting if filter_steps else [MUON] * ITERATIONS:
        square = x @ x.mT
        x = a * x + (b * square + c * (square @ square)) @ x
    return x if wide else x.mT
