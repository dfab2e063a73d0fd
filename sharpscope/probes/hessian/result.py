"""Settings and results of the curvature probes."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sharpscope.config.probes import Backend
from sharpscope.errors import UserError
from sharpscope.probes.estimate import Estimate, html_table, with_prompts
from sharpscope.probes.hessian.krylov import Krylov
from sharpscope.probes.hessian.spectrum import Density, Trace, t_interval


@dataclass(frozen=True)
class CurvatureSettings:
    """The curvature estimates to compute and their precision.

    Attributes:
        top: number of largest eigenpairs.
        smallest: also compute the smallest (signed) eigenvalue.
        tolerance: bound of the residuals ‖Hv − λv‖ relative to the largest |λ|.
        max_products: maximum number of Hessian-vector products for the eigenpairs.
        trace_probes: random probes of the trace, at least 2; 0 for no trace.
        density_samples: random starts of the spectral density; 0 for no density. With a density, Lanczos for the eigenpairs
            starts at random and is its first sample; without one it starts at `Surface.start` if available, see `eigenpairs`.
        density_steps: Lanczos steps of each start of the density.
        backend: `lanczos`, or `pyhessian` for PyHessian's eigenvalues and trace.
        basis_mb: memory for Lanczos vectors [MiB]; with less memory Lanczos restarts more often.
    """

    top: int = 1
    smallest: bool = True
    tolerance: float = 1e-3
    max_products: int = 200
    trace_probes: int = 16
    density_samples: int = 4
    density_steps: int = 20
    backend: Backend = "lanczos"
    basis_mb: float = 2048.0

    def __post_init__(self) -> None:
        if self.backend not in ("lanczos", "pyhessian"):
            raise UserError(f"backend, '{self.backend}': use 'lanczos' or 'pyhessian'")
        if self.top < 1:
            raise UserError(f"top, {self.top}: at least 1")
        if self.trace_probes == 1:
            raise UserError("trace_probes, 1: at least 2 (one probe has no standard error), or 0 for no trace")
        if not 0 < self.tolerance < 1:
            raise UserError(f"tolerance, {self.tolerance}: a relative residual between 0 and 1")


@dataclass(frozen=True)
class Curvature:
    """Curvature of a loss at one point.

    Attributes:
        loss: L(θ).
        gradient_norm: ‖∇L(θ)‖₂.
        largest: largest eigenvalue; NaN if not available.
        smallest: smallest (signed) eigenvalue; NaN if not available.
        trace: trace of the Hessian; NaN if not requested.
        trace_std_error: standard error of the trace, with `trace_probes` − 1 degrees of freedom.
        trace_probes: number of random probes of the trace; 0 if not requested.
        has_smallest: whether `smallest` was requested.
        top: (k,) largest eigenvalues in descending order.
        residuals: (k,) measured ‖Hv − λv‖₂ of `top`.
        smallest_residual: measured residual of `smallest`.
        vectors: (k, P) unit eigenvectors of `top`.
        density: spectral density; None if not requested.
        converged: whether all eigenpairs met the tolerance and all numbers are finite. An eigenpair that met it need not be the
            extreme one, see `eigenpairs`.
        why: what did not converge.
        products: total number of Hessian-vector products.
        seed: seed of the random vectors.
        seconds: wall-clock time.
        backend: `lanczos` or `pyhessian`.
        notes: remarks, such as parts computed by another backend.
        seconds_by_part: wall-clock time of each part.
        checked: relative error found by `check_products`; None if not checked, NaN if inconclusive.
        by_prompt: vᵀH_i v of each prompt's Hessian, (k,) each, for `top` and then `smallest`; None where not known, empty if not
            requested. Their standard error is that of an eigenvalue to first order, with the eigenvector fixed; it
            is too large where it is not small compared with the distance to the next eigenvalue.
        trace_by_prompt: the trace of each prompt's Hessian by the same random vectors, (k,); None if not known.
    """

    loss: float
    gradient_norm: float
    largest: float
    smallest: float
    trace: float
    trace_std_error: float
    trace_probes: int
    has_smallest: bool
    top: np.ndarray
    residuals: np.ndarray
    smallest_residual: float
    vectors: Tensor
    density: Density | None
    converged: bool
    why: str
    products: int
    seed: int
    seconds: float
    backend: str
    notes: tuple[str, ...] = ()
    seconds_by_part: dict[str, float] = field(default_factory=dict)
    checked: float | None = None
    by_prompt: tuple[Tensor | None, ...] = ()
    trace_by_prompt: Tensor | None = None

    def _repr_html_(self) -> str:
        rows = {"loss": f"{self.loss:.4g}", "gradient norm": f"{self.gradient_norm:.4g}"}
        for index, (value, residual) in enumerate(zip(self.top, self.residuals, strict=True), 1):
            rows[f"eigenvalue {index}"] = f"{value:.4g} (residual {residual:.1e})"
        if self.has_smallest:
            rows["smallest eigenvalue"] = f"{self.smallest:.4g} (residual {self.smallest_residual:.1e})"
        if self.trace_probes:
            low, high = self.trace_interval()
            rows["trace"] = f"{self.trace:.4g} (95 % interval {low:.4g} to {high:.4g})"
        rows["converged"] = "yes" if self.converged else f"no: {self.why}"
        return html_table("curvature", rows)

    def trace_interval(self, level: float = 0.95) -> tuple[float, float]:
        """Student's t confidence interval of the trace; NaN without a trace."""
        if not math.isfinite(self.trace_std_error):
            return math.nan, math.nan
        return t_interval(self.trace, self.trace_std_error, self.trace_probes, level)

    def estimates(self, probe: str = "curvature", prefix: str = "") -> list[Estimate]:
        """Rows of the `probes` table: `gradient_norm`, `largest`, `eigenvalue_i`, `smallest`, `trace`, `density`."""

        def row(part: str, quantity: str, value: float, **rest: Any) -> Estimate:
            """A row of the probes table with the time of its part."""
            return Estimate(
                probe, prefix + quantity, value, seed=self.seed, seconds=self.seconds_by_part.get(part, 0.0), **rest
            )

        eigen = {"converged": self.converged, "why": self.why}
        reason = {
            "converged": None if math.isfinite(self.trace) else False,
            "why": "" if math.isfinite(self.trace) else self.why,
        }
        rows = [
            row(
                "gradient",
                "gradient_norm",
                self.gradient_norm,
                why="" if math.isfinite(self.gradient_norm) else self.why,
            )
        ]
        names = [
            ("largest" if index == 0 else f"eigenvalue_{index + 1}", float(value), float(residual))
            for index, (value, residual) in enumerate(zip(self.top, self.residuals, strict=True))
        ]
        names += [("smallest", self.smallest, self.smallest_residual)] if self.has_smallest else []
        for (name, value, residual), each in zip_longest(names, self.by_prompt):
            rows.append(with_prompts(row("eigenvalues", name, value, residual=residual, **eigen), each))
        if self.trace_probes:
            found = row(
                "trace", "trace", self.trace, std_error=self.trace_std_error, samples=self.trace_probes, **reason
            )
            rows.append(with_prompts(found, self.trace_by_prompt))
        if self.density is not None:
            count = len(self.density.nodes)
            nodes, weights = self.density.nodes.ravel(), self.density.weights.ravel() / count
            rows += [
                row("density", "density", float(weight), rho=float(node), samples=count)
                for node, weight in zip(nodes, weights, strict=True)
                if weight > 0
            ]
        return rows


class Parts:
    """Estimates collected so far; `result` makes a `Curvature` of them."""

    def __init__(self) -> None:
        self.values = self.residuals = np.full(0, np.nan)
        self.smallest = self.smallest_residual = math.nan
        self.vectors = torch.zeros(0)
        self.trace: Trace | None = None
        self.density: Density | None = None
        self.krylov: Krylov | None = None
        self.checked: float | None = None
        self.by_prompt: list[Tensor | None] = []
        self.why: list[str] = []
        self.notes: list[str] = []

    def check(self, error: float) -> None:
        """Store the result of `check_products`."""
        self.checked = error
        if math.isnan(error):
            self.notes.append(
                "products are not checked: one is not finite, or finite differences of gradients disagree among "
                "themselves (kinks, or rounding)"
            )

    def result(
        self,
        loss: float,
        norm: float,
        settings: CurvatureSettings,
        seed: int,
        began: float,
        clock: dict[str, float],
        products: int,
    ) -> Curvature:
        """The result, with NaN for missing estimates."""
        nothing = len(self.values) == 0
        return Curvature(
            loss=loss,
            gradient_norm=norm,
            largest=math.nan if nothing else float(self.values[0]),
            smallest=self.smallest,
            trace=self.trace.value if self.trace else math.nan,
            trace_std_error=self.trace.std_error if self.trace else math.nan,
            trace_probes=self.trace.probes if self.trace else settings.trace_probes,
            has_smallest=settings.smallest,
            top=np.full(1, np.nan) if nothing else self.values,
            residuals=np.full(1, np.nan) if nothing else self.residuals,
            smallest_residual=self.smallest_residual,
            vectors=self.vectors,
            density=self.density,
            converged=not self.why,
            why="; ".join(self.why),
            products=products,
            seed=seed,
            seconds=time.perf_counter() - began,
            backend=settings.backend,
            checked=self.checked,
            by_prompt=tuple(self.by_prompt),
            trace_by_prompt=self.trace.by_prompt if self.trace else None,
            notes=tuple(self.notes),
            seconds_by_part=clock,
        )
