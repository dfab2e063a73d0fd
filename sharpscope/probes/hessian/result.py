"""The values that a curvature probe takes and gives: settings, the Hessian in numbers, and its rows."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from sharpscope.errors import UserError
from sharpscope.probes.estimate import Estimate
from sharpscope.probes.hessian.density import Density
from sharpscope.probes.hessian.krylov import Krylov
from sharpscope.probes.hessian.trace import Trace, t_interval

Backend = Literal["lanczos", "pyhessian"]


@dataclass(frozen=True)
class CurvatureSettings:
    """How much is spent on which estimate; one unit is a Hessian-vector product.

    Attributes:
        top: eigenpairs wanted at the upper end.
        smallest: also the smallest (signed) eigenvalue.
        tolerance: bound of a residual ‖Hv − λv‖ relative to the largest |λ|.
        max_products: products for the eigenpairs at most.
        trace_probes: random probes of the trace (at least 2), 0: no trace.
        density_samples, density_steps: random starts and Lanczos steps of the spectral density; 0 samples: none. With samples the
            eigenpairs start at random too (their run is the first sample), and the other samples' nodes would show an
            eigenvalue that they missed; with none they start at `Surface.start` where there is one, which may lean (see
            `eigenpairs`).
        backend: `lanczos` (ours) or `pyhessian` (its eigenvalues and trace, for comparison).
        basis_mb: memory for Lanczos vectors [MiB]; fewer vectors mean restarts, not other results.
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
    """The Hessian at one point, in numbers.

    Attributes:
        loss, gradient_norm: L(θ) and ‖∇L(θ)‖₂.
        largest, smallest: extreme signed eigenvalues; NaN with the reason in `why` if they could not be had.
        trace, trace_std_error: trace and its standard error over `trace_probes` random probes (0: not asked for), with
            `trace_probes` − 1 degrees of freedom; see `trace_interval`.
        has_smallest: whether `smallest` was asked for.
        top: (k,) the k largest eigenvalues, largest first.
        residuals: (k,) measured ‖Hv − λv‖₂ of `top`; `smallest_residual` likewise.
        vectors: (k, P) unit eigenvectors of `top`.
        density: spectral density; None if not asked for.
        converged: every eigenpair met the tolerance and every number is finite; `why` says what did not. An eigenpair that met
            it need not be the extreme one (see `eigenpairs`).
        products: Hessian-vector products spent on everything.
        seed, seconds, backend: how it was had.
        notes: what a reader should know, e.g. why a part comes from elsewhere.
        checked: relative error that `check_products` found; None = not checked; NaN = it could not tell (`notes` says so).
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

    def trace_interval(self, level: float = 0.95) -> tuple[float, float]:
        """Confidence interval of the trace, Student's t with `trace_probes` − 1 degrees of freedom; NaN without a trace."""
        if not math.isfinite(self.trace_std_error):
            return math.nan, math.nan
        return t_interval(self.trace, self.trace_std_error, self.trace_probes, level)

    def estimates(self, probe: str = "curvature", prefix: str = "") -> list[Estimate]:
        """Rows of the `probes` table: `gradient_norm`, `largest`, `eigenvalue_i`, `smallest`, `trace`, `density`."""

        def row(part: str, quantity: str, value: float, **rest: Any) -> Estimate:
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
        for index, (value, residual) in enumerate(zip(self.top, self.residuals, strict=True)):
            name = "largest" if index == 0 else f"eigenvalue_{index + 1}"
            rows.append(row("eigenvalues", name, float(value), residual=float(residual), **eigen))
        if self.has_smallest:
            rows.append(row("eigenvalues", "smallest", self.smallest, residual=self.smallest_residual, **eigen))
        if self.trace_probes:
            rows.append(
                row("trace", "trace", self.trace, std_error=self.trace_std_error, samples=self.trace_probes, **reason)
            )
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
    """The estimates made up to now; `result` turns them into a `Curvature`."""

    def __init__(self) -> None:
        self.values = self.residuals = np.full(0, np.nan)
        self.smallest = self.smallest_residual = math.nan
        self.vectors = torch.zeros(0)
        self.trace: Trace | None = None
        self.density: Density | None = None
        self.krylov: Krylov | None = None
        self.checked: float | None = None
        self.why: list[str] = []
        self.notes: list[str] = []

    def check(self, error: float) -> None:
        """Keep what `check_products` found."""
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
        """The value; what is missing is NaN."""
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
            notes=tuple(self.notes),
            seconds_by_part=clock,
        )
