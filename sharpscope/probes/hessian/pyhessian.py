"""PyHessian's eigenvalues and trace behind the interface of `curvature`, for comparison.

This works around defects of PyHessian 0.1: a second `hessian()` on the same parameters doubles its numbers because `.grad`
keeps a graph; the model stays in eval mode; a parameter that is unused or enters linearly raises; random numbers come from
the global generator. Its `density()` calls `torch.eig`, which PyTorch has removed, so densities come from our quadrature. It
reports no standard error of the trace; the one here is that of its samples, which is biased by its stopping rule (it stops
when the running mean changes little).
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sharpscope.probes.hessian.check import check_products
from sharpscope.probes.hessian.result import Curvature, CurvatureSettings, Parts
from sharpscope.probes.hessian.spectrum import Trace, spectral_density
from sharpscope.probes.surface import Surface, size_of

DENSITY_REASON = "density: ours, because PyHessian 0.1 calls torch.eig, which PyTorch has removed"


@dataclass(frozen=True)
class PyHessianEstimate:
    """Results of PyHessian.

    Attributes:
        values: (k,) eigenvalues in descending order of magnitude.
        vectors: (k, P) eigenvectors, 0 at parameters without a second derivative.
        eigenvalue_products: number of Hessian products of the power iterations.
        trace_samples: vᵀHv of each Rademacher probe; their mean is the trace.
    """

    values: np.ndarray
    vectors: Tensor
    eigenvalue_products: int
    trace_samples: np.ndarray

    @property
    def trace(self) -> float:
        """Mean of the samples."""
        return float(self.trace_samples.mean())

    @property
    def trace_std_error(self) -> float:
        """Standard error of the samples' mean; NaN for one sample."""
        count = len(self.trace_samples)
        return float(self.trace_samples.std(ddof=1)) / math.sqrt(count) if count > 1 else math.nan


class _Shim:
    """The part of a model's interface that `pyhessian.hessian` uses, around a closure."""

    def __init__(self, surface: Surface, parameters: Sequence[Tensor]) -> None:
        self._surface, self._parameters = surface, parameters

    def parameters(self) -> Sequence[Tensor]:
        return self._parameters

    def eval(self) -> _Shim:
        return self

    def zero_grad(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def __call__(self, _: Any) -> Tensor:
        return self._surface.loss()


def pyhessian_estimate(
    surface: Surface,
    *,
    top: int = 1,
    max_iterations: int = 100,
    tolerance: float = 1e-3,
    eigenvalues: bool = True,
    trace: bool = True,
    seed: int = 0,
) -> PyHessianEstimate:
    """PyHessian's `eigenvalues(max_iterations, tolerance, top)` and `trace(max_iterations, tolerance)` of a closure.

    Without `eigenvalues` k = 0; without `trace` the trace is NaN. Call it inside `untouched` or `guarded`, which restore `.grad`
    and the global random state.
    """
    library: Any = import_module("pyhessian.hessian")  # `pyhessian.hessian` the attribute is the class of that name

    parameters = _curved(surface)
    if not parameters:
        return PyHessianEstimate(np.zeros(top), torch.zeros(top, size_of(surface.parameters)), 0, np.zeros(1))
    products = 0
    original = library.hessian_vector_product

    def counting(*arguments: Any) -> Any:
        """The original's result; counts the call."""
        nonlocal products
        products += 1
        return original(*arguments)

    shim = _Shim(surface, parameters)
    device = "cuda" if parameters[0].is_cuda else "cpu"
    shim.zero_grad()
    torch.manual_seed(seed)
    library.hessian_vector_product = counting
    try:
        # The constructor moves its data to CUDA; pass empty tensors, since the closure has its own data.
        nothing = (torch.zeros(0), torch.zeros(0))
        problem = library.hessian(shim, lambda loss, _: loss, data=nothing, cuda=device == "cuda")
        values, vectors = (
            problem.eigenvalues(maxIter=max_iterations, tol=tolerance, top_n=top) if eigenvalues else ([], [])
        )
        spent = products
        samples = problem.trace(maxIter=max_iterations, tol=tolerance) if trace else [math.nan]
    finally:
        library.hessian_vector_product = original
        shim.zero_grad()
    return PyHessianEstimate(
        np.array(values),
        torch.stack([_embed(vector, parameters, surface.parameters) for vector in vectors])
        if vectors
        else torch.zeros(0, size_of(surface.parameters)),
        spent,
        np.array(samples),
    )


def curvature_by_pyhessian(
    surface: Surface, settings: CurvatureSettings, seed: int, *, check: bool = True
) -> Curvature:
    """`curvature` with PyHessian's eigenvalues and trace; residuals take one more product each.

    PyHessian finds eigenvalues by magnitude, so `largest` is NaN unless a positive one is among the `top` (+ 1 with `smallest`),
    and `smallest` unless a negative one is.
    """
    began = time.perf_counter()
    loss, gradient = surface.gradient()
    clock = {"gradient": time.perf_counter() - began}
    parts, mark = Parts(), time.perf_counter()
    norm = float(gradient.norm())
    if not (math.isfinite(loss) and math.isfinite(norm)):
        parts.why.append(f"the loss is {loss} and its gradient's norm {norm}")
        return parts.result(loss, norm, settings, seed, began, clock, 0)
    hessian = surface.hessian()
    if check:
        parts.check(check_products(surface, hessian))
    estimate = pyhessian_estimate(
        surface,
        top=settings.top + int(settings.smallest),
        max_iterations=settings.max_products,
        tolerance=settings.tolerance,
        trace=settings.trace_probes > 0,
        seed=seed,
    )
    residuals = np.array(
        [
            float((hessian @ vector).sub_(vector, alpha=float(value)).norm())
            for value, vector in zip(estimate.values, estimate.vectors, strict=True)
        ]
    )
    clock["eigenvalues"] = time.perf_counter() - mark
    order = [i for i in np.argsort(-estimate.values) if estimate.values[i] > 0][: settings.top]
    scale = float(np.abs(estimate.values).max())
    if order:
        parts.values, parts.residuals, parts.vectors = estimate.values[order], residuals[order], estimate.vectors[order]
        if residuals[order].max() > settings.tolerance * scale:
            parts.why.append(
                f"PyHessian stopped at a residual of {residuals[order].max() / scale:.1e} of its largest |eigenvalue|"
            )
    if len(order) < settings.top:
        parts.why.append(
            f"PyHessian orders by magnitude and found {len(order)} positive eigenvalues, not {settings.top}"
        )
    if settings.smallest:
        last = int(np.argmin(estimate.values))
        if estimate.values[last] < 0:
            parts.smallest, parts.smallest_residual = float(estimate.values[last]), float(residuals[last])
            if residuals[last] > settings.tolerance * scale:
                parts.why.append(f"PyHessian's smallest eigenvalue has a residual of {residuals[last] / scale:.1e}")
        else:
            parts.why.append("PyHessian orders by magnitude and found no negative eigenvalue")
    if settings.trace_probes:
        parts.trace = Trace(
            estimate.trace, estimate.trace_std_error, len(estimate.trace_samples), len(estimate.trace_samples)
        )
    if settings.density_samples:
        mark = time.perf_counter()
        parts.density = spectral_density(
            hessian,
            samples=settings.density_samples,
            steps=settings.density_steps,
            generator=torch.Generator().manual_seed(seed),
        )
        clock["density"] = time.perf_counter() - mark
        parts.notes.append(DENSITY_REASON)
    products = (
        estimate.eigenvalue_products + hessian.products + (len(estimate.trace_samples) if settings.trace_probes else 0)
    )
    return parts.result(loss, norm, settings, seed, began, clock, products)


def _curved(surface: Surface) -> list[Tensor]:
    """The parameters with a second derivative; PyHessian raises on the others, whose rows are 0."""
    gradients = torch.autograd.grad(surface.loss(), surface.parameters, create_graph=True, allow_unused=True)
    active = [g for g in gradients if g is not None and g.requires_grad]
    if not active:
        return []
    second = torch.autograd.grad(active, surface.parameters, [torch.ones_like(g) for g in active], allow_unused=True)
    return [
        p
        for p, g, s in zip(surface.parameters, gradients, second, strict=True)
        if s is not None and g is not None and g.requires_grad
    ]


def _embed(vector: Sequence[Tensor], parameters: Sequence[Tensor], everything: Sequence[Tensor]) -> Tensor:
    given = {id(parameter): part for parameter, part in zip(parameters, vector, strict=True)}
    parts = [
        given[id(p)].detach().reshape(-1) if id(p) in given else torch.zeros(p.numel(), device=p.device)
        for p in everything
    ]
    flat = torch.cat(parts)
    return flat / flat.norm() if flat.norm() > 0 else flat
