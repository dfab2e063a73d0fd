"""Trace of a symmetric operator by Hutch++."""

from __future__ import annotations

import math

import numpy as np
import torch

from sharpscope.surface.algorithms.lanczos import Krylov, inner
from sharpscope.surface.operators import Operator


def hutchpp(
    operator: Operator,
    subspace: Krylov,
    probes: int,
    generator: torch.Generator,
) -> tuple[float, float]:
    """Unbiased trace by Hutch++ and its standard error over at least 2 probes, of one product each.

    tr H = tr(Q H Qᵀ) + E gᵀ(I − QᵀQ) H (I − QᵀQ) g with Rademacher probes g. A Krylov subspace Q captures outlying eigenvectors
    better than H times a random matrix, and its projection needs no further product (arXiv 2205.01736).
    """
    exact = float(np.trace(subspace.projection[: subspace.size, : subspace.size]))
    if subspace.size == operator.size:
        return exact, 0.0
    samples = []
    for _ in range(probes):
        signs = torch.randint(0, 2, (operator.size,), generator=generator, dtype=torch.int8)
        probe = (2 * signs - 1).to(device=operator.device, dtype=operator.dtype)
        for _ in range(2):
            probe = torch.addmv(
                probe,
                subspace.basis.T,
                inner(subspace.basis, probe).to(probe),
                alpha=-1,
            )
        sample = float(inner((operator @ probe)[None], probe))
        if not math.isfinite(sample):
            raise FloatingPointError(f"Hessian product {operator.products} is not finite")
        samples.append(sample)
    return exact + float(np.mean(samples)), float(np.std(samples, ddof=1)) / math.sqrt(probes)
