"""Trace and spectral density of a symmetric operator, with standard errors.

The trace uses Hutch++ (arXiv 2010.09649) with a Krylov subspace in place of the random sketch; the density uses stochastic
Lanczos quadrature (Golub & Welsch; Ghorbani et al., arXiv 1901.10159).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from sharpscope.probes.lanczos import Krylov, NotFiniteError, Operator, gaussian, orthonormal


@dataclass(frozen=True)
class Trace:
    """Estimate of tr H and its standard error over the random probes, 0 if the subspace is the whole space."""

    value: float
    std_error: float


def t_interval(value: float, std_error: float, samples: int, level: float = 0.95) -> tuple[float, float]:
    """Student's t confidence interval of the mean of `samples` independent draws.

    At 95 % it is ± 12.7 standard errors for 2 draws and ± 3.2 for 4; ± 1.96 would cover 70 and 85 %.
    """
    from scipy.stats import t

    half = 0.0 if std_error == 0 else float(t.ppf(0.5 + level / 2, samples - 1)) * std_error
    return value - half, value + half


def hutchpp(
    operator: Operator,
    *,
    probes: int = 16,
    sketch: int = 16,
    generator: torch.Generator,
    subspace: Krylov | None = None,
) -> Trace:
    """Unbiased trace: exact on a Krylov subspace Q, Hutchinson with Rademacher probes on its complement.

    tr H = tr(Q H Qᵀ) + E gᵀ(I − QᵀQ) H (I − QᵀQ) g. A Krylov subspace of j products captures outlying eigenvectors better than
    H times a random matrix, and its projection needs no further product (arXiv 2205.01736). Q does not depend on the probes, so
    their spread gives the standard error of the whole estimate.

    Args:
        operator: symmetric operator on (P,).
        probes: number of random probes, at least 2; one product each.
        sketch: dimension of the Krylov subspace, one product each; 0 for plain Hutchinson.
        generator: generator of all random vectors.
        subspace: existing subspace (of `eigenpairs`) to use instead of a new one.

    Raises:
        ValueError: fewer than 2 probes.
        NotFiniteError: a product is NaN or infinite.
    """
    if probes < 2:
        raise ValueError(f"probes, {probes}: at least 2, or there is no standard error")
    if subspace is None and sketch > 0:
        subspace = Krylov(operator, sketch, generator)
        subspace.start()
        for _ in range(subspace.capacity):
            subspace.extend()
    exact = 0.0 if subspace is None else float(np.trace(subspace.projection[: subspace.size, : subspace.size]))
    if subspace is not None and subspace.size == operator.size:
        return Trace(exact, 0.0)
    samples = []
    for _ in range(probes):
        signs = torch.randint(0, 2, (operator.size,), generator=generator, dtype=torch.int8)
        probe = (2 * signs - 1).to(device=operator.device, dtype=operator.dtype)
        if subspace is not None:
            for _ in range(2):
                probe = torch.addmv(probe, subspace.basis.T, subspace.basis @ probe, alpha=-1)
        sample = float(torch.dot(probe, operator @ probe))
        if not math.isfinite(sample):
            raise NotFiniteError(f"Hessian product {operator.products} is not finite")
        samples.append(sample)
    return Trace(exact + float(np.mean(samples)), float(np.std(samples, ddof=1)) / math.sqrt(probes))


@dataclass(frozen=True)
class Density:
    """The spectral density Σ_i δ(λ − λ_i)/P as weighted nodes.

    Attributes:
        nodes: (samples, m) Ritz values of each random start, with m the largest number of steps.
        weights: (samples, m) weights of the nodes; each row sums to 1.
    """

    nodes: np.ndarray
    weights: np.ndarray


def spectral_density(
    operator: Operator,
    *,
    samples: int = 8,
    steps: int = 30,
    generator: torch.Generator,
    first: Krylov | None = None,
) -> Density:
    """Spectral density by Lanczos quadrature from random starts.

    The starts are orthonormalized Gaussian vectors: each is uniform on the sphere, so each gives an unbiased estimate, and
    orthogonality reduces the variance of their mean. A run that reaches an invariant subspace is exact and stops.

    Args:
        operator: symmetric operator on (P,).
        samples: number of random starts.
        steps: Lanczos steps of each start.
        generator: generator of the starts.
        first: existing subspace with a random start (of `eigenpairs`), used as the first sample and extended to `steps`.

    Raises:
        NotFiniteError: a product is NaN or infinite.
    """
    samples, steps = min(samples, operator.size), min(steps, operator.size)
    given = first is not None and first.capacity >= steps
    starts = [gaussian(operator, generator) for _ in range(samples - int(given))]
    if first is not None and given:
        starts.insert(0, first.basis[0])
    # Gram-Schmidt keeps the first direction.
    directions = orthonormal(torch.stack(starts))  # (samples, P)
    densities = []
    for index, start in enumerate(directions):
        if index == 0 and given and first is not None:
            space = first
        else:
            space = Krylov(operator, steps, generator)
            space.start(start)
        while space.size < steps and (space.size == 0 or space.beta > 0):
            space.extend()
        values, coefficients, _ = space.ritz()
        densities.append((values, coefficients[0] ** 2))
    width = max(len(values) for values, _ in densities)
    return Density(
        np.stack([np.pad(values, (0, width - len(values)), mode="edge") for values, _ in densities]),
        np.stack([np.pad(weights, (0, width - len(weights))) for _, weights in densities]),
    )
