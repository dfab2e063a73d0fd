"""Muon, the optimizer of the warm start: momentum with orthogonalized updates.

It needed fewer updates than AdamW in the warm start of the embedded policies. K. Jordan et al., "Muon: an optimizer for
hidden layers in neural networks" (2024). Implemented here because torch includes it only since 2.9.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of the odd polynomial that maps singular values to about 1 in five iterations."""


def orthogonal(matrices: torch.Tensor, iterations: int = 5) -> torch.Tensor:
    """Orthogonalize matrices (n, a, b) with a ≤ b: map singular values to about [0.7, 1.2], keep singular vectors."""
    a, b, c = NEWTON_SCHULZ
    x = matrices / (matrices.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(iterations):
        square = x @ x.mT  # (n, a, a)
        x = a * x + (b * square + c * square @ square) @ x
    return x


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov momentum and decoupled weight decay.

    An update has spectral norm about lr·sqrt(max(1, out/in)). Matrices of the same shape are processed as one batch.

    Args:
        matrices: parameters (out, in).
        lr: learning rate.
        momentum: coefficient of the running average of gradients.
        weight_decay: coefficient of the decoupled weight decay.
    """

    def __init__(
        self, matrices: Iterable[torch.Tensor], lr: float, momentum: float = 0.95, weight_decay: float = 0.0
    ) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all matrices that have a `.grad`."""
        for group in self.param_groups:
            shapes: dict[tuple[int, ...], list[tuple[torch.Tensor, torch.Tensor]]] = {}
            for matrix in group["params"]:
                if matrix.grad is None:
                    continue
                state = self.state[matrix]
                average = state.setdefault("average", torch.zeros_like(matrix))
                average.lerp_(matrix.grad, 1 - group["momentum"])
                direction = matrix.grad.lerp(average, group["momentum"])
                wide = direction if direction.shape[0] <= direction.shape[1] else direction.T
                shapes.setdefault(tuple(wide.shape), []).append((matrix, wide))
            for members in shapes.values():
                for (matrix, _), update in zip(members, orthogonal(torch.stack([w for _, w in members])), strict=True):
                    applied = update if matrix.shape[0] <= matrix.shape[1] else update.T
                    scale = max(1.0, matrix.shape[0] / matrix.shape[1]) ** 0.5
                    matrix.mul_(1 - group["lr"] * group["weight_decay"]).add_(applied, alpha=-group["lr"] * scale)
