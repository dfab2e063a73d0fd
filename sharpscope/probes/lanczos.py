"""Symmetric operators, and Lanczos with full reorthogonalization: extreme eigenpairs with residuals, and Krylov bases.

SciPy's `eigsh` (ARPACK) tests convergence only when its basis is full, so it needs at least `ncv` products for any tolerance;
this implementation tests after each product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sharpscope.probes.surface import common_dtype, flatten, size_of, unflatten

STEADY = 3
"""Number of consecutive products at which the Ritz pairs must meet the tolerance."""
COLUMNS = 2**20
"""Columns of a basis that a restart replaces at once."""


class NotFiniteError(ArithmeticError):
    """A product is NaN or infinite; the message gives its number."""


class Operator:
    """A symmetric linear map (P,) → (P,) that counts its products.

    Attributes:
        size: P.
        dtype: dtype of the vectors.
        device: device of the vectors.
        products: number of matrix-vector products so far.
    """

    def __init__(
        self, product: Callable[[Tensor], Tensor], size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.size, self.dtype, self.device = size, dtype, device
        self.products = 0
        self._product = product

    @classmethod
    def on(cls, parameters: Sequence[Tensor], product: Callable[[Tensor], Tensor]) -> Operator:
        """A map of flat vectors like the parameters."""
        return cls(product, size_of(parameters), common_dtype(parameters), parameters[0].device)

    def __matmul__(self, vector: Tensor) -> Tensor:
        self.products += 1
        return self._product(vector)

    def scaled(self, scale: Tensor) -> Operator:
        """S H S for a diagonal S (P,): the Hessian in the coordinates S⁻¹θ, such as S = D^(−1/2) for AdamW's D."""
        scale = scale.to(device=self.device, dtype=self.dtype)
        return Operator(lambda v: (self @ (v * scale)).mul_(scale), self.size, self.dtype, self.device)


def orthonormal(rows: Tensor) -> Tensor:
    """Orthonormal rows with the span of linearly independent `rows` (k, P), by Gram-Schmidt twice.

    LAPACK's QR fails for a matrix of 10⁸ rows, the parameters of a real model.
    """
    basis = rows.clone()
    for number in range(len(basis)):
        for _ in range(2):
            basis[number] -= (basis[:number] @ basis[number]) @ basis[:number]
        basis[number] /= basis[number].norm()
    return basis


def graph_product(loss: Tensor, parameters: Sequence[Tensor]) -> Callable[[Tensor], Tensor]:
    """Hessian products v ↦ H v of a scalar loss, by a second reverse pass through the kept graph of its gradient.

    H v is 0 for parameters that are unused or enter linearly. A product costs about four forward passes.
    """
    gradients = torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True)
    active = [i for i, g in enumerate(gradients) if g is not None and g.requires_grad]
    outputs = [gradients[i] for i in active]

    def product(vector: Tensor) -> Tensor:
        if not active:
            return flatten([None] * len(parameters), parameters)
        parts = unflatten(vector, parameters)
        second = torch.autograd.grad(
            outputs, parameters, [parts[i] for i in active], retain_graph=True, allow_unused=True
        )
        return flatten(second, parameters)

    return product


@dataclass(frozen=True)
class Eigenpairs:
    """Extreme eigenpairs.

    Attributes:
        values: (k,) float64 signed eigenvalues in descending order.
        vectors: (k, P) unit eigenvectors in the same order.
        residuals: (k,) ‖Hv − λv‖₂.
        upper: number of eigenpairs at the upper end; the others are at the lower end.
        products: number of matrix-vector products.
        converged: whether, over STEADY products or the whole space, all residuals were ≤ tolerance · the largest |λ| and the
            values did not change. Converged values are eigenvalues but need not be the extreme ones, see `eigenpairs`.
        why: reason for `converged = False`.
        krylov: the subspace, for deflation; None if a restart has shortened it.
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
    """A Krylov subspace: an orthonormal basis V (j, P), the projection T = V H Vᵀ (j, j) and the next direction.

    H Vᵀ = Vᵀ T + β v₊ e_jᵀ up to rounding, also after `compress` (thick restart, Wu & Simon 2000), so a Ritz pair (θ, Vᵀs) has
    the residual β·|s_j|. The subspace is orthogonal to the eigenvectors `locked` (q, P), if there are any.
    """

    def __init__(
        self, operator: Operator, capacity: int, generator: torch.Generator, locked: Tensor | None = None
    ) -> None:
        self.operator, self._generator, self._locked = operator, generator, locked
        self.dimension = operator.size - (0 if locked is None else len(locked))
        self.capacity = min(capacity, self.dimension)
        # One more row than the capacity, for the next direction.
        self._basis = torch.zeros(self.capacity + 1, operator.size, dtype=operator.dtype, device=operator.device)
        self.projection = np.zeros((self.capacity, self.capacity))
        self.size = 0
        self.beta = 0.0  # norm of the residual of the last product; 0 if the subspace is invariant
        self._scale = 0.0

    @property
    def basis(self) -> Tensor:
        """(j, P) orthonormal rows."""
        return self._basis[: self.size]

    def start(self, vector: Tensor | None = None) -> None:
        """Set the next direction to `vector` (P,), or a random vector, orthogonalized against the basis."""
        for _ in range(3):
            raw = gaussian(self.operator, self._generator) if vector is None else vector.clone()
            norm = raw.norm()
            raw, _ = self._orthogonal(raw / norm)
            left = float(raw.norm())
            if left > 1e-3 or vector is not None:
                break
        self._basis[self.size] = raw / left

    def extend(self) -> None:
        """Add the next direction to the basis, with one product.

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
        # If only rounding is left, the subspace is invariant.
        eps = torch.finfo(self.operator.dtype).eps
        invariant = beta <= 8 * eps * self._scale
        if not invariant:
            rest /= beta
            if beta <= eps**0.5 * self._scale:
                # Much of the rest may be rounding of the projection, within the span of the basis.
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
        """Ritz values (j,) in ascending order, coefficients (j, j) in columns, and residuals (j,)."""
        values, coefficients = np.linalg.eigh(self.projection[: self.size, : self.size])
        return values, coefficients, self.beta * np.abs(coefficients[-1])

    def vectors(self, coefficients: np.ndarray) -> Tensor:
        """Vectors (k, P) with coefficients (j, k) in the basis."""
        weights = torch.from_numpy(np.ascontiguousarray(coefficients.T)).to(self._basis)
        return weights @ self.basis

    def compress(self, keep: np.ndarray, values: np.ndarray, coefficients: np.ndarray) -> None:
        """Thick restart: keep the Ritz vectors `keep` and the next direction; in place, since a vector of a real model is large."""
        weights = torch.from_numpy(np.ascontiguousarray(coefficients[:, keep].T)).to(self._basis)
        for columns in self._basis.split(COLUMNS, dim=1):
            columns[: len(keep)] = weights @ columns[: self.size]
        self._basis[len(keep)] = self._basis[self.size]
        self.projection[:] = 0.0
        self.projection[range(len(keep)), range(len(keep))] = values[keep]
        self.size = len(keep)

    def _orthogonal(self, vector: Tensor) -> tuple[Tensor, np.ndarray]:
        """`vector` orthogonalized twice against the basis and locked vectors, and its coefficients in the basis."""
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
    """Standard normal vector (P,), drawn on the CPU so that it does not depend on the device."""
    return torch.randn(operator.size, generator=generator, dtype=operator.dtype).to(operator.device)


def eigenpairs(
    operator: Operator,
    *,
    upper: int = 1,
    lower: int = 1,
    tolerance: float = 1e-3,
    max_products: int = 200,
    capacity: int = 100,
    generator: torch.Generator,
) -> Eigenpairs:
    """The `upper` largest and `lower` smallest (signed) eigenvalues of a symmetric operator.

    One run of Lanczos finds one eigenvector per eigenvalue, whatever its multiplicity. If several eigenpairs are requested at
    one end, further runs from random starts, orthogonal to the eigenvectors found, look for the others until a run finds none.
    That takes 10 to 50 % more products; it is not needed for `upper` and `lower` of at most 1.

    Args:
        operator: symmetric operator on (P,).
        upper: number of eigenpairs at the upper end.
        lower: number of eigenpairs at the lower end.
        tolerance: bound of the residuals ‖Hv − λv‖ relative to the largest |λ|. The error of an eigenvalue is at most the
            residual, and about residual²/gap. Values must also change by less over STEADY products.
        max_products: maximum number of products.
        capacity: number of vectors (P,) in memory, shared by the runs; beyond it Lanczos restarts.
        generator: generator of the random starting vectors.

    Raises:
        NotFiniteError: a product is NaN or infinite.
    """
    wanted = min(upper + lower, operator.size)
    upper = min(upper, wanted)
    lower = wanted - upper
    several = upper > 1 or lower > 1
    pairs = _lanczos(
        operator,
        upper,
        lower,
        tolerance,
        max_products,
        capacity // 2 if several else capacity,
        generator,
    )
    if not (several and pairs.converged) or (pairs.krylov is not None and pairs.krylov.size == operator.size):
        return pairs
    values, vectors, residuals = pairs.values, pairs.vectors, pairs.residuals  # of all pairs found, in any order
    spent, why = pairs.products, ""
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
            generator,
            scale=float(np.abs(values).max()),
            bars=(last_above, last_below),
            locked=orthonormal(vectors),
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
        values[ends], vectors[torch.from_numpy(ends)], residuals[ends], upper, spent, not why, why, pairs.krylov
    )


def _lanczos(
    operator: Operator,
    upper: int,
    lower: int,
    tolerance: float,
    max_products: int,
    capacity: int,
    generator: torch.Generator,
    scale: float = np.finfo(np.float64).tiny,
    locked: Tensor | None = None,
    bars: tuple[float, float] | None = None,
) -> Eigenpairs:
    """`eigenpairs` by one run of Lanczos from a random start, orthogonal to `locked` (q, P).

    `scale` is the largest |eigenvalue| known so far. With `bars`, only pairs above the first and below the second bar matter;
    others converge at a residual of a tenth of their distance to the bar.
    """
    dimension = operator.size - (0 if locked is None else len(locked))
    wanted = min(upper + lower, dimension)
    upper = min(upper, wanted)
    lower = wanted - upper
    capacity = min(dimension, max(capacity, 2 * wanted + 3), max(max_products, wanted))
    space = Krylov(operator, capacity, generator, locked)
    space.start()
    spent, restarted, met, last = 0, False, 0, np.full(wanted, np.inf)
    while True:
        space.extend()
        spent += 1
        if space.size < wanted:
            continue
        values, coefficients, residuals = space.ritz()
        ends = np.r_[np.arange(len(values) - upper, len(values)), np.arange(lower)]
        scale = max(float(np.abs(values).max()), scale)
        # A small residual does not imply the extreme eigenvalue, so the values must also be stable while the subspace grows.
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
            # Keep about half, from both ends in proportion to the numbers requested.
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
