"""Processor time and memory of curvature against curvlinops, hessian-eigenthings and PyHessian, on the same loss in one run.

The peers are no dependencies: `pip install --no-deps curvlinops-for-pytorch hessian-eigenthings pyhessian`, and einops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from experiments.benchmarks.common import (
    Row,
    costs,
    described,
    model_of,
    peak,
    random_rows,
    ratios,
    seconds,
)
from sharpscope.surface import Objective, lm_surface
from sharpscope.surface.algorithms import Krylov, eigenpairs, hutchpp, spectral_density
from sharpscope.surface.backends import MeanNll, composed_silu
from sharpscope.surface.language_model import LmSurface, token_batch
from sharpscope.surface.operators import flatten, unflatten

PRODUCTS, TRACE, TOLERANCE = 40, 12, 1e-2
"""Products of a density and of the eigenvalue of libraries that take no tolerance; of a trace; relative tolerance of λ_max."""
Works = dict[str, Callable[[], Any]]
"""What is asked of a library: `product`, `eigenvalue`, `trace` and `density`."""
TITLES = {
    "product": "a Hessian product",
    "eigenvalue": f"largest eigenvalue, tolerance {TOLERANCE:.0%}",
    "trace": f"a trace of {TRACE} products",
    "density": f"one run of {PRODUCTS} products for a density",
}


def ours(surface: LmSurface, vector: Tensor) -> Works:
    """sharpscope: graphs of the gradient kept, Lanczos that tests each product."""
    operator, draws = surface.hessian(), torch.Generator().manual_seed(0)

    def trace() -> float:
        space = Krylov(operator, 8, draws)
        for _ in range(8):
            space.extend()
        return hutchpp(operator, space, TRACE - 8, draws)[0]

    def eigenvalue() -> float:
        options = {"tolerance": TOLERANCE, "max_products": 60, "capacity": 60, "generator": draws}
        return float(eigenpairs(operator, 1, 0, **options).values[0])  # type: ignore[arg-type]

    return {
        "product": lambda: operator @ vector,
        "eigenvalue": eigenvalue,
        "trace": trace,
        "density": lambda: spectral_density(
            operator, probes=1, iterations=PRODUCTS, generator=draws
        ),
    }


def curvlinops(surface: LmSurface, vector: Tensor) -> Works:
    """curvlinops 3: products forward over reverse, SciPy's `eigsh`."""
    import curvlinops as library
    from curvlinops.papyan2020traces.spectrum import fast_lanczos
    from scipy.sparse.linalg import eigsh

    operator = library.HessianLinearOperator(
        MeanNll(surface),
        torch.nn.L1Loss(reduction="sum"),  # the model's output is the loss itself
        list(surface.parameters),
        [(torch.zeros(1, 1), torch.zeros(1))],
        check_deterministic=False,
        num_data=1,
    )
    matrix = operator.to_scipy()
    return {
        "product": lambda: operator @ vector,
        "eigenvalue": lambda: float(eigsh(matrix, 1, which="LA", tol=TOLERANCE)[0][0]),
        "trace": lambda: library.hutchpp_trace(operator, TRACE),
        "density": lambda: fast_lanczos(operator, PRODUCTS),
    }


def eigenthings(surface: LmSurface, vector: Tensor) -> Works:
    """hessian-eigenthings 1: a forward and two reverse passes a product, Lanczos of a fixed number of steps."""
    import hessian_eigenthings as library

    operator = library.HessianOperator(
        MeanNll(surface), [(torch.zeros(1, 1),)], lambda model, batch: model(batch[0]).sum()
    )
    return {
        "product": lambda: operator.matvec(vector),
        "eigenvalue": lambda: float(
            library.lanczos(operator, k=1, max_iter=PRODUCTS, which="LA", seed=0).eigenvalues[0]
        ),
        "trace": lambda: library.hutch_plus_plus(operator, num_matvecs=TRACE, seed=0),
        "density": lambda: library.spectral_density(
            operator, num_runs=1, lanczos_steps=PRODUCTS, seed=0
        ),
    }


def pyhessian(surface: LmSurface, vector: Tensor) -> Works:
    """PyHessian 0.1: graphs of the gradient kept, power iteration until two values agree, Hutchinson's trace.

    Its density calls `torch.eig`, which PyTorch has removed.
    """
    from pyhessian.hessian import hessian
    from pyhessian.utils import hessian_vector_product

    data = (torch.zeros(1, 1), torch.zeros(1))
    problem = hessian(MeanNll(surface), lambda loss, _: loss.sum(), data=data, cuda=False)
    parts = unflatten(vector, surface.parameters)

    def product() -> Tensor:
        found = hessian_vector_product(problem.gradsH, problem.params, parts)
        return flatten(found, surface.parameters)

    def trace() -> float:
        samples: list[float] = []
        while (
            len(samples) < TRACE
        ):  # it stops at a tolerance of 0, too, where the mean so far is negative
            samples += problem.trace(maxIter=TRACE - len(samples), tol=0)
        return sum(samples) / TRACE

    return {
        "product": product,
        "eigenvalue": lambda: problem.eigenvalues(maxIter=200, tol=TOLERANCE)[0][0],
        "trace": trace,
    }


LIBRARIES: Mapping[str, Callable[[LmSurface, Tensor], Works]] = {
    "curvlinops": curvlinops,
    "hessian-eigenthings": eigenthings,
    "PyHessian": pyhessian,
}


@contextmanager
def opened(model_name: str, rows: int, length: int) -> Iterator[tuple[LmSurface, str]]:
    """The surface of the `nll` of random rows, and its description."""
    model = model_of(model_name)
    ids, mask = random_rows(model, rows, length)
    objective = Objective("nll", token_batch(ids, torch.ones_like(ids), mask))
    with lm_surface(model, objective, check="off") as surface, composed_silu(model):
        yield surface, f"{rows} × {length} tokens; {described(model)}"


def peers(model_name: str, repeats: int, rows: int, length: int) -> list[Row]:
    """Our costs in those of each library, and the error of each one's largest eigenvalue; each library is timed with ours in turns."""
    made = []
    with opened(model_name, rows, length) as (surface, note):
        vector = torch.randn(sum(p.numel() for p in surface.parameters))
        mine, operator = ours(surface, vector), surface.hessian()
        exact = eigenpairs(
            operator, 1, 0, tolerance=1e-5, max_products=200, capacity=200,
            generator=torch.Generator().manual_seed(1),
        ).values[0]  # fmt: skip
        others = {name: library(surface, vector) for name, library in LIBRARIES.items()}
        for name, works in others.items():
            torch.testing.assert_close(works["product"](), mine["product"](), rtol=1e-3, atol=1e-3)
            print(f"{name}: λ_max off by {works['eigenvalue']() / exact - 1:+.1e}", flush=True)
        print(f"ours: λ_max off by {mine['eigenvalue']() / exact - 1:+.1e}", flush=True)
        for what, title in TITLES.items():
            able = {"ours": mine} | {name: works for name, works in others.items() if what in works}
            found = costs({name: works[what] for name, works in able.items()}, repeats)
            held = {name: peak(works[what]) for name, works in able.items()}
            for name in list(able)[1:]:
                times = f"{seconds(found['ours'])} against {seconds(found[name])}"
                said = f"{times}; memory {held['ours'] / held[name]:.2f}; {note}"
                turns = ratios(found["ours"], found[name])
                made.append(Row.of_turns(f"{title}, in {name}'s", turns, "×", "", "", said))
                print(made[-1], flush=True)
    return made
