"""Spectral density of a symmetric operator by stochastic Lanczos quadrature (Ghorbani et al., arXiv 1901.10159)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from sharpscope.surface.algorithms.lanczos import Krylov
from sharpscope.surface.operators import Operator

ITERATIONS = 40
"""Products of a run of Lanczos."""


@dataclass(frozen=True, kw_only=True)
class Density:
    """The density of the eigenvalues, smoothed by a Gaussian, whose integral is 1."""

    nodes: np.ndarray  # (n,) eigenvalues at which the density is given, ascending
    values: np.ndarray  # (n,) density, the mean over probes [1 / eigenvalue]
    std_error: np.ndarray  # (n,) of the mean, over probes; NaN for one probe
    width: float  # standard deviation of the Gaussian [eigenvalue]
    probes: int
    ritz: np.ndarray  # (probes, m) quadrature nodes, padded with NaN
    weights: np.ndarray  # (probes, m) their weights, which sum to 1 over a row


def spectral_density(
    operator: Operator,
    *,
    probes: int = 8,
    iterations: int = ITERATIONS,
    width: float | None = None,
    points: int = 201,
    generator: torch.Generator,
) -> Density:
    """The density from `probes` runs of Lanczos of `iterations` products each, from random starts.

    A run with Ritz values θ_j and the first components s_j of their vectors gives Σ_j s_j²·N(λ; θ_j, width²). `width` is 1 % of
    the range of the Ritz values by default.
    """
    size = min(iterations, operator.size)
    ritz, weights = np.full((probes, size), math.nan), np.zeros((probes, size))
    for probe in range(probes):
        space = Krylov(operator, size, generator)
        for _ in range(size):
            space.extend()
        values, coefficients, _ = space.ritz()
        ritz[probe], weights[probe] = values, coefficients[0] ** 2
    low, high = float(np.nanmin(ritz)), float(np.nanmax(ritz))
    width = width or 0.01 * (high - low) or 1e-3 * max(abs(high), 1e-30)
    nodes = np.linspace(low - 4 * width, high + 4 * width, points)
    bumps = np.exp(-(((nodes - ritz[..., None]) / width) ** 2) / 2) / (
        width * math.sqrt(2 * math.pi)
    )
    each = (weights[..., None] * bumps).sum(1)  # (probes, n)
    error = each.std(0, ddof=1) / math.sqrt(probes) if probes > 1 else np.full(points, math.nan)
    return Density(
        nodes=nodes,
        values=each.mean(0),
        std_error=error,
        width=width,
        probes=probes,
        ritz=ritz,
        weights=weights,
    )
