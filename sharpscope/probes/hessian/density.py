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
        nodes: (samples, m) Ritz values of each random start, m the most steps of any.
        weights: (samples, m), each row sums to 1.
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


def spectral_density(
    operator: Operator,
    *,
    samples: int = 8,
    steps: int = 30,
    generator: torch.Generator,
    first: Krylov | None = None,
) -> Density:
    """Quadrature of the spectral measure from `samples` random starts with `steps` Lanczos steps each.

    The starts are orthonormal (Gaussian, then Gram-Schmidt): each alone is uniform on the sphere, so every one gives an
    unbiased measure, and together they vary less; P of them give the moments exactly. A run that meets an invariant
    subspace is exact there and stops.

    Args:
        operator: symmetric, size P.
        samples, steps: random starts, and Lanczos steps of each.
        generator: of the starts.
        first: a subspace at hand that was started at random (from `eigenpairs`): the first sample, made longer if it is
            shorter than `steps`.

    Raises:
        NotFiniteError: a product is NaN or infinite.
    """
    before, samples, steps = operator.products, min(samples, operator.size), min(steps, operator.size)
    given = first is not None and first.capacity >= steps
    starts = [gaussian(operator, generator) for _ in range(samples - int(given))]
    if first is not None and given:
        starts.insert(0, first.basis[0])
    # QR keeps the first direction up to its sign.
    directions = torch.linalg.qr(torch.stack(starts).T).Q.T.contiguous()  # (samples, P)
    found = []
    for index, start in enumerate(directions):
        if index == 0 and given and first is not None:
            space = first
        else:
            space = Krylov(operator, steps, generator)
            space.start(start)
        while space.size < steps and (space.size == 0 or space.beta > 0):
            space.extend()
        values, coefficients, _ = space.ritz()
        found.append((values, coefficients[0] ** 2))
    width = max(len(values) for values, _ in found)
    return Density(
        np.stack([np.pad(values, (0, width - len(values)), mode="edge") for values, _ in found]),
        np.stack([np.pad(weights, (0, width - len(weights))) for _, weights in found]),
        operator.products - before,
    )
