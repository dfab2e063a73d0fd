"""Spectral density by stochastic Lanczos quadrature (Golub & Welsch; Ghorbani et al., arXiv 1901.10159)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from sharpscope.probes.hessian.krylov import Krylov, gaussian
from sharpscope.probes.hessian.operators import Operator


@dataclass(frozen=True)
class Density:
    """The spectrum as a probability measure on eigenvalues: Σ_i δ(λ − λ_i)/P.

    Attributes:
        nodes: (samples, steps) Ritz values of each random start.
        weights: (samples, steps), each row sums to 1.
        products: matrix-vector products spent.
    """

    nodes: np.ndarray
    weights: np.ndarray
    products: int

    def moments(self, count: int = 4) -> tuple[np.ndarray, np.ndarray]:
        """E λ¹ … E λ^count under the measure (count,) and their standard errors over the random starts.

        A quadrature of m steps integrates polynomials up to degree 2m − 1 exactly; the starts are the only error.
        """
        powers = np.arange(1, count + 1)
        each = (self.weights[..., None] * self.nodes[..., None] ** powers).sum(1)  # (samples, count)
        spread = each.std(0, ddof=1) if len(each) > 1 else np.full(count, np.nan)
        return each.mean(0), spread / np.sqrt(len(each))

    def curve(self, grid: np.ndarray | None = None, width: float | None = None) -> tuple[np.ndarray, np.ndarray]:
        """The density smoothed with Gaussians of standard deviation `width`: (grid, density per unit of eigenvalue).

        Defaults: 512 points over the nodes' range and 3 widths on each side; width = 1 % of the range.
        """
        low, high = float(self.nodes.min()), float(self.nodes.max())
        width = width or max(0.01 * (high - low), 1e-12 * max(abs(low), abs(high)), 1e-300)
        grid = np.linspace(low - 3 * width, high + 3 * width, 512) if grid is None else grid
        nodes, weights = self.nodes.ravel(), self.weights.ravel() / len(self.nodes)
        kernel = np.exp(-0.5 * ((grid[:, None] - nodes) / width) ** 2) / (width * np.sqrt(2 * np.pi))
        return grid, kernel @ weights


def spectral_density(operator: Operator, *, samples: int = 8, steps: int = 30, generator: torch.Generator) -> Density:
    """Quadrature of the spectral measure from `samples` random starts with `steps` Lanczos steps each.

    The starts are orthonormal (Gaussian, then Gram-Schmidt): each alone is uniform on the sphere, so every one gives an
    unbiased measure, and together they vary less; P of them give the moments exactly. A run that meets an invariant
    subspace is exact there and stops.

    Raises:
        NotFiniteError: a product is NaN or infinite.
    """
    before, samples = operator.products, min(samples, operator.size)
    starts = torch.stack([gaussian(operator, generator) for _ in range(samples)])
    starts = torch.linalg.qr(starts.T).Q.T.contiguous()  # (samples, P)
    steps = min(steps, operator.size)
    nodes, weights = np.zeros((samples, steps)), np.zeros((samples, steps))
    for index, start in enumerate(starts):
        space = Krylov(operator, steps, generator)
        space.start(start)
        while space.size < steps:
            space.extend()
            if space.beta == 0:
                break
        values, coefficients, _ = space.ritz()
        nodes[index, : len(values)] = values
        weights[index, : len(values)] = coefficients[0] ** 2
        nodes[index, len(values) :] = values[-1]
    return Density(nodes, weights, operator.products - before)
