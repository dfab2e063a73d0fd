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
    pair (θ, Vᵀs) has residual β·|s_j|. With `locked` (q, P), orthonormal eigenvectors, the subspace stays at right angles to
    them: it is one of the operator restricted to their complement.
    """

    def __init__(
        self, operator: Operator, capacity: int, generator: torch.Generator, locked: Tensor | None = None
    ) -> None:
        self.operator, self._generator, self._locked = operator, generator, locked
        self.dimension = operator.size - (0 if locked is None else len(locked))
        self.capacity = min(capacity, self.dimension)
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
        eps = torch.finfo(self.operator.dtype).eps
        invariant = beta <= 8 * eps * self._scale
        if not invariant:
            rest /= beta
            if beta <= eps**0.5 * self._scale:
                # Much of what is left may be rounding of what was projected out, and lie in the basis after all.
                rest, _ = self._orthogonal(rest)
                left = float(rest.norm())
                invariant = left < 0.5
                rest /= left
        self.beta = 0.0 if invariant else beta
        if self.size == self.dimension:
            self.beta = 0.0
        elif invariant:
            self.start()
        else:
            self._basis[self.size] = rest

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
        """`vector` less its part in the basis (projected out twice, which is enough), and that part's coefficients.

        What is locked is projected out too.
        """
        if self._locked is not None:
            for _ in range(2):
                vector = torch.addmv(vector, self._locked.T, self._locked @ vector, alpha=-1)
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

    Lanczos from one start finds one eigenvector of each eigenvalue, whatever its multiplicity. Where several eigenpairs are
    wanted at one end, further runs at right angles to all that were found, from random starts, look for the others until one
    finds nothing beyond the last of those wanted. That costs some 10 to 50 % more products; the extreme pair at each end
    alone (`upper` and `lower` at most 1) needs none.

    Args:
        operator: symmetric, size P.
        upper: eigenpairs wanted at the upper end.
        lower: eigenpairs wanted at the lower end.
        tolerance: bound of each residual ‖Hv − λv‖ relative to the largest |λ| found. The eigenvalue's own error is at
            most the residual, and about residual²/gap. The values must also stay within it over STEADY products.
        max_products: products to spend; after that the result says `converged = False`.
        capacity: vectors held in memory (P each), shared by the runs; above that, thick restarts.
        start: (P,) direction to start from, to which a little noise is added, so that no eigenvector is left out for good. It
            may still show too late: a start that leans towards some eigenvectors can settle on theirs, converged, before the
            extreme one rises out of the noise. A random start leans towards none; None starts so.
        generator: of the starting vectors.

    Raises:
        NotFiniteError: a product is NaN or infinite.
    """
    wanted = min(upper + lower, operator.size)
    upper = min(upper, wanted)
    lower = wanted - upper
    several = upper > 1 or lower > 1
    found = _lanczos(
        operator,
        upper,
        lower,
        tolerance,
        max_products,
        capacity // 2 if several else capacity,
        noisy(start, operator, generator),
        generator,
    )
    if not (several and found.converged) or (found.krylov is not None and found.krylov.size == operator.size):
        return found
    values, vectors, residuals = found.values, found.vectors, found.residuals  # of all pairs found, in any order
    spent, why = found.products, ""
    while len(values) < operator.size:
        last_above = np.sort(values)[-upper] if upper else np.inf
        last_below = np.sort(values)[lower - 1] if lower else -np.inf
        if spent >= max_products:
            why = (
                f"{spent} products were spent before a search for further eigenvectors of the same eigenvalues was over"
            )
            break
        more = _lanczos(
            operator,
            int(upper > 1),
            int(lower > 1),
            tolerance,
            max_products - spent,
            capacity // 2,
            None,
            generator,
            scale=float(np.abs(values).max()),
            bars=(last_above, last_below),
            locked=torch.linalg.qr(vectors.T).Q.T.contiguous(),
        )
        spent += more.products
        slack = tolerance * float(np.abs(values).max())
        new = np.r_[more.values[: more.upper] > last_above + slack, more.values[more.upper :] < last_below - slack]
        if not new.any():
            why = "" if more.converged else f"looking for further eigenvectors of the same eigenvalues: {more.why}"
            break
        values, residuals = np.r_[values, more.values[new]], np.r_[residuals, more.residuals[new]]
        vectors = torch.cat([vectors, more.vectors[torch.from_numpy(new)]])
    top, bottom = np.argsort(-values)[:upper], np.argsort(values)[:lower]
    ends = np.r_[top, bottom[::-1]]
    return Eigenpairs(
        values[ends], vectors[torch.from_numpy(ends)], residuals[ends], upper, spent, not why, why, found.krylov
    )


def _lanczos(
    operator: Operator,
    upper: int,
    lower: int,
    tolerance: float,
    max_products: int,
    capacity: int,
    start: Tensor | None,
    generator: torch.Generator,
    scale: float = np.finfo(np.float64).tiny,
    locked: Tensor | None = None,
    bars: tuple[float, float] | None = None,
) -> Eigenpairs:
    """`eigenpairs` by one run of Lanczos, in the complement of `locked` (q, P); `start` is taken as it is.

    `scale` is the largest |eigenvalue| known before. With `bars` only pairs above the first and below the second are of
    interest: one that falls short of its bar is done with a residual of a tenth of what it lacks.
    """
    dimension = operator.size - (0 if locked is None else len(locked))
    wanted = min(upper + lower, dimension)
    upper = min(upper, wanted)
    lower = wanted - upper
    capacity = min(dimension, max(capacity, 2 * wanted + 6), max(max_products, wanted))
    space = Krylov(operator, capacity, generator, locked)
    space.start(start)
    spent, restarted, met, last = 0, False, 0, np.full(wanted, np.inf)
    while True:
        space.extend()
        spent += 1
        if space.size < wanted:
            continue
        values, coefficients, residuals = space.ritz()
        ends = np.r_[np.arange(len(values) - upper, len(values)), np.arange(lower)]
        scale = max(float(np.abs(values).max()), scale)
        # A small residual makes an eigenvalue, not the extreme one: a start may lie near another eigenvector. So the values
        # must also stand still while further directions come in.
        allowed = np.full(wanted, tolerance * scale)
        if bars is not None:
            short = np.r_[bars[0] - values[ends[:upper]], values[ends[upper:]] - bars[1]]
            allowed = np.maximum(allowed, 0.1 * short)
        still = bool((np.abs(values[ends] - last) <= allowed).all())
        small = bool((residuals[ends] <= allowed).all())
        met = met + 1 if still and small else 0
        last = values[ends]
        done = met >= STEADY or (small and space.size == dimension)
        if done or spent >= max_products or space.size == dimension:
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
