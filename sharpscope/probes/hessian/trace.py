"""Trace with a standard error: Hutch++ (arXiv 2010.09649) with a Krylov subspace in place of the random sketch."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from sharpscope.probes.hessian.krylov import Krylov, NotFiniteError
from sharpscope.probes.hessian.operators import Operator


@dataclass(frozen=True)
class Trace:
    """tr H.

    Attributes:
        value: the estimate.
        std_error: of `value`, from the spread of the random probes; 0 where the deflated subspace is everything.
        probes: independent random probes behind it; `interval` uses Student's t with probes − 1 degrees of freedom.
        products: matrix-vector products spent, those of a given subspace not counted.
    """

    value: float
    std_error: float
    probes: int
    products: int

    def interval(self, level: float = 0.95) -> tuple[float, float]:
        """Confidence interval at `level`, Student's t."""
        return t_interval(self.value, self.std_error, self.probes, level)


def t_interval(value: float, std_error: float, samples: int, level: float = 0.95) -> tuple[float, float]:
    """Student's t confidence interval of a mean of `samples` independent draws, samples − 1 degrees of freedom.

    With 2 draws it is ± 12.7 standard errors at 95 %, with 4 ± 3.2; ± 1.96 would cover 70 and 85 %.
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
    """Unbiased trace: exact on a subspace Q, Hutchinson with Rademacher probes on its complement.

    tr H = tr(Q H Qᵀ) + E gᵀ(I − QᵀQ) H (I − QᵀQ) g. A Krylov subspace of j products holds the outlying eigenvectors
    better than Hutch++'s H·(random matrix), and its projection T costs nothing more (Krylov-aware estimation, arXiv
    2205.01736); Q never depends on the probes, so their spread is the error of the whole.

    Args:
        operator: symmetric, size P.
        probes: random probes, at least 2; one product each.
        sketch: dimension of the Krylov subspace, one product each; 0: plain Hutchinson.
        generator: of all random vectors.
        subspace: a subspace at hand (from `eigenpairs`), used in place of a new one.

    Raises:
        ValueError: fewer than 2 probes: no standard error could be given.
        NotFiniteError: a product is NaN or infinite.
    """
    if probes < 2:
        raise ValueError(f"probes, {probes}: at least 2, or there is no standard error")
    before = operator.products
    if subspace is None and sketch > 0:
        subspace = Krylov(operator, sketch, generator)
        subspace.start()
        for _ in range(subspace.capacity):
            subspace.extend()
    exact = 0.0 if subspace is None else float(np.trace(subspace.projection[: subspace.size, : subspace.size]))
    if subspace is not None and subspace.size == operator.size:
        return Trace(exact, 0.0, probes, operator.products - before)
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
    std_error = float(np.std(samples, ddof=1)) / math.sqrt(probes)
    return Trace(exact + float(np.mean(samples)), std_error, probes, operator.products - before)
