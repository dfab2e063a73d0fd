"""Curvature of a loss: extreme eigenvalues and trace of its Hessian.

Eigenpairs are those of Lanczos with full reorthogonalization, the trace is that of Hutch++. SciPy's `eigsh` (ARPACK) tests
convergence only when its basis is full, so it needs at least `ncv` products for any tolerance; here each product is a test.
"""

from __future__ import annotations

import hashlib
import math
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sharpscope.config.run import Backend, Check
from sharpscope.errors import UserError, first_line
from sharpscope.memory import require_memory
from sharpscope.policy.directions import length
from sharpscope.surface.estimate import Estimate, with_prompts
from sharpscope.surface.surface import (
    LossFn,
    Operator,
    Surface,
    check_once,
    flatten,
    opened,
)

STEADY = 3
"""Number of consecutive products at which the Ritz pairs must meet the tolerance."""
COLUMNS = 2**20
"""Columns of a basis that a restart replaces at once."""


@dataclass(frozen=True)
class Curvature:
    """Curvature of a loss at one point; numbers that are not available are NaN.

    An eigenpair that has converged need not be the extreme one. The standard error over prompts of an eigenvalue is of first
    order, with the eigenvector fixed; it is too large where it is not small compared with the distance to the next eigenvalue.
    """

    loss: float  # L(θ)
    gradient_norm: float  # ‖∇L(θ)‖₂
    # (k,) largest eigenvalues, in descending order
    top: np.ndarray = field(default_factory=lambda: np.full(1, np.nan))
    # (k,) measured ‖Hv − λv‖₂ of `top`
    residuals: np.ndarray = field(default_factory=lambda: np.full(1, np.nan))
    # (k, P) unit eigenvectors of `top`
    vectors: Tensor = field(default_factory=lambda: torch.zeros(0))
    smallest: float = math.nan  # smallest (signed) eigenvalue
    smallest_residual: float = math.nan
    trace: float = math.nan
    trace_std_error: float = math.nan  # with `trace_probes` − 1 degrees of freedom
    trace_probes: int = 0  # number of random probes of the trace
    why: str = ""  # what did not converge or is not finite
    products: int = 0  # number of Hessian-vector products
    seed: int = 0
    seconds: float = 0.0
    # relative error found by `check_derivatives`; None if not checked, NaN if inconclusive
    checked: float | None = None
    # vᵀH_i v of prompt i, (k,), for `top` and then `smallest`; empty if not known
    by_prompt: tuple[Tensor, ...] = ()

    @property
    def converged(self) -> bool:
        """Whether all eigenpairs met the tolerance and all numbers are finite."""
        return not self.why

    @property
    def largest(self) -> float:
        """Largest eigenvalue; NaN if not available."""
        return float(self.top[0])

    def trace_interval(self, level: float = 0.95) -> tuple[float, float]:
        """Student's t confidence interval of the trace; NaN without a trace."""
        from scipy.stats import t

        half = (
            self.trace_std_error
            and float(t.ppf(0.5 + level / 2, self.trace_probes - 1)) * self.trace_std_error
        )
        return self.trace - half, self.trace + half

    def estimates(self) -> list[Estimate]:
        """Rows of the `probes` table: `largest` (with all the seconds), `eigenvalue_i`, `smallest`, `trace`."""
        names = ["largest", *(f"eigenvalue_{index}" for index in range(2, len(self.top) + 1))]
        pairs = list(zip(names, map(float, self.top), map(float, self.residuals), strict=True))
        pairs += [("smallest", self.smallest, self.smallest_residual)] * math.isfinite(
            self.smallest
        )
        common: dict[str, Any] = {"seed": self.seed, "why": self.why}
        rows = []
        for index, (name, value, residual) in enumerate(pairs):
            common |= {"converged": self.converged, "seconds": 0.0 if index else self.seconds}
            one = Estimate("curvature", name, value, residual=residual, **common)
            rows.append(
                with_prompts(one, self.by_prompt[index] if index < len(self.by_prompt) else None)
            )
        if self.trace_probes:
            known = math.isfinite(self.trace)
            common |= {"converged": None, "why": ""} if known else {"converged": False}
            error = {
                "std_error": self.trace_std_error,
                "samples": self.trace_probes,
                "seconds": 0.0,
            }
            rows.append(Estimate("curvature", "trace", self.trace, **common | error))
        return rows


def sub_generator(seed: int, name: str) -> torch.Generator:
    """A generator for one estimate, so that leaving out an estimate does not change the others."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def curvature(
    loss_fn: LossFn | Surface,
    parameters: Sequence[Tensor] | None = None,
    seed: int = 0,
    *,
    top: int = 1,
    smallest: bool = True,
    tolerance: float = 1e-3,
    max_products: int = 200,
    trace_probes: int = 16,
    backend: Backend = "lanczos",
    memory_mb: float = 2048.0,
    check: Check = "first",
    by_prompt: bool = False,
) -> Curvature:
    """Curvature of any loss at the current parameters.

    Parameters, `.grad`, random state and attention kernel are restored afterwards, also if this raises. Numbers that are not
    finite do not raise; they are NaN with `converged = False` and a reason.

    Args:
        loss_fn: zero-argument closure that computes a scalar loss from `parameters`; deterministic (use eval mode), which 4 calls
            at the start and 2 at the end check, and twice differentiable. Or a surface that is already guarded (see `lm_surface`).
        parameters: leaf tensors. Duplicates count once; tensors that do not require grad are left out. None for a surface.
        seed: seed of all random vectors.
        top: number of largest eigenpairs.
        smallest: also compute the smallest (signed) eigenvalue.
        tolerance: bound of the residuals ‖Hv − λv‖ relative to the largest |λ|.
        max_products: maximum number of Hessian-vector products for the eigenpairs.
        trace_probes: random probes of the trace, at least 2; 0 for no trace.
        backend: `lanczos`, or `pyhessian` for PyHessian's eigenvalues and trace.
        memory_mb: memory for Lanczos vectors [MiB]; with less memory Lanczos restarts more often.
        check: when to compare a Hessian product and the gradient with finite differences (see `check_derivatives`): `first` call
            with this closure and these parameters, `always` or `off`.
        by_prompt: standard errors of eigenvalues over prompts, where the surface knows the prompts; about one product each.

    Raises:
        UserError: a wrong argument; the closure does not return one number or is not deterministic.
        CheckError: a Hessian product is wrong, as for an `autograd.Function` without second derivatives.

    Examples:
        The Hessian of θ₁²/2 + 2θ₂² has eigenvalues 1 and 4.

        >>> import torch
        >>> import sharpscope
        >>> theta = torch.ones(2, dtype=torch.float64, requires_grad=True)
        >>> loss = lambda: theta[0] ** 2 / 2 + 2 * theta[1] ** 2
        >>> found = sharpscope.curvature(loss, [theta], seed=0)
        >>> round(found.largest, 6), round(found.trace, 6), found.converged
        (4.0, 5.0, True)
    """
    if backend not in ("lanczos", "pyhessian"):
        raise UserError(f"backend, '{backend}': use 'lanczos' or 'pyhessian'")
    if top < 1 or trace_probes == 1 or not 0 < tolerance < 1:
        raise UserError(
            "curvature: top must be at least 1, trace_probes 0 or at least 2, tolerance between 0 and 1"
        )
    with opened(loss_fn, parameters, check) as (surface, known):
        began = time.perf_counter()
        loss, gradient = surface.gradient()
        start = Curvature(loss, length(gradient), seed=seed, trace_probes=trace_probes)
        if not (math.isfinite(loss) and math.isfinite(start.gradient_norm)):
            return replace(
                start,
                why=f"the loss is {loss}, or its gradient is not finite (norm {start.gradient_norm})",
            )
        wanted, size = top + int(smallest), len(gradient)
        capacity = max(2 * wanted + 3, int(memory_mb * 2**20 / gradient.nbytes))
        # Lanczos vectors, eigenvectors with an orthonormal copy, and eight more for products.
        vectors = min(capacity, max_products, size) + 2 * wanted + 8
        what = f"curvature of {size / 1e6:.3g} million parameters"
        require_memory(
            vectors * gradient.nbytes, gradient.device, what, "lower top, or probe a smaller model"
        )
        hessian = surface.hessian()
        checked = check_once(known, "hessian", check, lambda: surface.check(hessian))
        limits: dict[str, Any] = {"tolerance": tolerance, "max_products": max_products}
        if backend == "pyhessian":
            found = _by_pyhessian(surface, hessian, start, wanted, **limits)
        else:
            found = _by_lanczos(hessian, start, top, int(smallest), capacity=capacity, **limits)
            if by_prompt and len(found.vectors):
                found = replace(found, by_prompt=_by_prompt(surface, found))
        found = replace(found, vectors=found.vectors[: len(found.top)], products=hessian.products)
        return replace(found, checked=checked, seconds=time.perf_counter() - began)


def residual(operator: Operator, value: float, vector: Tensor) -> float:
    """‖Hv − λv‖₂ of a unit vector (P,)."""
    return length((operator @ vector).sub_(vector, alpha=float(value)))


def _by_lanczos(
    hessian: Operator,
    start: Curvature,
    top: int,
    lower: int,
    capacity: int,
    tolerance: float,
    max_products: int,
) -> Curvature:
    """`start` with eigenvalues, whose residuals take one product each, and the trace; `vectors` include that of `smallest`."""
    found, why = start, ""
    limits: dict[str, Any] = {
        "tolerance": tolerance,
        "max_products": max_products,
        "capacity": capacity,
    }
    try:
        pairs = eigenpairs(
            hessian, top, lower, generator=sub_generator(start.seed, "eigenvalues"), **limits
        )
        residuals = np.array(
            [residual(hessian, *pair) for pair in zip(pairs.values, pairs.vectors, strict=True)]
        )
        bound, why, upper = tolerance * float(np.abs(pairs.values).max()), pairs.why, pairs.upper
        if not why and residuals.max() > max(2 * bound, 1e-300):
            why = (
                f"the measured residual {residuals.max():.1e} exceeds {bound:.1e}: rounding of {hessian.dtype}, or a loss "
                "that changes from call to call"
            )
        found = replace(
            start, top=pairs.values[:upper], residuals=residuals[:upper], vectors=pairs.vectors
        )
        if lower:  # a 1 × 1 Hessian has one eigenvalue, both the largest and the smallest
            found = replace(
                found, smallest=float(pairs.values[-1]), smallest_residual=float(residuals[-1])
            )
        if start.trace_probes:
            draws, space = sub_generator(start.seed, "trace"), pairs.krylov
            if space is None:
                space = Krylov(hessian, min(start.trace_probes, capacity), draws)
                for _ in range(space.capacity):
                    space.extend()
            trace, error = hutchpp(hessian, space, start.trace_probes, draws)
            found = replace(found, trace=trace, trace_std_error=error)
    except FloatingPointError as problem:
        why = "; ".join(filter(None, (why, str(problem))))
    return replace(found, why=why)


def _by_prompt(surface: Surface, found: Curvature) -> tuple[Tensor, ...]:
    """Values by prompt (k,) with mean λ for each eigenpair; empty if they are not known or cannot be computed."""
    rows = []
    for value, vector in zip([*found.top, found.smallest], found.vectors, strict=False):
        try:
            each = surface.curvature_by_prompt(vector)
        except (
            ArithmeticError,
            RuntimeError,
        ) as problem:  # such as lack of memory: the eigenvalue stands
            warnings.warn(
                f"eigenvalues have no standard error over prompts: {first_line(problem)}",
                stacklevel=2,
            )
            return ()
        if each is None or not bool(each.isfinite().all()):
            return ()
        rows.append(each - each.mean() + float(value))
    return tuple(rows)


class _PyHessianModel(nn.Module):
    """A surface as a model."""

    def __init__(self, surface: Surface) -> None:
        super().__init__()
        self.surface = surface

    def parameters(self, recurse: bool = True) -> Iterator[Any]:
        """The surface's parameters."""
        return iter(self.surface.parameters)

    def forward(self, _: Any) -> Tensor:
        """The loss, with a second derivative of 0 for parameters that have none, which PyHessian cannot do without."""
        return self.surface.loss() + sum(
            0 * parameter.square().sum() for parameter in self.surface.parameters
        )


def _by_pyhessian(
    surface: Surface,
    hessian: Operator,
    start: Curvature,
    top: int,
    tolerance: float,
    max_products: int,
) -> Curvature:
    """`start` with PyHessian's `top` eigenvalues by magnitude, residuals by our products, and its trace: a second opinion.

    `top` of the result holds the positive eigenvalues among them, `smallest` the most negative one.
    """
    # `pyhessian.hessian` the attribute is the class of that name
    library: Any = import_module("pyhessian.hessian")
    model, parameters = _PyHessianModel(surface), surface.parameters
    torch.manual_seed(start.seed)
    # the closure has the data
    nothing = {
        "data": (torch.zeros(0), torch.zeros(0)),
        "cuda": parameters[0].is_cuda,
    }
    problem = library.hessian(model, lambda loss, _: loss, **nothing)
    values, vectors = problem.eigenvalues(maxIter=max_products, tol=tolerance, top_n=top)
    samples = problem.trace(maxIter=max_products, tol=tolerance) if start.trace_probes else []
    model.zero_grad()
    units = [flat / length(flat) for flat in (flatten(parts, parameters) for parts in vectors)]
    pairs = [
        (float(value), residual(hessian, value, unit), unit)
        for value, unit in zip(values, units, strict=True)
    ]
    pairs.sort(key=lambda pair: -pair[0])
    worst = max(pair[1] for pair in pairs) / max(abs(pair[0]) for pair in pairs)
    why = (
        f"PyHessian stopped at a residual of {worst:.1e} of its largest |eigenvalue|"
        if worst > tolerance
        else ""
    )
    result = replace(start, trace_probes=len(samples), why=why)
    if samples:
        result = replace(result, trace=float(np.mean(samples)))
    if len(samples) > 1:
        result = replace(
            result, trace_std_error=float(np.std(samples, ddof=1)) / len(samples) ** 0.5
        )
    if pairs[0][0] > 0:
        tops, residuals, chosen = zip(*(pair for pair in pairs if pair[0] > 0), strict=True)
        result = replace(
            result, top=np.array(tops), residuals=np.array(residuals), vectors=torch.stack(chosen)
        )
    if pairs[-1][0] < 0:
        result = replace(result, smallest=pairs[-1][0], smallest_residual=pairs[-1][1])
    return result


# -- Lanczos and Hutch++


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
        self.operator, self._generator = operator, generator
        self.capacity = min(capacity, operator.size)
        # One more row than the capacity, for the next direction.
        self._basis = torch.zeros(
            self.capacity + 1, operator.size, dtype=operator.dtype, device=operator.device
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
        for _ in range(3):
            raw = torch.randn(
                self.operator.size, generator=self._generator, dtype=self.operator.dtype
            )
            # drawn on the CPU, so that it does not depend on the device
            raw = raw.to(self.operator.device)
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
    spent, restarted, met, last = 0, False, 0, np.full(wanted, np.inf)
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
        still = bool((np.abs(values[ends] - last) <= tolerance * scale).all())
        small = bool((residuals[ends] <= tolerance * scale).all())
        met = met + 1 if still and small else 0
        last = values[ends]
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
        why = f"after {spent} products {state}the residual is {residuals[ends].max() / scale:.1e} of the largest |eigenvalue|"
    vectors = space.vectors(coefficients[:, order])
    return Eigenpairs(values[order], vectors, upper, why, None if restarted else space)


def hutchpp(
    operator: Operator, subspace: Krylov, probes: int, generator: torch.Generator
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
                probe, subspace.basis.T, inner(subspace.basis, probe).to(probe), alpha=-1
            )
        sample = float(inner((operator @ probe)[None], probe))
        if not math.isfinite(sample):
            raise FloatingPointError(f"Hessian product {operator.products} is not finite")
        samples.append(sample)
    return exact + float(np.mean(samples)), float(np.std(samples, ddof=1)) / math.sqrt(probes)
