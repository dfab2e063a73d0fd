"""Extreme eigenpairs of a symmetric operator by Lanczos with full reorthogonalization and thick restarts.

SciPy's `eigsh` (ARPACK) tests convergence only when its basis is full, so it needs at least `ncv` products for any tolerance;
here each product is a test.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sharpscope.policy.directions import length
from sharpscope.surface.operators import Operator

STEADY = 3
"""Number of consecutive products at which the Ritz pairs must meet the tolerance."""
COLUMNS = 2**20
"""Columns of a basis that a restart replaces at once."""


def inner(rows: Tensor, vector: Tensor) -> Tensor:
    """Inner products (k,) of rows (k, P) with a vector (P,) in float64, accumulated from blocks of columns."""
    blocks = zip(rows.split(2**16, dim=1), vector.split(2**16), strict=True)
    return torch.stack([(a @ b).double() for a, b in blocks]).sum(0)


@dataclass(frozen=True)
class Eigenpairs:
    """Eigenpairs at both ends of the spectrum."""

    values: np.ndarray  # (k,) float64 signed eigenvalues in descending order
    vectors: Tensor  # (k, P) unit eigenvectors in the same order
    upper: int  # number of eigenpairs at the upper end; the others are at the lower end
    why: str  # reason why they have not converged; empty if they have
    krylov: Krylov | None  # the subspace, for deflation; None if a restart has shortened it


class Krylov:
    """A Krylov subspace: an orthonormal basis V (j, P), the projection T = V H Vᵀ (j, j) and the next direction.

    H Vᵀ = Vᵀ T + β v₊ e_jᵀ up to rounding, also after `compress` (thick restart, Wu & Simon 2000), so a Ritz pair (θ, Vᵀs) has
    the residual β·|s_j|.
    """

    def __init__(self, operator: Operator, capacity: int, generator: torch.Generator) -> None:
        self.operator = operator
        self._generator = generator
        self.capacity = min(capacity, operator.size)
        # One more row than the capacity, for the next direction.
        self._basis = torch.zeros(
            self.capacity + 1,
            operator.size,
            dtype=operator.dtype,
            device=operator.device,
        )
        self.projection = np.zeros((self.capacity, self.capacity))
        self.size = 0
        self.beta = 0.0  # norm of the residual of the last product; 0 if the subspace is invariant
        self._scale = 0.0
        self.start()

    @property
    def basis(self) -> Tensor:
        """(j, P) orthonormal rows."""
        return self._basis[: self.size]

    def start(self) -> None:
        """Set the next direction to a random vector, orthogonalized against the basis."""
        operator = self.operator
        for _ in range(3):
            # drawn on the CPU, so that it does not depend on the device
            raw = torch.randn(operator.size, generator=self._generator, dtype=operator.dtype)
            raw = raw.to(operator.device)
            raw, _ = self._orthogonal(raw / length(raw))
            left = length(raw)
            if left > 1e-3:
                break
        self._basis[self.size] = raw / left

    def extend(self) -> None:
        """Add the next direction to the basis, with one product; `FloatingPointError` if that is not finite."""
        vector = self._basis[self.size]
        image = self.operator @ vector
        norm = length(image)
        if not np.isfinite(norm):
            raise FloatingPointError(f"Hessian product {self.operator.products} is not finite")
        self.size += 1
        rest, coefficients = self._orthogonal(image)
        j = self.size - 1
        self.projection[: j + 1, j] = self.projection[j, : j + 1] = coefficients
        self._scale = max(self._scale, norm)
        beta = length(rest)
        # If only rounding is left, the subspace is invariant.
        eps = torch.finfo(self.operator.dtype).eps
        invariant = beta <= 8 * eps * self._scale
        if not invariant:
            rest /= beta
            if beta <= eps**0.5 * self._scale:
                # Much of the rest may be rounding of the projection, within the span of the basis.
                rest, _ = self._orthogonal(rest)
                left = length(rest)
                invariant = left < 0.5
                rest /= left
        self.beta = 0.0 if invariant else beta
        if self.size == self.operator.size:
            self.beta = 0.0
        elif invariant:
            self.start()
        else:
            self._basis[self.size] = rest

    def ritz(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Ritz values (j,) in ascending order, coefficients (j, j) in columns, and residuals (j,)."""
        values, coefficients = np.linalg.eigh(self.projection[: self.size, : self.size])
        return values, coefficients, self.beta * np.abs(coefficients[-1])

    def vectors(self, coefficients: np.ndarray) -> Tensor:
        """Vectors (k, P) with coefficients (j, k) in the basis."""
        return self._weights(coefficients) @ self.basis

    def _weights(self, coefficients: np.ndarray) -> Tensor:
        """Coefficients (j, k) as rows (k, j) beside the basis."""
        return torch.from_numpy(np.ascontiguousarray(coefficients.T)).to(self._basis)

    def compress(self, keep: np.ndarray, values: np.ndarray, coefficients: np.ndarray) -> None:
        """Thick restart: keep the Ritz vectors `keep` and the next direction; in place, since a vector of a real model is large."""
        weights = self._weights(coefficients[:, keep])
        count = len(keep)
        for columns in self._basis.split(COLUMNS, dim=1):
            columns[:count] = weights @ columns[: self.size]
        self._basis[count] = self._basis[self.size]
        self.projection[:] = 0.0
        self.projection[range(count), range(count)] = values[keep]
        self.size = count

    def _orthogonal(self, vector: Tensor) -> tuple[Tensor, np.ndarray]:
        """`vector` orthogonalized twice against the basis, and its coefficients in the basis."""
        if self.size == 0:
            return vector, np.zeros(0)
        first = inner(self.basis, vector)
        vector = torch.addmv(vector, self.basis.T, first.to(vector), alpha=-1)
        second = inner(self.basis, vector)
        vector = vector.addmv_(self.basis.T, second.to(vector), alpha=-1)
        return vector, (first + second).cpu().numpy()


def eigenpairs(
    operator: Operator,
    upper: int,
    lower: int,
    *,
    tolerance: float,
    max_products: int,
    capacity: int,
    generator: torch.Generator,
) -> Eigenpairs:
    """The `upper` largest and `lower` smallest (signed) eigenvalues of a symmetric operator, by Lanczos from a random start.

    An eigenvalue that occurs several times is found once, unless the subspace becomes invariant. `tolerance` bounds the residuals
    ‖Hv − λv‖ relative to the largest |λ|; the error of an eigenvalue is at most the residual, and about residual²/gap. Values must
    also change by less over STEADY products. Beyond `capacity` vectors (P,), at least 2·(upper + lower) + 3, Lanczos restarts.
    """
    wanted = min(upper + lower, operator.size)
    upper = min(upper, wanted)
    lower = wanted - upper
    space = Krylov(operator, min(capacity, max(max_products, wanted)), generator)
    spent = 0
    restarted = False
    met = 0
    last = np.full(wanted, np.inf)
    scale = float(np.finfo(np.float64).tiny)
    while True:
        space.extend()
        spent += 1
        if space.size < wanted:
            continue
        values, coefficients, residuals = space.ritz()
        ends = np.r_[np.arange(len(values) - upper, len(values)), np.arange(lower)]
        scale = max(float(np.abs(values).max()), scale)
        # A small residual does not imply the extreme eigenvalue, so the values must also be stable while the subspace grows.
        moved = np.abs(values[ends] - last)
        last = values[ends]
        still = bool((moved <= tolerance * scale).all())
        small = bool((residuals[ends] <= tolerance * scale).all())
        met = met + 1 if still and small else 0
        done = met >= STEADY or (small and space.size == operator.size)
        if done or spent >= max_products or space.size == operator.size:
            break
        if space.size == space.capacity:
            # Keep about half, from both ends in proportion to the numbers requested.
            keep = min(space.capacity // 2 + wanted // 2, space.capacity - 2)
            high = max(upper, min(keep - lower, round(keep * upper / wanted)))
            kept = np.r_[np.arange(keep - high), np.arange(len(values) - high, len(values))]
            space.compress(kept, values, coefficients)
            restarted = True
    order = np.r_[ends[:upper][::-1], ends[upper:][::-1]]
    why = ""
    if not done:
        state = "the values still move, and " if small else ""
        residual = residuals[ends].max() / scale
        why = f"after {spent} products {state}the residual is {residual:.1e} of the largest |eigenvalue|"
    vectors = space.vectors(coefficients[:, order])
    return Eigenpairs(values[order], vectors, upper, why, None if restarted else space)
