"""PyHessian's eigenvalues and trace, as a second opinion on ours.

PyHessian 0.1 orders eigenvalues by magnitude, reports no errors, and raises on parameters without a second derivative, which are
left out here (their part of an eigenvector is 0).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from sharpscope.probes.lanczos import Operator
from sharpscope.probes.surface import Surface, flatten, length

if TYPE_CHECKING:
    from sharpscope.probes.hessian import Curvature


class _Model:
    """The part of a model's interface that `pyhessian.hessian` uses, around a surface."""

    def __init__(self, surface: Surface, parameters: Sequence[Tensor]) -> None:
        self._surface, self.parameters = surface, lambda: parameters

    def eval(self) -> _Model:
        """PyHessian's call of `model.eval()`; the surface is in eval mode."""
        return self

    def zero_grad(self) -> None:
        """Remove the gradients of the parameters."""
        for parameter in self.parameters():
            parameter.grad = None

    def __call__(self, _: Any) -> Tensor:
        return self._surface.loss()


def curvature_by_pyhessian(
    surface: Surface, hessian: Operator, start: Curvature, top: int, tolerance: float, iterations: int, trace: bool
) -> Curvature:
    """`start` with PyHessian's `top` eigenvalues by magnitude, residuals by our products, and its trace.

    `top` holds the positive eigenvalues among them, `smallest` the most negative one; `products` are those of the residuals.
    """
    library: Any = import_module("pyhessian.hessian")  # `pyhessian.hessian` the attribute is the class of that name
    gradients = torch.autograd.grad(surface.loss(), surface.parameters, create_graph=True, allow_unused=True)
    active = [g for g in gradients if g is not None and g.requires_grad]
    second = torch.autograd.grad(active, surface.parameters, [torch.ones_like(g) for g in active], allow_unused=True)
    curved = [g is not None and g.requires_grad and s is not None for g, s in zip(gradients, second, strict=True)]
    parameters = [p for p, used in zip(surface.parameters, curved, strict=True) if used]
    (model := _Model(surface, parameters)).zero_grad()
    torch.manual_seed(start.seed)
    nothing = {"data": (torch.zeros(0), torch.zeros(0)), "cuda": parameters[0].is_cuda}  # the closure has the data
    problem = library.hessian(model, lambda loss, _: loss, **nothing)
    values, vectors = problem.eigenvalues(maxIter=iterations, tol=tolerance, top_n=top)
    samples = np.array(problem.trace(maxIter=iterations, tol=tolerance)) if trace else np.full(1, np.nan)
    model.zero_grad()
    found: list[tuple[float, float, Tensor]] = []
    for value, parts in zip(values, vectors, strict=True):
        given = iter(parts)
        flat = flatten([next(given) if used else None for used in curved], surface.parameters)
        flat = flat / length(flat)
        found.append((float(value), length((hessian @ flat).sub_(flat, alpha=float(value))), flat))
    upper = sorted((one for one in found if one[0] > 0), key=lambda one: -one[0])
    lower = [(value, residual) for value, residual, _ in found if value < 0]
    worst = max(one[1] for one in found) / max(abs(one[0]) for one in found)
    why = f"PyHessian stopped at a residual of {worst:.1e} of its largest |eigenvalue|" if worst > tolerance else ""
    result = replace(start, trace=float(samples.mean()), converged=not why, why=why, products=hessian.products)
    if len(samples) > 1:
        result = replace(result, trace_std_error=float(samples.std(ddof=1)) / len(samples) ** 0.5)
    if upper:
        tops, residuals = (np.array([one[i] for one in upper]) for i in (0, 1))
        result = replace(result, top=tops, residuals=residuals, vectors=torch.stack([one[2] for one in upper]))
    if lower:
        result = replace(result, smallest=min(lower)[0], smallest_residual=min(lower)[1])
    return replace(result, trace_probes=len(samples) if trace else 0)
