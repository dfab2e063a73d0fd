"""What is found of a loss's curvature at one point, and its rows of the `probes` table."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from sharpscope.config.run import OperatorName
from sharpscope.policy.directions import length
from sharpscope.surface.algorithms import Density
from sharpscope.surface.estimate import Estimate, with_prompts
from sharpscope.surface.operators import Operator


@dataclass(frozen=True)
class Curvature:
    """Curvature of a loss at one point, of the operator A (the Hessian by default); numbers that are not available are NaN.

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
    # vᵀA_i v of prompt i, (k,), for `top` and then `smallest`; empty if not known
    by_prompt: tuple[Tensor, ...] = ()
    operator: OperatorName = "hessian"
    preconditioned: bool = False  # whether the operator is P^(−1/2) A P^(−1/2)
    density: Density | None = None
    # vᵀAv/vᵀv along the directions given, by name, and its values by prompt
    along: dict[str, tuple[float, Tensor | None]] = field(default_factory=dict)
    # relative error of a product by finite differences, measured; NaN for exact products
    product_error: float = math.nan

    @property
    def converged(self) -> bool:
        """Whether all eigenpairs met the tolerance and all numbers are finite."""
        return not self.why

    @property
    def largest(self) -> float:
        """Largest eigenvalue; NaN if not available."""
        return float(self.top[0])

    def trace_interval(self) -> tuple[float, float]:
        """Student's 95 % t interval of the trace; NaN without a trace."""
        from scipy.stats import t

        # an exact trace has no error and may have no degrees of freedom
        half = self.trace_std_error and self.trace_std_error * float(
            t.ppf(0.975, self.trace_probes - 1)
        )
        return self.trace - half, self.trace + half

    @property
    def label(self) -> str:
        """What quantities of another operator than the Hessian are called: `gauss_newton.` or `adamw.`."""
        if self.preconditioned:
            return "adamw." if self.operator == "hessian" else f"adamw.{self.operator}."
        return "" if self.operator == "hessian" else f"{self.operator}."

    def estimates(self) -> list[Estimate]:
        """Rows of the `probes` table.

        They are `largest` (with all the seconds), `eigenvalue_i`, `smallest`, `trace`, `density` (a row for each node, which is in
        `rho`), `along_NAME`, and `product_error`; of another operator they begin with its `label`.
        """
        rows = [*self._eigenvalues(), *self._trace(), *self._densities()]
        for name, (value, each) in self.along.items():
            why = "" if math.isfinite(value) else "the direction is zero or not finite"
            rows.append(with_prompts(Estimate("curvature", f"along_{name}", value, why=why), each))
        if math.isfinite(self.product_error):
            rows.append(Estimate("curvature", "product_error", self.product_error))
        return [replace(row, quantity=self.label + row.quantity) for row in rows]

    def _densities(self) -> list[Estimate]:
        if (found := self.density) is None:
            return []
        one = Estimate("curvature", "density", math.nan, samples=found.probes, seed=self.seed)
        nodes = zip(
            found.nodes.tolist(),
            found.values.tolist(),
            found.std_error.tolist(),
            strict=True,
        )
        return [replace(one, rho=node, value=value, std_error=e) for node, value, e in nodes]

    def _eigenvalues(self) -> list[Estimate]:
        names = ["largest", *(f"eigenvalue_{index}" for index in range(2, len(self.top) + 1))]
        pairs = list(zip(names, map(float, self.top), map(float, self.residuals), strict=True))
        pairs += (
            [("smallest", self.smallest, self.smallest_residual)]
            if math.isfinite(self.smallest)
            else []
        )
        known, rows = iter(self.by_prompt), list[Estimate]()
        for name, value, residual in pairs:
            one = Estimate(
                "curvature",
                name,
                value,
                residual=residual,
                converged=self.converged,
                seed=self.seed,
                why=self.why,
                seconds=0.0 if rows else self.seconds,
            )
            rows.append(with_prompts(one, next(known, None)))
        return rows

    def _trace(self) -> list[Estimate]:
        if not self.trace_probes:
            return []
        return [
            Estimate(
                "curvature",
                "trace",
                self.trace,
                std_error=self.trace_std_error,
                samples=self.trace_probes,
                seed=self.seed,
                why="" if math.isfinite(self.trace) else self.why,
            )
        ]


def sub_generator(seed: int, name: str) -> torch.Generator:
    """A generator for one estimate, so that leaving out an estimate does not change the others."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def residual(operator: Operator, value: float, vector: Tensor) -> float:
    """‖Hv − λv‖₂ of a unit vector (P,)."""
    return length((operator @ vector).sub_(vector, alpha=float(value)))
