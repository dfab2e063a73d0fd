"""Curvature of a loss: extreme eigenvalues and trace of its Hessian; the preconditioner of AdamW."""

from __future__ import annotations

import hashlib
import math
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sharpscope.config.probes import Backend, Check
from sharpscope.errors import UserError, first_line
from sharpscope.memory import require_memory
from sharpscope.probes.estimate import Estimate, with_prompts
from sharpscope.probes.lanczos import Eigenpairs, NotFiniteError, Operator, eigenpairs, hutchpp
from sharpscope.probes.pyhessian import curvature_by_pyhessian
from sharpscope.probes.surface import LossFn, Surface, flatten, length, opened


@dataclass(frozen=True)
class Curvature:
    """Curvature of a loss at one point.

    Attributes:
        loss: L(θ).
        gradient_norm: ‖∇L(θ)‖₂.
        top: (k,) largest eigenvalues in descending order; (1,) NaN if not available.
        residuals: (k,) measured ‖Hv − λv‖₂ of `top`.
        smallest: smallest (signed) eigenvalue; NaN if not available or not requested.
        smallest_residual: measured residual of `smallest`.
        vectors: (k, P) unit eigenvectors of `top`.
        trace: trace of the Hessian; NaN if not available.
        trace_std_error: standard error of the trace, with `trace_probes` − 1 degrees of freedom.
        trace_probes: number of random probes of the trace; 0 if not requested.
        converged: whether all eigenpairs met the tolerance and all numbers are finite. An eigenpair that met it need not be the
            extreme one, see `eigenpairs`.
        why: what did not converge.
        products: total number of Hessian-vector products.
        seed: seed of the random vectors.
        seconds: wall-clock time.
        checked: relative error found by `check_products`; None if not checked, NaN if inconclusive.
        by_prompt: vᵀH_i v of each prompt's Hessian, (k,) each, for `top` and then `smallest`; empty if not known. Their standard
            error is that of an eigenvalue to first order, with the eigenvector fixed; it is too large where it is not small
            compared with the distance to the next eigenvalue.
    """

    loss: float
    gradient_norm: float
    top: np.ndarray
    residuals: np.ndarray
    vectors: Tensor
    smallest: float = math.nan
    smallest_residual: float = math.nan
    trace: float = math.nan
    trace_std_error: float = math.nan
    trace_probes: int = 0
    converged: bool = False
    why: str = ""
    products: int = 0
    seed: int = 0
    seconds: float = 0.0
    checked: float | None = None
    by_prompt: tuple[Tensor, ...] = ()

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
        """Rows of the `probes` table: `gradient_norm`, `largest` (with all the seconds), `eigenvalue_i`, `smallest`, `trace`."""

        def row(quantity: str, value: float, **rest: Any) -> Estimate:
            """A row; a value that is missing has the reason."""
            rest = {"why": "" if math.isfinite(value) else self.why} | rest
            return Estimate("curvature", prefix + quantity, value, seed=self.seed, **rest)

        names = ["largest", *(f"eigenvalue_{index}" for index in range(2, len(self.top) + 1))]
        pairs = list(zip(names, map(float, self.top), map(float, self.residuals), strict=True))
        pairs += [("smallest", self.smallest, self.smallest_residual)] * math.isfinite(self.smallest)
        rows = [row("gradient_norm", self.gradient_norm)]
        common = {"converged": self.converged, "why": self.why}
        for index, (name, value, residual) in enumerate(pairs):
            one = row(name, value, residual=residual, seconds=0.0 if index else self.seconds, **common)
            rows.append(with_prompts(one, self.by_prompt[index] if index < len(self.by_prompt) else None))
        if self.trace_probes:
            converged = None if math.isfinite(self.trace) else False
            error = {"std_error": self.trace_std_error, "samples": self.trace_probes}
            rows.append(row("trace", self.trace, converged=converged, **error))
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
    _check_arguments(backend, preconditioner, top, trace_probes, tolerance)
    with opened(loss_fn, parameters, check) as (surface, known):
        began = time.perf_counter()
        loss, gradient = surface.gradient() if at is None else at
        norm, missing = length(gradient), np.full(1, np.nan)
        start = Curvature(loss, norm, missing, missing, torch.zeros(0), seed=seed, trace_probes=trace_probes)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return replace(start, why=f"the loss is {loss}, or its gradient is not finite (norm {norm})")
        wanted = top + int(smallest)
        capacity = max(2 * wanted + 3, int(memory_mb * 2**20 / gradient.nbytes))
        _check_memory(gradient, min(capacity, max_products), wanted)
        hessian, checked = _checked_hessian(surface, known, check)
        scale = None if preconditioner is None else flatten(preconditioner, surface.parameters).rsqrt()
        hessian = hessian if scale is None else hessian.scaled(scale)
        if backend == "pyhessian":
            found = curvature_by_pyhessian(surface, hessian, start, wanted, tolerance, max_products, trace_probes > 0)
        else:
            found = _by_lanczos(hessian, start, top, smallest, tolerance, max_products, capacity)
            if by_prompt and len(found.vectors):
                found = replace(found, by_prompt=_by_prompt(surface, found, scale))
        found = replace(found, vectors=found.vectors[: len(found.top)])
        return replace(found, checked=checked, seconds=time.perf_counter() - began)


def _check_arguments(
    backend: str, preconditioner: Sequence[Tensor] | None, top: int, trace_probes: int, tolerance: float
) -> None:
    if backend not in ("lanczos", "pyhessian") or (backend == "pyhessian" and preconditioner is not None):
        raise UserError(f"backend, '{backend}': use 'lanczos', or 'pyhessian' for the plain Hessian")
    if top < 1 or trace_probes == 1 or not 0 < tolerance < 1:
        raise UserError("curvature: top must be at least 1, trace_probes 0 or at least 2, tolerance between 0 and 1")
    if preconditioner is not None and not all(bool((part > 0).all()) for part in preconditioner):
        raise UserError("preconditioner: must be positive")


def _checked_hessian(surface: Surface, known: dict[str, Any], check: Check) -> tuple[Operator, float | None]:
    """The Hessian, and the error of one of its products: what is known, else measured unless the check is off."""
    hessian = surface.hessian()
    if check == "off" or known.get("hessian") is not None:
        return hessian, None if check == "off" else known["hessian"]
    checked = surface.check(hessian)
    if not math.isnan(checked):
        known["hessian"] = checked
    return hessian, checked


def _by_lanczos(
    hessian: Operator, start: Curvature, top: int, smallest: bool, tolerance: float, max_products: int, capacity: int
) -> Curvature:
    """`start` with eigenvalues, whose residuals take one product each, and the trace; `vectors` include that of `smallest`."""
    found, why = start, ""
    try:
        limits: dict[str, Any] = {"tolerance": tolerance, "max_products": max_products, "capacity": capacity}
        pairs = eigenpairs(hessian, top, int(smallest), generator=sub_generator(start.seed, "eigenvalues"), **limits)
        found, why = _measured(found, hessian, pairs, smallest, tolerance)
        if start.trace_probes:
            limits = {"probes": start.trace_probes, "sketch": min(start.trace_probes, capacity)}
            draws = sub_generator(start.seed, "trace")
            trace, error = hutchpp(hessian, generator=draws, subspace=pairs.krylov, **limits)
            found = replace(found, trace=trace, trace_std_error=error)
    except NotFiniteError as problem:
        why = "; ".join(filter(None, (why, str(problem))))
    return replace(found, converged=not why, why=why, products=hessian.products)


def _check_memory(gradient: Tensor, capacity: int, pairs: int) -> None:
    """Check that Lanczos vectors fit: the basis, eigenvectors with an orthonormal copy, and eight more for products."""
    needed = (min(capacity, len(gradient)) + 2 * pairs + 8) * len(gradient) * gradient.element_size()
    what = f"curvature of {len(gradient) / 1e6:.3g} million parameters"
    require_memory(needed, gradient.device, what, "lower top, or probe a smaller model")


def _measured(
    start: Curvature, hessian: Operator, pairs: Eigenpairs, smallest: bool, tolerance: float
) -> tuple[Curvature, str]:
    """`start` with the eigenpairs and their measured residuals, and why these are not reliable."""
    both = zip(pairs.values, pairs.vectors, strict=True)
    residuals = np.array([length((hessian @ vector).sub_(vector, alpha=float(value))) for value, vector in both])
    bound, why = tolerance * float(np.abs(pairs.values).max()), pairs.why
    if pairs.converged and residuals.max() > max(2 * bound, 1e-300):
        why = (
            f"the measured residual {residuals.max():.1e} exceeds {bound:.1e}: rounding of {hessian.dtype}, or a loss "
            "that changes from call to call"
        )
    upper = pairs.upper
    found = replace(start, top=pairs.values[:upper], residuals=residuals[:upper], vectors=pairs.vectors)
    if smallest:  # a 1 × 1 Hessian has one eigenvalue, both the largest and the smallest
        found = replace(found, smallest=float(pairs.values[-1]), smallest_residual=float(residuals[-1]))
    return found, why


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
