"""Lanczos with full reorthogonalisation: extreme eigenpairs with residuals, and a basis for traces and densities.

SciPy's `eigsh` (ARPACK) looks at its Ritz values only when its whole basis is full, so it costs at least `ncv` products
however loose the tolerance; this one looks after every product and stops at the first where the residual is met. The
tests hold it against `eigsh` on the same operator (`Operator.as_scipy`) and against dense eigenvalues.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sharpscope.probes.hessian.operators import Operator

STEADY = 3
"""Products in a row at which the wanted Ritz pairs must meet the tolerance."""


class NotFiniteError(ArithmeticError):
    """A product held NaN or infinity; the message says after how many products."""


@dataclass(frozen=True)
class Eigenpairs:
    """Extreme eigenpairs.

    Attributes:
        values: (k,) float64, signed, largest first: the wanted ones at the upper and at the lower end.
        vectors: (k, P) unit vectors, same order.
        residuals: (k,) ‖Hv − λv‖₂.
        upper: how many of the k belong to the upper end (the others to the lower end).
        products: matrix-vector products spent.
        converged: over STEADY products (or over the whole space) every residual was ≤ tolerance · the largest |λ| found, and the
            values stood still. That makes them eigenvalues, not the extreme ones: see `start` of `eigenpairs`.
        why: the reason if not.
        krylov: the subspace that was built, for deflation; None after a restart has shortened it.
    """

    values: np.ndarray
    vectors: Tensor
    residuals: np.ndarray
    upper: int
    products: int
    converged: bool
    why: str
    krylov: Krylov | None


class Krylov:
    """An orthonormal basis V (j, P), the projection T = V H Vᵀ (j, j), and the residual direction that comes next.

    At any time H Vᵀ = Vᵀ T + β v₊ e_jᵀ to rounding, also after `compress` (thick restart, Wu & Simon 2000), so a Ritz
    pair (θ, Vᵀs) has residual β·|s_j|.
    """

    def __init__(self, operator: Operator, capacity: int, generator: torch.Generator) -> None:
        self.operator, self._generator = operator, generator
        self.capacity = min(capacity, operator.size)
        # One row more than the capacity: the direction that comes next.
        self._basis = torch.zeros(self.capacity + 1, operator.size, dtype=operator.dtype, device=operator.device)
        self.projection = np.zeros((self.capacity, self.capacity))
        self.size = 0
        self.beta = 0.0  # norm of the residual of the last product; 0: the subspace is invariant
        self._scale = 0.0

    @property
    def basis(self) -> Tensor:
        """(j, P) orthonormal rows."""
        return self._basis[: self.size]

    def start(self, vector: Tensor | None = None) -> None:
        """Set the next direction to `vector` (P,) or to a random one, orthogonal to the basis."""
        for _ in range(3):
            raw = gaussian(self.operator, self._generator) if vector is None else vector.clone()
            norm = raw.norm()
            raw, _ = self._orthogonal(raw / norm)
            left = float(raw.norm())
            if left > 1e-3 or vector is not None:
                break
        self._basis[self.size] = raw / left

    def extend(self) -> None:
        """Take the next direction into the basis; one product.

        Raises:
            NotFiniteError: the product is not finite.
        """
        vector = self._basis[self.size]
        image = self.operator @ vector
        norm = float(image.norm())
        if not np.isfinite(norm):
            raise NotFiniteError(f"Hessian product {self.operator.products} is not finite")
        self.size += 1
        rest, coefficients = self._orthogonal(image)
        j = self.size - 1
        self.projection[: j + 1, j] = self.projection[j, : j + 1] = coefficients
        self._scale = max(self._scale, norm)
        beta = float(rest.norm())
        # What is left below rounding is no direction: the subspace is invariant.
        invariant = beta <= 8 * torch.finfo(self.operator.dtype).eps * self._scale
        self.beta = 0.0 if invariant else beta
        if self.size == self.operator.size:
            self.beta = 0.0
        elif invariant:
            self.start()
        else:
            self._basis[self.size] = rest / beta

    def ritz(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Ritz values (j,) ascending, their coefficients (j, j) in columns, their residuals (j,)."""
        values, coefficients = np.linalg.eigh(self.projection[: self.size, : self.size])
        return values, coefficients, self.beta * np.abs(coefficients[-1])

    def vectors(self, coefficients: np.ndarray) -> Tensor:
        """(k, P) vectors for coefficients (j, k)."""
        weights = torch.from_numpy(np.ascontiguousarray(coefficients.T)).to(self._basis)
        return weights @ self.basis

    def compress(self, keep: np.ndarray, values: np.ndarray, coefficients: np.ndarray) -> None:
        """Thick restart: keep the Ritz vectors `keep`, and the direction that comes next."""
        following = self._basis[self.size].clone()
        kept = self.vectors(coefficients[:, keep])
        self._basis[: len(keep)] = kept
        self._basis[len(keep)] = following
        self.projection[:] = 0.0
        self.projection[range(len(keep)), range(len(keep))] = values[keep]
        self.size = len(keep)

    def _orthogonal(self, vector: Tensor) -> tuple[Tensor, np.ndarray]:
        """`vector` less its part in the basis (projected out twice, which is enough), and that part's coefficients."""
        if self.size == 0:
            return vector, np.zeros(0)
        first = self.basis @ vector
        vector = torch.addmv(vector, self.basis.T, first, alpha=-1)
        second = self.basis @ vector
        vector = vector.addmv_(self.basis.T, second, alpha=-1)
        return vector, (first.double() + second.double()).cpu().numpy()


def gaussian(operator: Operator, generator: torch.Generator) -> Tensor:
    """(P,) standard normal, drawn on the CPU so that it is the same on every device."""
    return torch.randn(operator.size, generator=generator, dtype=operator.dtype).to(operator.device)


def noisy(start: Tensor | None, operator: Operator, generator: torch.Generator) -> Tensor | None:
    """`start` of unit length plus a random vector of length 0.05; None where there is no direction."""
    norm = 0.0 if start is None else float(start.norm())
    if start is None or not np.isfinite(norm) or norm == 0:
        return None
    noise = gaussian(operator, generator)
    return (start / norm).to(noise).add_(noise, alpha=0.05 / float(noise.norm()))


def eigenpairs(
    operator: Operator,
    *,
    upper: int = 1,
    lower: int = 1,
    tolerance: float = 1e-3,
    max_products: int = 200,
    capacity: int = 100,
    start: Tensor | None = None,
    generator: torch.Generator,
) -> Eigenpairs:
    """The `upper` largest and `lower` smallest (signed) eigenvalues of a symmetric operator.

    Args:
        operator: symmetric, size P.
        upper: eigenpairs wanted at the upper end.
        lower: eigenpairs wanted at the lower end.
        tolerance: bound of each residual ‖Hv − λv‖ relative to the largest |λ| found. The eigenvalue's own error is at
            most the residual, and about residual²/gap. The values must also stay within it over STEADY products.
        max_products: products to spend; after that the result says `converged = False`.
        capacity: vectors held in memory (P each); above that, thick restarts.
        start: (P,) direction to start from, to which a little noise is added, so that no eigenvector is left out for good. It
            may still show too late: a start that leans towards some eigenvectors can settle on theirs, converged, before the
            extreme one rises out of the noise. A random start leans towards none; None starts so.
        generator: of the starting vector.

    Raises:
        NotFiniteError: a product is NaN or infinite.
    """
    wanted = min(upper + lower, operator.size)
    upper = min(upper, wanted)
    lower = wanted - upper
    capacity = min(operator.size, max(capacity, 2 * wanted + 6), max(max_products, wanted))
    space = Krylov(operator, capacity, generator)
    space.start(noisy(start, operator, generator))
    spent, restarted, met, last = 0, False, 0, np.full(wanted, np.inf)
    while True:
        space.extend()
        spent += 1
        if space.size < wanted:
            continue
        values, coefficients, residuals = space.ritz()
        ends = np.r_[np.arange(len(values) - upper, len(values)), np.arange(lower)]
        scale = max(float(np.abs(values).max()), np.finfo(np.float64).tiny)
        # A small residual makes an eigenvalue, not the extreme one: a start may lie near another eigenvector. So the values
        # must also stand still while further directions come in.
        still = bool((np.abs(values[ends] - last) <= tolerance * scale).all())
        small = bool((residuals[ends] <= tolerance * scale).all())
        met = met + 1 if still and small else 0
        last = values[ends]
        done = met >= STEADY or (small and space.size == operator.size)
        if done or spent >= max_products or space.size == operator.size:
            break
        if space.size == space.capacity:
            # Keep about half, from both ends in proportion to what is wanted there.
            keep = min(space.capacity // 2 + wanted // 2, space.capacity - 2)
            high = max(upper, min(keep - lower, round(keep * upper / wanted)))
            space.compress(
                np.r_[np.arange(keep - high), np.arange(len(values) - high, len(values))], values, coefficients
            )
            restarted = True
    order = np.r_[ends[:upper][::-1], ends[upper:][::-1]]
    why = ""
    if not done:
        state = "the values still move, and " if small else ""
        why = f"after {spent} products {state}the residual is {residuals[ends].max() / scale:.1e} of the largest |eigenvalue|"
    return Eigenpairs(
        values[order],
        space.vectors(coefficients[:, order]),
        residuals[order],
        upper,
        spent,
        done,
        why,
        None if restarted else space,
    )
