"""Curvature of a loss: eigenvalues, trace and spectral density of its Hessian; the preconditioner of AdamW."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from sharpscope.config.probes import Backend, Check
from sharpscope.errors import UserError
from sharpscope.probes.fingerprint import remembered_closure
from sharpscope.probes.hessian.check import check_products
from sharpscope.probes.hessian.krylov import NotFiniteError, eigenpairs
from sharpscope.probes.hessian.operators import Operator, Scaled
from sharpscope.probes.hessian.result import Curvature, CurvatureSettings, Parts
from sharpscope.probes.hessian.spectrum import Trace, hutchpp, spectral_density
from sharpscope.probes.surface import ClosureSurface, LossFn, Surface, common_dtype, moved, untouched

MISMATCH = 0.05
"""Largest difference between an eigenvalue or trace and the mean of its values by prompt, relative to it or to 4 standard errors."""


def sub_generator(seed: int, name: str) -> torch.Generator:
    """A generator for one estimate, so that leaving out an estimate does not change the others."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def curvature(
    loss_fn: LossFn,
    parameters: Sequence[Tensor],
    seed: int = 0,
    *,
    top: int = CurvatureSettings.top,
    smallest: bool = CurvatureSettings.smallest,
    tolerance: float = CurvatureSettings.tolerance,
    max_products: int = CurvatureSettings.max_products,
    trace_probes: int = CurvatureSettings.trace_probes,
    density_samples: int = CurvatureSettings.density_samples,
    density_steps: int = CurvatureSettings.density_steps,
    backend: Backend = CurvatureSettings.backend,
    preconditioner: Sequence[Tensor] | None = None,
    basis_mb: float = CurvatureSettings.basis_mb,
    check: Check = "first",
) -> Curvature:
    """Curvature of any loss at the current parameters.

    Parameters, `.grad`, random state and attention kernel are restored afterwards, also if this raises.

    Args:
        loss_fn: zero-argument closure that computes a scalar loss from `parameters`. It must be deterministic (use eval mode);
            4 calls at the start and 2 at the end are compared. SDPA uses its MATH kernel inside; custom attention must have
            second derivatives.
        parameters: leaf tensors. Duplicates count once; tensors that do not require grad are left out.
        seed: seed of all random vectors.
        top: see `CurvatureSettings`, also for the following options.
        smallest: see `CurvatureSettings`.
        tolerance: see `CurvatureSettings`.
        max_products: see `CurvatureSettings`.
        trace_probes: see `CurvatureSettings`.
        density_samples: see `CurvatureSettings`.
        density_steps: see `CurvatureSettings`.
        backend: see `CurvatureSettings`.
        preconditioner: D, a positive tensor for each of `parameters` (see `adamw_preconditioner`); the estimates are then of
            D^(−1/2) H D^(−1/2).
        basis_mb: see `CurvatureSettings`.
        check: when to compare a Hessian product and the gradient with finite differences (see `check_products`): `first` call
            with this closure and these parameters, `always` or `off`.

    Raises:
        UserError: the closure does not return one number or is not deterministic, or the parameters cannot be perturbed.
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
    settings = CurvatureSettings(
        top, smallest, tolerance, max_products, trace_probes, density_samples, density_steps, backend, basis_mb
    )
    surface = ClosureSurface(loss_fn, parameters)
    chosen = None
    if preconditioner is not None:
        if len(preconditioner) != len(parameters):
            raise UserError(
                f"preconditioner, {len(preconditioner)} tensors: one for each of the {len(parameters)} parameters"
            )
        by_id = {id(p): d for p, d in zip(parameters, preconditioner, strict=True)}
        chosen = [by_id[id(p)] for p in surface.parameters]
    known = remembered_closure(loss_fn, surface.parameters) if check == "first" else {}
    with untouched(list(parameters)), surface.deterministic():
        result = curvature_of(
            surface, settings, seed=seed, preconditioner=chosen, check=check != "off" and "hessian" not in known
        )
    if result.checked is not None and not math.isnan(result.checked):
        known["hessian"] = result.checked
    return replace(result, checked=known.get("hessian", result.checked))


def curvature_of(
    surface: Surface,
    settings: CurvatureSettings,
    *,
    seed: int = 0,
    preconditioner: Sequence[Tensor] | None = None,
    operator: Operator | None = None,
    at: tuple[float, Tensor] | None = None,
    start: Tensor | None = None,
    base: Tensor | None = None,
    check: bool = True,
) -> Curvature:
    """`curvature` of a surface that is already guarded.

    Numbers that are not finite do not raise; they are NaN with `converged = False` and a reason.

    Args:
        surface: surface to probe.
        settings: estimates and their precision.
        seed: seed of all random vectors.
        preconditioner: see `curvature`.
        operator: operator to use instead of `surface.hessian()`, such as the Gauss-Newton matrix.
        at: (L(θ), ∇L(θ)) if already computed.
        start: (P,) starting vector of Lanczos in the coordinates of the parameters; None for `surface.start`.
        base: `surface.by_prompt()` at θ, for standard errors of eigenvalues and trace over prompts; None leaves them out. Only
            for the surface's Hessian, preconditioned or not.
        check: whether to compare products with finite differences, see `check_products`.
    """
    if settings.backend == "pyhessian":
        from sharpscope.probes.hessian.pyhessian import curvature_by_pyhessian

        if preconditioner is not None or operator is not None:
            raise UserError("backend, 'pyhessian': knows the plain Hessian only; use backend='lanczos'")
        return curvature_by_pyhessian(surface, settings, seed, check=check)
    began = time.perf_counter()
    clock: dict[str, float] = {}
    with _timed(clock, "gradient"):
        loss, gradient = surface.gradient() if at is None else at
    parts = Parts()
    if not (math.isfinite(loss) and bool(gradient.isfinite().all())):
        parts.why.append(
            f"the loss is {loss} and its gradient {'finite' if gradient.isfinite().all() else 'not finite'}"
        )
        return parts.result(loss, float(gradient.norm()), settings, seed, began, clock, 0)
    hessian = operator if operator is not None else surface.hessian()
    spent = hessian.products
    if check:
        parts.check(check_products(surface, hessian))
    spent = hessian.products - spent
    scale = None if preconditioner is None else _inverse_root(preconditioner, surface)
    if scale is not None:
        hessian = Scaled(hessian, scale)
    before = hessian.products
    forms = None if base is None else _forms(surface, base)
    try:
        with _timed(clock, "eigenvalues"):
            if settings.density_samples:
                start = None  # with a random start, the run for the eigenpairs is also the first sample of the density
            elif start is None:
                start = surface.start()
            if start is not None and isinstance(hessian, Scaled):
                start = hessian.unscaled(start)
            lowest = _eigenvalues(parts, hessian, settings, seed, start)
            if forms is not None:
                pairs = [*zip(parts.values, parts.vectors, strict=True)]
                pairs += [(parts.smallest, lowest)] if settings.smallest else []
                parts.by_prompt += [_eigenvalue_by_prompt(forms, float(value), v, scale) for value, v in pairs]
        with _timed(clock, "trace"):
            if settings.trace_probes:
                parts.trace = _trace(parts, hessian, settings, seed, forms if scale is None else None)
        with _timed(clock, "density"):
            if settings.density_samples:
                parts.density = spectral_density(
                    hessian,
                    samples=settings.density_samples,
                    steps=settings.density_steps,
                    generator=sub_generator(seed, "density"),
                    first=parts.krylov,
                )
        parts.krylov = None  # frees the basis
    except NotFiniteError as problem:
        parts.why.append(str(problem))
    return parts.result(loss, float(gradient.norm()), settings, seed, began, clock, spent + hessian.products - before)


@contextmanager
def _timed(clock: dict[str, float], part: str) -> Iterator[None]:
    """Context that writes the time of a part [seconds], unless it raises."""
    began = time.perf_counter()
    yield
    clock[part] = time.perf_counter() - began


def _forms(surface: Surface, base: Tensor) -> Callable[[Tensor, float], Tensor]:
    """vᵀH_i v of each prompt's Hessian H_i, (k,), for v (P,) and the order of magnitude of vᵀHv.

    Second central differences of the losses by prompt at θ ± h·v. At h the loss rises by about the square root of the precision:
    more than rounding, and little enough for fourth derivatives to be small.
    """
    # The terms of an objective are of the order of 1, also where they cancel (group-normalized advantages) and round as such.
    rise = max(float(base.abs().mean()), 1.0) * math.sqrt(torch.finfo(common_dtype(surface.parameters)).eps)

    def forms(along: Tensor, size: float) -> Tensor:
        """vᵀH_i v (k,) for v = `along` (P,), where `size` is the order of magnitude of |vᵀHv|."""
        if size == 0:  # as where every advantage is 0
            return torch.zeros_like(base)
        step = math.sqrt(2 * rise / size)
        total = -2 * base
        for sign in (1.0, -1.0):
            with moved(surface.parameters, along * (sign * step)):
                found = surface.by_prompt()
            assert found is not None
            total = total + found
        return total / step**2

    return forms


def _centered(each: Tensor | None, value: float) -> Tensor | None:
    """Values by prompt (k,) with mean `value`; None if theirs differs by more than MISMATCH, as with kinks or rounding."""
    if each is None or not bool(each.isfinite().all()):
        return None
    error = float(each.std()) / math.sqrt(len(each)) if len(each) > 1 else 0.0
    if abs(float(each.mean()) - value) > MISMATCH * max(abs(value), 4 * error):
        return None
    return each - each.mean() + value


def _eigenvalue_by_prompt(
    forms: Callable[[Tensor, float], Tensor], value: float, vector: Tensor, scale: Tensor | None
) -> Tensor | None:
    """Values by prompt (k,) whose mean is the eigenvalue; None where they are not known. `scale`: D^(−1/2), if preconditioned."""
    if value == 0 or not math.isfinite(value):
        return None
    return _centered(forms(vector if scale is None else vector * scale, abs(value)), value)


def _trace(
    parts: Parts,
    hessian: Operator,
    settings: CurvatureSettings,
    seed: int,
    forms: Callable[[Tensor, float], Tensor] | None,
) -> Trace:
    """The trace, with values by prompt if `forms` are given. The subspace of the eigenpairs is reused: only probes need products."""
    trace = hutchpp(
        hessian,
        probes=settings.trace_probes,
        generator=sub_generator(seed, "trace"),
        subspace=parts.krylov,
        sketch=settings.trace_probes,
        forms=forms,
    )
    return replace(trace, by_prompt=_centered(trace.by_prompt, trace.value))


def _eigenvalues(
    parts: Parts, hessian: Operator, settings: CurvatureSettings, seed: int, start: Tensor | None
) -> Tensor:
    """Eigenpairs with residuals, which need one more product each; returns the vector of the smallest."""
    item = torch.finfo(hessian.dtype).bits // 8
    pairs = eigenpairs(
        hessian,
        upper=settings.top,
        lower=int(settings.smallest),
        tolerance=settings.tolerance,
        max_products=settings.max_products,
        capacity=max(8, int(settings.basis_mb * 2**20 / (item * hessian.size))),
        start=start,
        generator=sub_generator(seed, "eigenvalues"),
    )
    measured = np.array(
        [
            float((hessian @ vector).sub_(vector, alpha=float(value)).norm())
            for value, vector in zip(pairs.values, pairs.vectors, strict=True)
        ]
    )
    upper = pairs.upper
    parts.values, parts.residuals, parts.vectors = pairs.values[:upper], measured[:upper], pairs.vectors[:upper]
    if settings.smallest:
        # A 1 × 1 Hessian has one eigenvalue, both the largest and the smallest.
        parts.smallest, parts.smallest_residual = float(pairs.values[-1]), float(measured[-1])
    parts.krylov = pairs.krylov
    bound = settings.tolerance * float(np.abs(pairs.values).max())
    if not pairs.converged:
        parts.why.append(pairs.why)
    elif measured.max() > max(2 * bound, 1e-300):
        parts.why.append(
            f"the measured residual {measured.max():.1e} exceeds {bound:.1e}: rounding of {hessian.dtype}, or a loss "
            "that changes from call to call"
        )
    if settings.top > hessian.size:
        parts.notes.append(f"top, {settings.top}: only {hessian.size} eigenvalues exist")
    return pairs.vectors[-1]


def _inverse_root(preconditioner: Sequence[Tensor], surface: Surface) -> Tensor:
    """D^(−1/2) (P,)."""
    for diagonal, parameter in zip(preconditioner, surface.parameters, strict=True):
        if diagonal.shape != parameter.shape or not bool((diagonal > 0).all()):
            raise UserError(
                f"preconditioner, shape {tuple(diagonal.shape)}: must be positive and shaped {tuple(parameter.shape)}"
            )
    return torch.cat([d.detach().reshape(-1) for d in preconditioner]).rsqrt()


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
    if lr <= 0 or not 0 <= beta1 < 1:
        raise UserError(f"lr, {lr}, beta1, {beta1}: lr must be positive and beta1 in [0, 1)")
    return (2 + 2 * beta1) / ((1 - beta1) * lr)
