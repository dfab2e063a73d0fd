"""Second opinions on the Hessian's eigenvalues and trace, by other libraries on the same surface."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sharpscope.errors import UserError, first_line
from sharpscope.policy.directions import length
from sharpscope.surface.curvature_values import Curvature, residual
from sharpscope.surface.language_model import LmSurface
from sharpscope.surface.operators import Operator, flatten
from sharpscope.surface.surface import Surface


def _library(module: str, distribution: str) -> ModuleType:
    """A module of another library.

    Raises:
        UserError: it is not installed.
    """
    try:
        return import_module(module)
    except ImportError as problem:
        name = module.partition(".")[0]
        raise UserError(
            f"backend, {name!r}: it is not installed; pip install {distribution}"
        ) from problem


class _PyHessianModel(nn.Module):
    """A surface as a model."""

    def __init__(self, surface: Surface) -> None:
        super().__init__()
        self.surface = surface

    def parameters(self, recurse: bool = True) -> Iterator[Any]:
        """The surface's parameters."""
        return iter(self.surface.parameters)

    def forward(self, _: object) -> Tensor:
        """The loss, with a second derivative of 0 for parameters that have none, which PyHessian cannot do without."""
        return self.surface.loss() + sum(
            0 * parameter.square().sum() for parameter in self.surface.parameters
        )


def by_pyhessian(
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
    library = _library("pyhessian.hessian", "pyhessian")
    model = _PyHessianModel(surface)
    parameters = surface.parameters
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
    pairs = [(float(value), unit) for value, unit in zip(values, units, strict=True)]
    positive = sum(value > 0 for value, _ in pairs)
    found = _opinion(start, hessian, "PyHessian", pairs, samples, positive, tolerance)
    if found.smallest < 0:
        return found
    return replace(found, smallest=math.nan, smallest_residual=math.nan)


def _opinion(
    start: Curvature,
    hessian: Operator,
    name: str,
    pairs: list[tuple[float, Tensor]],
    samples: Sequence[float],
    top: int,
    tolerance: float,
) -> Curvature:
    """`start` with eigenpairs that `name` found, the `top` largest and the smallest, their residuals by our products, and a trace."""
    pairs.sort(key=lambda pair: -pair[0])
    residuals = [residual(hessian, *pair) for pair in pairs]
    worst = max(residuals) / max(abs(value) for value, _ in pairs)
    loose = f"{name} stopped at a residual of {worst:.1e} of its largest |eigenvalue|"
    found = replace(
        start,
        smallest=pairs[-1][0],
        smallest_residual=residuals[-1],
        why=loose if worst > tolerance else "",
        trace_probes=len(samples),
        trace=float(np.mean(samples)) if len(samples) else math.nan,
        trace_std_error=math.nan,
    )
    if len(samples) > 1:
        error = float(np.std(samples, ddof=1)) / len(samples) ** 0.5
        found = replace(found, trace_std_error=error)
    if not top:
        return found
    values, vectors = zip(*pairs[:top], strict=True)
    found = replace(found, top=np.array(values), residuals=np.array(residuals[:top]))
    return replace(found, vectors=torch.stack(vectors))


class MeanNll(nn.Module):
    """The mean −ln π of the scored tokens of a language model's surface, as a model of rows (n, S) for functional calls."""

    def __init__(self, surface: LmSurface) -> None:
        super().__init__()
        self.model = surface.model
        self.temperature = surface.objective.temperature
        self._batch = surface.objective.batch

    def forward(self, rows: Tensor) -> Tensor:
        """The loss, (1,)."""
        batch = self._batch
        logits = self.model(input_ids=batch.input_ids, use_cache=False).logits[:, :-1]
        logp = torch.log_softmax(logits / self.temperature, -1)
        taken = logp.gather(2, batch.input_ids[:, 1:, None])[..., 0] * batch.scored[:, 1:]
        return -(taken.sum() / batch.scored.sum()).reshape(1)


@contextmanager
def composed_silu(model: nn.Module) -> Iterator[None]:
    """Context in which SiLU is x·σ(x) of two operations: PyTorch's kernel of its backward pass has no forward derivative."""
    found = [m for m in model.modules() if type(m).__name__ in ("SiLU", "SiLUActivation")]
    try:
        for module in found:
            module.forward = lambda x: x * torch.sigmoid(x)
        yield
    finally:
        for module in found:
            del module.forward


def by_curvlinops(
    surface: Surface,
    hessian: Operator,
    start: Curvature,
    top: int,
    tolerance: float,
    max_products: int,
) -> Curvature:
    """`start` with eigenvalues of curvlinops' Hessian by SciPy's Lanczos, their residuals by our products, and its Hutch++ trace."""
    library = _library("curvlinops", "curvlinops-for-pytorch")
    if not isinstance(surface, LmSurface) or surface.objective.name != "nll":
        raise UserError(
            "backend, 'curvlinops': takes the nll of a language model; use lanczos or pyhessian"
        )
    from scipy.sparse.linalg import eigsh

    parameters = list(surface.parameters)
    rows = torch.zeros(1, 1)
    data = [(rows, torch.zeros(1))]
    size = hessian.size
    model = MeanNll(surface)
    options = {"check_deterministic": False, "num_data": 1}
    # The loss is the model's output itself: a mean over one number.
    first = nn.L1Loss(reduction="sum")
    torch.manual_seed(start.seed)
    np.random.seed(start.seed)
    samples = []
    try:
        with composed_silu(surface.model):
            operator = library.HessianLinearOperator(model, first, parameters, data, **options)
            matrix = operator.to_scipy()
            found = [
                eigsh(
                    matrix,
                    min(count, size - 2),
                    which=which,
                    tol=tolerance,
                    maxiter=max_products,
                )
                for which, count in (("LA", max(top - 1, 1)), ("SA", 1))
            ]
            for _ in range(start.trace_probes):
                samples.append(float(library.hutchinson_trace(operator, num_matvecs=1)))
    except RuntimeError as problem:
        raise UserError(
            f"backend, 'curvlinops': cannot differentiate this model ({first_line(problem)}); use lanczos or pyhessian"
        ) from problem
    pairs = [
        (float(value), torch.from_numpy(vector).to(parameters[0]))
        for values, vectors in found
        for value, vector in zip(values, vectors.T, strict=True)
    ]
    bound = max(2 * tolerance, 1e-6)
    return _opinion(start, hessian, "SciPy's Lanczos", pairs, samples, len(pairs) - 1, bound)


BACKENDS: dict[str, Callable[..., Curvature]] = {
    "pyhessian": by_pyhessian,
    "curvlinops": by_curvlinops,
}
"""Backend → (surface, its Hessian, what is known, number of eigenvalues, tolerance, max_products) → curvature."""
