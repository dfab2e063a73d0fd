"""Configuration of the surface probes: what is measured, how finely, how often, and what it may cost."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from sharpscope.config.base import Spec

Preset = Literal["off", "cheap", "standard", "full"]
Check = Literal["off", "first", "always"]
"""When a probe compares itself with plain autograd on the model at hand: never, when first used with it, at every call."""

# What each preset sets; a field that the user gives keeps the user's value.
PRESETS: dict[str, dict[str, Any]] = {
    "off": {"every": 0, "prompts": 32, "heldout_prompts": 32},
    "cheap": {
        "functionals": ("nll",),
        "prompts": 8,
        "heldout_prompts": 8,
        "top": 1,
        "smallest": False,
        "max_products": 30,
        "trace_probes": 0,
        "density_samples": 0,
        "preconditioned": False,
        "rhos": (0.05,),
        "kinds": ("sam", "asam"),
        "slices": False,
    },
    "standard": {},
    "full": {
        "every": 25,
        "functionals": ("nll", "surrogate", "expected_failure"),
        "prompts": 64,
        "heldout_prompts": 64,
        "samples": 8,
        "top": 5,
        "max_products": 300,
        "tolerance": 1e-4,
        "gradient_samples": 16,
        "trace_probes": 32,
        "density_samples": 8,
        "density_steps": 40,
        "groups": True,
        "gauss_newton": True,
        "rhos": (0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
        "kinds": ("sam", "asam", "average", "adaptive_average", "worst", "adaptive_worst"),
        "worst_steps": 50,
        "average_samples": 32,
        "m": 8,
    },
}

KINDS: dict[str, tuple[Literal["sam", "asam", "average", "worst"], bool]] = {
    "sam": ("sam", False),
    "asam": ("asam", True),
    "average": ("average", False),
    "adaptive_average": ("average", True),
    "worst": ("worst", False),
    "adaptive_worst": ("worst", True),
}


class ProbesSpec(Spec):
    """Curvature and perturbation probes; on the same fixed prompts for every method of a study."""

    preset: Preset = Field(
        "off", description="Sets every field below that is not given: off | cheap | standard | full."
    )
    check: Check = Field(
        "first",
        description="Compare score norms, attribution and curvature with plain autograd on the policy: when first used (first), at "
        "every use (always), never (off). What differs is left out of the tables, and an event says so.",
    )
    every: int = Field(
        25, ge=0, description="Probe every this many steps, and before the first and after the last; 0: never."
    )
    budget: float | None = Field(
        None,
        gt=0,
        description="Vector products per step that probes may cost on average; more is thinned out (an event says so); "
        "null: no limit.",
    )
    probe_set: str | None = Field(
        None, description="Parquet file of a probe set to use; null: built from the task and kept with the run."
    )
    probe_set_seed: int = Field(
        0, ge=0, description="Seed of the probe set's prompts; the same for every run of a study."
    )
    prompts: int = Field(12, ge=1, description="Training prompts in the probe set.")
    heldout_prompts: int = Field(8, ge=0, description="Held-out prompts in the probe set.")
    functionals: tuple[Literal["nll", "surrogate", "expected_failure"], ...] = Field(
        ("nll", "expected_failure"),
        description="Which scalars' surfaces: of stored solutions, of freshly drawn rollouts.",
    )
    samples: int = Field(2, ge=1, description="Completions drawn per probe prompt for surrogate and expected_failure.")
    gradient_samples: int = Field(
        8,
        ge=0,
        description="Completions drawn per training prompt for the unbiased squared gradient norm: even, at least 4; 0: none.",
    )
    stale_threshold: float = Field(
        0.5,
        gt=0,
        le=1,
        description="Smallest effective share of samples (of 1) at which a stale-rollout estimate is valid.",
    )
    backend: Literal["lanczos", "pyhessian"] = Field(
        "lanczos", description="Who finds eigenvalues and trace; pyhessian for comparison."
    )
    top: int = Field(
        2, ge=1, le=100, description="Largest Hessian eigenvalues wanted; their span is that of sharp_alignment."
    )
    smallest: bool = Field(True, description="Also the smallest (signed) Hessian eigenvalue.")
    tolerance: float = Field(
        1e-2, gt=0, lt=1, description="Residual of an eigenpair relative to the largest |eigenvalue|."
    )
    max_products: int = Field(
        60, ge=4, description="Hessian products for the eigenpairs at most; then converged = false."
    )
    trace_probes: int = Field(4, ge=0, description="Random probes of the trace; 0: no trace.")
    density_samples: int = Field(1, ge=0, description="Random starts of the spectral density; 0: no density.")
    density_steps: int = Field(15, ge=2, description="Lanczos steps of each start of the spectral density.")
    gauss_newton: bool = Field(False, description="Also the Gauss-Newton matrix, in the same way.")
    groups: bool = Field(
        False, description="Also each group of parameters alone: embedding, attention, mlp, norm, head."
    )
    preconditioned: bool = Field(True, description="Also the largest eigenvalue of the AdamW-preconditioned Hessian.")
    rhos: tuple[float, ...] = Field((0.01, 0.05, 0.5), description="Radii of perturbations [parameters' L2 norm].")
    kinds: tuple[Literal["sam", "asam", "average", "adaptive_average", "worst", "adaptive_worst"], ...] = Field(
        ("sam", "asam", "average"), description="Which sharpness measures, at every radius."
    )
    worst_steps: int = Field(20, ge=1, description="Gradient steps of the projected ascent at most.")
    average_samples: int = Field(2, ge=2, description="Antithetic pairs of average-case sharpness.")
    m: int = Field(0, ge=0, description="Examples per group of m-sharpness (SAM), at every radius; 0: none.")
    slices: bool = Field(
        True,
        description="Also loss slices along the gradient, the top eigenvector and random directions, on training prompts.",
    )
    microbatch_tokens: int = Field(
        4096, ge=64, description="Tokens (padding included) in one forward pass of a probe [tokens]."
    )
    graph_mb: float = Field(1024.0, gt=0, description="Memory for graphs kept between Hessian products [MiB].")
    head_mb: float = Field(64.0, gt=0, description="Memory for blocks of the logits [MiB].")
    basis_mb: float = Field(2048.0, gt=0, description="Memory for Lanczos vectors [MiB].")

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        given = dict(data)
        for name in ("preset", "check"):
            if given.get(name) is False:  # how YAML reads a bare `off`
                given[name] = "off"
        return PRESETS.get(str(given.get("preset", "off")), {}) | given

    @model_validator(mode="after")
    def _off_is_off(self) -> ProbesSpec:
        """A sweep's part that says `preset: off` over a base that says `every: 75` must not probe after all."""
        if self.preset == "off" and self.every > 0:
            raise ValueError(
                f"every, {self.every}: preset is off, so nothing would be probed; set preset to cheap, standard or full, "
                "or every to 0"
            )
        return self

    @field_validator("rhos")
    @classmethod
    def _rhos(cls, value: tuple[float, ...]) -> tuple[float, ...]:
        if not value or any(not (rho > 0 and math.isfinite(rho)) for rho in value) or list(value) != sorted(set(value)):
            raise ValueError("at least one radius, each positive, in ascending order, none twice")
        return value

    @field_validator("trace_probes")
    @classmethod
    def _trace_probes(cls, value: int) -> int:
        if value == 1:
            raise ValueError("at least 2 (one probe has no standard error), or 0 for no trace")
        return value

    @field_validator("gradient_samples")
    @classmethod
    def _gradient_samples(cls, value: int) -> int:
        if value and (value < 4 or value % 2):
            raise ValueError("an even number, at least 4 (two halves of at least two completions), or 0 for none")
        return value

    def cost(self, *, gradient: float = 0.5, value: float = 0.2, groups: int = 6) -> float:
        """Upper bound of what one round of probes costs [Hessian-vector products].

        Args:
            gradient, value: cost of a gradient and of a loss in units of a product; see `measured_cost`.
            groups: groups of parameters, if they are probed.
        """
        eigen = self.max_products + self.top + int(self.smallest)
        # The run for the eigenpairs is the density's first sample.
        curvature = eigen + self.trace_probes + max(self.density_samples - 1, 0) * self.density_steps
        curvature *= 1 + int(self.gauss_newton)
        curvature += eigen * (groups * int(self.groups) + int(self.preconditioned))
        each = {
            "sam": value,
            "asam": value,
            "average": 2 * value * self.average_samples,
            "adaptive_average": 2 * value * self.average_samples,
            "worst": gradient * (1 + self.worst_steps),
            "adaptive_worst": gradient * (1 + self.worst_steps),
        }
        perturbation = gradient + len(self.rhos) * sum(each[kind] for kind in self.kinds)
        perturbation += len(self.rhos) * (gradient + value) * int(self.m > 0)
        slices = 4 * 10 * value * int(self.slices)
        # A row of the two gradients against one of the functional that the costs were measured with, and its two pulls.
        two_batches = 2 * gradient * self.gradient_samples
        sets = 1 + int(self.heldout_prompts > 0)
        return len(self.functionals) * (sets * (curvature + perturbation) + slices) + two_batches

    def interval(self, cost: float) -> int:
        """Steps between rounds of probes that keeps `cost` [products per round] within the budget; 0: never.

        A multiple of `every`, so that the steps probed are a subset of those asked for.
        """
        if self.every == 0 or self.budget is None:
            return self.every
        return self.every * max(1, math.ceil(cost / self.budget / self.every))
