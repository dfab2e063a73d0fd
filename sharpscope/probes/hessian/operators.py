"""Symmetric linear operators on flat parameter vectors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sharpscope.probes.surface import common_dtype, flatten, size_of, unflatten

if TYPE_CHECKING:
    from scipy.sparse.linalg import LinearOperator

    from sharpscope.probes.surface import ClosureSurface


class Operator:
    """A symmetric linear map (P,) → (P,) that counts its products.

    Attributes:
        size: P.
        dtype: dtype of the vectors.
        device: device of the vectors.
        products: number of matrix-vector products so far.
    """

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.size, self.dtype, self.device = size, dtype, device
        self.products = 0

    def __matmul__(self, vector: Tensor) -> Tensor:
        self.products += 1
        return self.product(vector)

    def product(self, vector: Tensor) -> Tensor:
        """H v for v (P,)."""
        raise NotImplementedError

    def as_scipy(self) -> LinearOperator:
        """The operator as a SciPy `LinearOperator` on the CPU."""
        import numpy as np
        from scipy.sparse.linalg import LinearOperator

        dtype = np.float64 if self.dtype == torch.float64 else np.float32

        def matvec(vector: Any) -> Any:
            given = torch.from_numpy(np.ascontiguousarray(vector, dtype=dtype).reshape(-1))
            return (self @ given.to(self.device)).cpu().numpy()

        return LinearOperator((self.size, self.size), matvec=matvec, rmatvec=matvec, dtype=dtype)


class FunctionOperator(Operator):
    """An operator from a function (P,) → (P,)."""

    def __init__(
        self, function: Callable[[Tensor], Tensor], size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(size, dtype, device)
        self._function = function

    def product(self, vector: Tensor) -> Tensor:
        """H v for v (P,)."""
        return self._function(vector)


class GraphHessian(Operator):
    """Hessian of a sum of scalar losses, by reverse mode over a stored graph of the gradient.

    A product costs 6 units, where forward-over-reverse costs 9 (1 unit = the forward pass of a linear layer), but the graph
    stays in memory as long as the operator.
    """

    def __init__(self, losses: Sequence[Tensor], parameters: Sequence[Tensor]) -> None:
        super().__init__(size_of(parameters), common_dtype(parameters), parameters[0].device)
        self._parameters = tuple(parameters)
        self._graphs: list[tuple[list[Tensor], list[int]]] = []
        for loss in losses:
            gradients = torch.autograd.grad(loss, self._parameters, create_graph=True, allow_unused=True)
            # A gradient without a graph is constant: the parameter is unused or enters linearly.
            active = [i for i, g in enumerate(gradients) if g is not None and g.requires_grad]
            self._graphs.append(([gradients[i] for i in active], active))

    def product(self, vector: Tensor) -> Tensor:
        """H v for v (P,); 0 for parameters that are unused or enter linearly."""
        parts = unflatten(vector, self._parameters)
        total: Tensor | None = None
        for gradients, active in self._graphs:
            if not active:
                continue
            second = torch.autograd.grad(
                gradients, self._parameters, [parts[i] for i in active], retain_graph=True, allow_unused=True
            )
            flat = flatten(second, self._parameters)
            total = flat if total is None else total.add_(flat)
        return torch.zeros(self.size, dtype=self.dtype, device=self.device) if total is None else total


class ClosureHessian(GraphHessian):
    """Hessian of the loss of a closure at the current parameters."""

    def __init__(self, surface: ClosureSurface) -> None:
        loss = surface.loss()
        super().__init__([loss] if loss.requires_grad else [], surface.parameters)


class Scaled(Operator):
    """S H S for a diagonal S (P,): the Hessian in the coordinates S⁻¹θ, such as S = D^(−1/2) for AdamW's D."""

    def __init__(self, operator: Operator, scale: Tensor) -> None:
        super().__init__(operator.size, operator.dtype, operator.device)
        self._operator, self._scale = operator, scale.to(device=operator.device, dtype=operator.dtype)

    def unscaled(self, gradient: Tensor) -> Tensor:
        """S g: the gradient g (P,) in the new coordinates."""
        return gradient * self._scale

    def product(self, vector: Tensor) -> Tensor:
        """S H S v for v (P,)."""
        return (self._operator @ (vector * self._scale)).mul_(self._scale)
