"""Gauss–Newton and Fisher matrices, Jᵀ A J with the Jacobian J of a model's outputs and a matrix A of the outputs.

| operator | outputs | A |
|---|---|---|
| Gauss–Newton | logits z | ∇²_z L(z) |
| Fisher | logits z of a token | w·(diag p − p pᵀ)/T², the covariance of ∇_z ln π(y) over y ~ p = softmax(z/T) |
| empirical Fisher | the terms ℓ_i of the loss L = Σ w_i·ℓ_i | diag w, so that the matrix is Σ w_i ∇ℓ_i ∇ℓ_iᵀ |

For `nll` the first two are equal (Martens, arXiv 1412.1193); the third is not an estimate of them (Kunstner et al., arXiv 1905.12558).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sharpscope.surface.operators.base import flatten, unflatten


class Jacobian:
    """The Jacobian J (M, P) of outputs of any shape with M numbers, by reverse passes through the outputs' kept graph.

    J v is the derivative of Jᵀu by u, so no operation needs a forward derivative.
    """

    def __init__(self, outputs: Tensor, parameters: Sequence[Tensor]) -> None:
        self.outputs, self.parameters = outputs, parameters
        self._cotangent = torch.zeros_like(outputs, requires_grad=True)
        pulled = torch.autograd.grad(
            outputs,
            parameters,
            self._cotangent,
            create_graph=True,
            allow_unused=True,
        )
        self._active = [i for i, part in enumerate(pulled) if part is not None]
        self._pulled = [part for part in pulled if part is not None]

    def product(self, vector: Tensor) -> Tensor:
        """J v of a vector (P,), shaped like the outputs."""
        parts = unflatten(vector, self.parameters)
        chosen = [parts[i] for i in self._active]
        (pushed,) = torch.autograd.grad(self._pulled, self._cotangent, chosen, retain_graph=True)
        return pushed

    def transposed(self, cotangent: Tensor) -> Tensor:
        """Jᵀ u (P,) of u shaped like the outputs."""
        parts = torch.autograd.grad(
            self.outputs,
            self.parameters,
            cotangent,
            retain_graph=True,
            allow_unused=True,
        )
        return flatten(parts, self.parameters)


def sandwich(
    outputs: Tensor,
    parameters: Sequence[Tensor],
    inside: Callable[[Tensor], Tensor],
) -> Callable[[Tensor], Tensor]:
    """Products v ↦ Jᵀ A J v (P,), where `inside` computes A u of u shaped like the outputs."""
    jacobian = Jacobian(outputs, parameters)
    return lambda vector: jacobian.transposed(inside(jacobian.product(vector)))


def gauss_newton_product(
    outputs: Tensor,
    loss_of: Callable[[Tensor], Tensor],
    parameters: Sequence[Tensor],
) -> Callable[[Tensor], Tensor]:
    """Products with Jᵀ ∇²_z L J, the loss being `loss_of` the outputs z, a scalar."""
    z = outputs.detach().requires_grad_()
    (slope,) = torch.autograd.grad(loss_of(z), z, create_graph=True)

    def inside(u: Tensor) -> Tensor:
        """∇²_z L·u."""
        if not slope.requires_grad:  # the loss is linear in its outputs
            return torch.zeros_like(u)
        return torch.autograd.grad(slope, z, u, retain_graph=True)[0]

    return sandwich(outputs, parameters, inside)


def fisher_product(
    logits: Tensor,
    weight: float,
    temperature: float,
    parameters: Sequence[Tensor],
) -> Callable[[Tensor], Tensor]:
    """Products with weight · Σ_t E_{y ~ π_t}[∇ln π_t(y) ∇ln π_t(y)ᵀ] of tokens with logits z (M, V), exact over the vocabulary."""
    p = torch.softmax(logits.detach() / temperature, -1)

    def inside(u: Tensor) -> Tensor:
        """Weight · (diag p − p pᵀ)·u / T² for each token."""
        mean = (p * u).sum(-1, keepdim=True)
        return p * (u - mean) * (weight / temperature**2)

    return sandwich(logits, parameters, inside)


def empirical_fisher_product(
    terms: Tensor,
    weight: float,
    parameters: Sequence[Tensor],
) -> Callable[[Tensor], Tensor]:
    """Products with weight · Σ_i ∇ℓ_i ∇ℓ_iᵀ of the terms ℓ (M,) of a loss."""
    return sandwich(terms, parameters, lambda u: u * weight)
