"""Curvature of a loss: extreme eigenvalues, trace, spectral density, and the curvature along directions, of one of its operators."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypedDict, get_args

import numpy as np
from torch import Tensor

from sharpscope.config.run import Backend, Check, OperatorName
from sharpscope.errors import UserError, first_line, nearest
from sharpscope.memory import require_memory
from sharpscope.policy.directions import length
from sharpscope.surface.algorithms import (
    Krylov,
    eigenpairs,
    hutchpp,
    quadratic_form,
    spectral_density,
)
from sharpscope.surface.backends import BACKENDS
from sharpscope.surface.curvature_values import Curvature, residual, sub_generator
from sharpscope.surface.operators import FiniteDifference, Operator, Preconditioned
from sharpscope.surface.surface import LossFn, Surface, check_once, opened

PRODUCT = 3.5
"""Cost of a Hessian product, in forward and backward passes (experiments/benchmarks/speed.md)."""


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
    operator: OperatorName = "hessian",
    scale: Tensor | None = None,
    density_probes: int = 0,
    along: Mapping[str, Tensor] | None = None,
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
        backend: `lanczos`, or a second opinion on the Hessian's eigenvalues and trace: `pyhessian`, or `curvlinops` with its
            forward-over-reverse products, of a language model's `nll`.
        memory_mb: memory for Lanczos vectors [MiB]; with less memory Lanczos restarts more often.
        check: when to compare a Hessian product and the gradient with finite differences (see `check_derivatives`): `first` call
            with this closure and these parameters, `always` or `off`.
        by_prompt: standard errors of eigenvalues over prompts, where the surface knows the prompts; about one product each.
        operator: `hessian`; `finite_difference` for the Hessian by differences of gradients; of a language model's surface also
            `gauss_newton`, `fisher` and `empirical_fisher`.
        scale: the diagonal of P^(−1/2), (P,), for P^(−1/2) A P^(−1/2), whose eigenvectors are then meant; see `adam_scale`.
        density_probes: runs of Lanczos for the spectral density, of 40 products each; 0 for none.
        along: directions (P,) by name, in which the curvature vᵀAv/vᵀv is computed without `scale`.

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
    _check_arguments(backend, operator, top, trace_probes, tolerance)
    if backend != "lanczos" and (operator != "hessian" or scale is not None or density_probes):
        raise UserError(f"backend, '{backend}': computes eigenvalues and trace of the Hessian only")
    with opened(loss_fn, parameters, check) as (surface, known):
        began = time.perf_counter()
        loss, gradient = surface.gradient()
        start = Curvature(
            loss,
            length(gradient),
            seed=seed,
            trace_probes=trace_probes,
            operator=operator,
            preconditioned=scale is not None,
        )
        if not (math.isfinite(loss) and math.isfinite(start.gradient_norm)):
            norm = f"its gradient is not finite (norm {start.gradient_norm})"
            return replace(start, why=f"the loss is {loss}, or {norm}")
        wanted = top + int(smallest)
        capacity = lanczos_capacity(gradient, wanted, memory_mb, max_products)
        plain = surface.operator(operator)
        checked = check_once(known, operator, check, lambda: surface.check(plain))
        used = plain if scale is None else Preconditioned(plain, scale)
        limits = _Limits(tolerance=tolerance, max_products=max_products)
        if backend == "lanczos":
            found = _by_lanczos(used, start, top, int(smallest), limits, capacity)
            if by_prompt and len(found.vectors):
                found = replace(found, by_prompt=_by_prompt(surface, found, scale))
        else:
            found = BACKENDS[backend](surface, plain, start, wanted, **limits)
        if density_probes:
            draws = sub_generator(seed, "density")
            density = spectral_density(used, probes=density_probes, generator=draws)
            found = replace(found, density=density)
        return replace(
            found,
            along=_along(surface, plain, along or {}, operator, by_prompt),
            product_error=plain.error if isinstance(plain, FiniteDifference) else math.nan,
            vectors=found.vectors[: len(found.top)],
            products=used.products,
            checked=checked,
            seconds=time.perf_counter() - began,
        )


def _check_arguments(
    backend: str,
    operator: str,
    top: int,
    trace_probes: int,
    tolerance: float,
) -> None:
    for setting, value, allowed in (
        ("backend", backend, get_args(Backend)),
        ("operator", operator, get_args(OperatorName)),
    ):
        if value not in allowed:
            raise UserError(f"{setting}, '{value}'{nearest(value, allowed)}")
    if top < 1 or trace_probes == 1 or not 0 < tolerance < 1:
        raise UserError(
            "curvature: top must be at least 1, trace_probes 0 or at least 2, tolerance between 0 and 1"
        )


def lanczos_capacity(
    vector: Tensor,
    wanted: int,
    memory_mb: float = 2048.0,
    max_products: int = 200,
) -> int:
    """How many Lanczos vectors like (P,) fit into `memory_mb`; refused where what is needed besides does not fit into memory."""
    size = len(vector)
    capacity = max(2 * wanted + 3, int(memory_mb * 2**20 / vector.nbytes))
    # Lanczos vectors, eigenvectors with an orthonormal copy, and eight more for products.
    vectors = min(capacity, max_products, size) + 2 * wanted + 8
    what = f"curvature of {size / 1e6:.3g} million parameters"
    advice = "lower top, or probe a smaller model"
    require_memory(vectors * vector.nbytes, vector.device, what, advice)
    return capacity


def _along(
    surface: Surface,
    operator: Operator,
    directions: Mapping[str, Tensor],
    name: OperatorName,
    by_prompt: bool,
) -> dict[str, tuple[float, Tensor | None]]:
    """The curvature along each direction, and its values by prompt if they are wanted and known."""
    found: dict[str, tuple[float, Tensor | None]] = {}
    for label, direction in directions.items():
        value, each = quadratic_form(operator, direction), None
        if by_prompt and math.isfinite(value):
            each = surface.curvature_by_prompt(direction / length(direction), name)
        found[label] = value, each
    return found


class _Limits(TypedDict):
    """When an iteration for eigenvalues ends."""

    tolerance: float
    max_products: int


def _by_lanczos(
    hessian: Operator,
    start: Curvature,
    top: int,
    lower: int,
    limits: _Limits,
    capacity: int,
) -> Curvature:
    """`start` with eigenvalues, whose residuals take one product each, and the trace; `vectors` include that of `smallest`.

    `limits` and `capacity` are those of `eigenpairs`.
    """
    found, why = start, ""
    try:
        pairs = eigenpairs(
            hessian,
            top,
            lower,
            generator=sub_generator(start.seed, "eigenvalues"),
            capacity=capacity,
            **limits,
        )
        residuals = np.array(
            [residual(hessian, *pair) for pair in zip(pairs.values, pairs.vectors, strict=True)]
        )
        bound, why, upper = (
            limits["tolerance"] * float(np.abs(pairs.values).max()),
            pairs.why,
            pairs.upper,
        )
        if not why and residuals.max() > max(2 * bound, 1e-300):
            why = (
                f"the measured residual {residuals.max():.1e} exceeds {bound:.1e}: rounding of {hessian.dtype}, or a loss "
                "that changes from call to call"
            )
        found = replace(
            start,
            top=pairs.values[:upper],
            residuals=residuals[:upper],
            vectors=pairs.vectors,
        )
        if lower:  # a 1 × 1 Hessian has one eigenvalue, both the largest and the smallest
            found = replace(
                found,
                smallest=float(pairs.values[-1]),
                smallest_residual=float(residuals[-1]),
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


def _by_prompt(surface: Surface, found: Curvature, scale: Tensor | None) -> tuple[Tensor, ...]:
    """Values by prompt (k,) with mean λ for each eigenpair; empty if they are not known or cannot be computed."""
    rows = []
    for value, vector in zip([*found.top, found.smallest], found.vectors, strict=False):
        try:
            moved = vector if scale is None else vector * scale
            each = surface.curvature_by_prompt(moved, found.operator)
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
