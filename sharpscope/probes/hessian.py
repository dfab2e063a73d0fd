"""Curvature of a loss: extreme eigenvalues and trace of its Hessian; the preconditioner of AdamW."""

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

from sharpscope.config.probes import Backend, Check
from sharpscope.errors import UserError, first_line
from sharpscope.memory import require_memory
from sharpscope.probes.estimate import Estimate, with_prompts
from sharpscope.probes.lanczos import Krylov, eigenpairs, hutchpp
from sharpscope.probes.surface import LossFn, Operator, Surface, check_once, flatten, length, opened


@dataclass(frozen=True)
class Curvature:
    """Curvature of a loss at one point; numbers that are not available are NaN.

    An eigenpair that has converged need not be the extreme one. The standard error over prompts of an eigenvalue is of first
    order, with the eigenvector fixed; it is too large where it is not small compared with the distance to the next eigenvalue.
    """

    loss: float  # L(θ)
    gradient_norm: float  # ‖∇L(θ)‖₂
    top: np.ndarray = field(default_factory=lambda: np.full(1, np.nan))  # (k,) largest eigenvalues, in descending order
    residuals: np.ndarray = field(default_factory=lambda: np.full(1, np.nan))  # (k,) measured ‖Hv − λv‖₂ of `top`
    vectors: Tensor = field(default_factory=lambda: torch.zeros(0))  # (k, P) unit eigenvectors of `top`
    smallest: float = math.nan  # smallest (signed) eigenvalue
    smallest_residual: float = math.nan
    trace: float = math.nan
    trace_std_error: float = math.nan  # with `trace_probes` − 1 degrees of freedom
    trace_probes: int = 0  # number of random probes of the trace
    why: str = ""  # what did not converge or is not finite
    products: int = 0  # number of Hessian-vector products
    seed: int = 0
    seconds: float = 0.0
    checked: float | None = None  # relative error found by `check_products`; None if not checked, NaN if inconclusive
    by_prompt: tuple[Tensor, ...] = ()  # vᵀH_i v of prompt i, (k,), for `top` and then `smallest`; empty if not known

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

        half = self.trace_std_error and float(t.ppf(0.5 + level / 2, self.trace_probes - 1)) * self.trace_std_error
        return self.trace - half, self.trace + half

    def estimates(self, prefix: str = "") -> list[Estimate]:
        """Rows of the `probes` table: `largest` (with all the seconds), `eigenvalue_i`, `smallest`, `trace`."""
        names = ["largest", *(f"eigenvalue_{index}" for index in range(2, len(self.top) + 1))]
        pairs = list(zip(names, map(float, self.top), map(float, self.residuals), strict=True))
        pairs += [("smallest", self.smallest, self.smallest_residual)] * math.isfinite(self.smallest)
        common: dict[str, Any] = {"seed": self.seed, "why": self.why}
        rows = []
        for index, (name, value, residual) in enumerate(pairs):
            common |= {"converged": self.converged, "seconds": 0.0 if index else self.seconds}
            one = Estimate("curvature", prefix + name, value, residual=residual, **common)
            rows.append(with_prompts(one, self.by_prompt[index] if index < len(self.by_prompt) else None))
        if self.trace_probes:
            known = math.isfinite(self.trace)
            common |= {"converged": None, "why": ""} if known else {"converged": False}
            error = {"std_error": self.trace_std_error, "samples": self.trace_probes, "seconds": 0.0}
            rows.append(Estimate("curvature", f"{prefix}trace", self.trace, **common | error))
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
    preconditioner: Sequence[Tensor] | None = None,
    memory_mb: float = 2048.0,
    check: Check = "first",
    at: tuple[float, Tensor] | None = None,
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
        preconditioner: D, a positive tensor for each trainable parameter (see `adamw_preconditioner`), for D^(−1/2) H D^(−1/2).
        memory_mb: memory for Lanczos vectors [MiB]; with less memory Lanczos restarts more often.
        check: when to compare a Hessian product and the gradient with finite differences (see `check_products`): `first` call
            with this closure and these parameters, `always` or `off`.
        at: (L(θ), ∇L(θ)) if already computed.
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
    if backend not in ("lanczos", "pyhessian") or (backend == "pyhessian" and preconditioner is not None):
        raise UserError(f"backend, '{backend}': use 'lanczos', or 'pyhessian' for the plain Hessian")
    if top < 1 or trace_probes == 1 or not 0 < tolerance < 1:
        raise UserError("curvature: top must be at least 1, trace_probes 0 or at least 2, tolerance between 0 and 1")
    if preconditioner is not None and not all(bool((part > 0).all()) for part in preconditioner):
        raise UserError("preconditioner: must be positive")
    with opened(loss_fn, parameters, check) as (surface, known):
        began = time.perf_counter()
        loss, gradient = surface.gradient() if at is None else at
        start = Curvature(loss, length(gradient), seed=seed, trace_probes=trace_probes)
        if not (math.isfinite(loss) and math.isfinite(start.gradient_norm)):
            return replace(start, why=f"the loss is {loss}, or its gradient is not finite (norm {start.gradient_norm})")
        wanted, size = top + int(smallest), len(gradient)
        capacity = max(2 * wanted + 3, int(memory_mb * 2**20 / gradient.nbytes))
        # Lanczos vectors, eigenvectors with an orthonormal copy, and eight more for products.
        vectors = min(capacity, max_products, size) + 2 * wanted + 8
        what = f"curvature of {size / 1e6:.3g} million parameters"
        require_memory(vectors * gradient.nbytes, gradient.device, what, "lower top, or probe a smaller model")
        hessian = surface.hessian()
        checked = check_once(known, "hessian", check, lambda: surface.check(hessian))
        scale = None if preconditioner is None else flatten(preconditioner, surface.parameters).rsqrt()
        if scale is not None:
            plain = hessian
            hessian = Operator(surface.parameters, lambda v: (plain @ (v * scale)).mul_(scale))
        limits: dict[str, Any] = {"tolerance": tolerance, "max_products": max_products}
        if backend == "pyhessian":
            found = _by_pyhessian(surface, hessian, start, wanted, **limits)
        else:
            found = _by_lanczos(hessian, start, top, int(smallest), capacity=capacity, **limits)
            if by_prompt and len(found.vectors):
                found = replace(found, by_prompt=_by_prompt(surface, found, scale))
        found = replace(found, vectors=found.vectors[: len(found.top)], products=hessian.products)
        return replace(found, checked=checked, seconds=time.perf_counter() - began)


def residual(operator: Operator, value: float, vector: Tensor) -> float:
    """‖Hv − λv‖₂ of a unit vector (P,)."""
    return length((operator @ vector).sub_(vector, alpha=float(value)))


def _by_lanczos(
    hessian: Operator, start: Curvature, top: int, lower: int, capacity: int, tolerance: float, max_products: int
) -> Curvature:
    """`start` with eigenvalues, whose residuals take one product each, and the trace; `vectors` include that of `smallest`."""
    found, why = start, ""
    limits: dict[str, Any] = {"tolerance": tolerance, "max_products": max_products, "capacity": capacity}
    try:
        pairs = eigenpairs(hessian, top, lower, generator=sub_generator(start.seed, "eigenvalues"), **limits)
        residuals = np.array([residual(hessian, *pair) for pair in zip(pairs.values, pairs.vectors, strict=True)])
        bound, why, upper = tolerance * float(np.abs(pairs.values).max()), pairs.why, pairs.upper
        if not why and residuals.max() > max(2 * bound, 1e-300):
            why = (
                f"the measured residual {residuals.max():.1e} exceeds {bound:.1e}: rounding of {hessian.dtype}, or a loss "
                "that changes from call to call"
            )
        found = replace(start, top=pairs.values[:upper], residuals=residuals[:upper], vectors=pairs.vectors)
        if lower:  # a 1 × 1 Hessian has one eigenvalue, both the largest and the smallest
            found = replace(found, smallest=float(pairs.values[-1]), smallest_residual=float(residuals[-1]))
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


def _by_prompt(surface: Surface, found: Curvature, scale: Tensor | None) -> tuple[Tensor, ...]:
    """Values by prompt (k,) with mean λ for each eigenpair; empty if they are not known or cannot be computed."""
    rows = []
    for value, vector in zip([*found.top, found.smallest], found.vectors, strict=False):
        try:
            each = surface.curvature_by_prompt(vector if scale is None else vector * scale)
        except (ArithmeticError, RuntimeError) as problem:  # such as lack of memory: the eigenvalue stands
            warnings.warn(f"eigenvalues have no standard error over prompts: {first_line(problem)}", stacklevel=2)
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
        return self.surface.loss() + sum(0 * parameter.square().sum() for parameter in self.surface.parameters)


def _by_pyhessian(
    surface: Surface, hessian: Operator, start: Curvature, top: int, tolerance: float, max_products: int
) -> Curvature:
    """`start` with PyHessian's `top` eigenvalues by magnitude, residuals by our products, and its trace: a second opinion.

    `top` holds the positive eigenvalues among them, `smallest` the most negative one; `products` are those of the residuals.
    """
    library: Any = import_module("pyhessian.hessian")  # `pyhessian.hessian` the attribute is the class of that name
    model, parameters = _PyHessianModel(surface), surface.parameters
    torch.manual_seed(start.seed)
    nothing = {"data": (torch.zeros(0), torch.zeros(0)), "cuda": parameters[0].is_cuda}  # the closure has the data
    problem = library.hessian(model, lambda loss, _: loss, **nothing)
    values, vectors = problem.eigenvalues(maxIter=max_products, tol=tolerance, top_n=top)
    samples = problem.trace(maxIter=max_products, tol=tolerance) if start.trace_probes else []
    model.zero_grad()
    found: list[tuple[float, float, Tensor]] = []
    for value, parts in zip(map(float, values), vectors, strict=True):
        flat = flatten(parts, parameters)
        flat = flat / length(flat)
        found.append((value, residual(hessian, value, flat), flat))
    upper = sorted((one for one in found if one[0] > 0), key=lambda one: -one[0])
    lower = [one[:2] for one in found if one[0] < 0]
    worst = max(one[1] for one in found) / max(abs(one[0]) for one in found)
    why = f"PyHessian stopped at a residual of {worst:.1e} of its largest |eigenvalue|" if worst > tolerance else ""
    result = replace(start, trace_probes=len(samples), why=why)
    if samples:
        result = replace(result, trace=float(np.mean(samples)))
    if len(samples) > 1:
        result = replace(result, trace_std_error=float(np.std(samples, ddof=1)) / len(samples) ** 0.5)
    if upper:
        tops, residuals = (np.array([one[i] for one in upper]) for i in (0, 1))
        result = replace(result, top=tops, residuals=residuals, vectors=torch.stack([one[2] for one in upper]))
    if lower:
        result = replace(result, smallest=min(lower)[0], smallest_residual=min(lower)[1])
    return result


def adamw_preconditioner(optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> list[Tensor]:
    """D = (1 − β₁ᵗ)·(√(v/(1 − β₂ᵗ)) + ε) for each parameter, with the optimizer's second moments v after t updates.

    AdamW's update −lr·D⁻¹m is stable while the largest eigenvalue of D^(−1/2) H D^(−1/2) is below `adamw_threshold` (Cohen et
    al., arXiv 2207.14484). The shift by decoupled weight decay is ignored.

    Args:
        optimizer: `torch.optim.Adam` or `AdamW` after at least one step, without amsgrad.
        parameters: parameters of the optimizer.

    Raises:
        UserError: a parameter has no second moments.
    """
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    diagonals = []
    for parameter in parameters:
        state = optimizer.state.get(parameter, {})
        if id(parameter) not in groups or "exp_avg_sq" not in state or "step" not in state:
            raise UserError(
                f"preconditioner, parameter of shape {tuple(parameter.shape)}: the optimizer has no moments of it; "
                "take a step of Adam or AdamW first, or leave it out"
            )
        group, step = groups[id(parameter)], float(state["step"])
        beta1, beta2 = group["betas"]
        second = state["exp_avg_sq"].detach().to(dtype=torch.promote_types(parameter.dtype, torch.float32))
        diagonals.append((1 - beta1**step) * ((second / (1 - beta2**step)).sqrt() + group["eps"]))
    return diagonals


def adamw_threshold(lr: float, beta1: float) -> float:
    """The largest stable eigenvalue of the preconditioned Hessian, (2 + 2β₁)/((1 − β₁)·lr); 38/lr for β₁ = 0.9."""
    return (2 + 2 * beta1) / ((1 - beta1) * lr)
