"""Configuration of the loss-surface probes: estimates, accuracy, interval and cost."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from sharpscope.config.base import Spec

ObjectiveName = Literal["nll", "surrogate", "expected_failure"]
SharpnessKind = Literal["sam", "asam", "average", "worst"]
Backend = Literal["lanczos", "pyhessian"]
Preset = Literal["off", "light", "cheap", "standard", "full"]
Split = Literal["train", "heldout"]
Check = Literal["off", "first", "always"]
"""When probes are compared with autograd on the model: never, at first use, or at every call."""

# Defaults of each preset; fields set by the user take precedence.
PRESETS: dict[str, dict[str, Any]] = {
    "off": {"every": 0, "prompts": 32, "heldout_prompts": 32},
    # Ten rounds take at most 5 % of a default run of 100 steps (experiments/benchmarks/speed.md).
    "light": {
        "functionals": ("nll",),
        "prompts": 20,
        "heldout_prompts": 32,
        "splits": ("train",),
        "curvature": False,
        "gradient_samples": 0,
        "rhos": (0.5,),
        "kinds": ("sam", "asam", "average"),
        "slices": False,
    },
    "cheap": {
        "every": 25,
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
    "standard": {"every": 25, "prompts": 128, "heldout_prompts": 128, "curvature_prompts": 12},
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

KINDS: dict[str, tuple[SharpnessKind, bool]] = {
    "sam": ("sam", False),
    "asam": ("asam", True),
    "average": ("average", False),
    "adaptive_average": ("average", True),
    "worst": ("worst", False),
    "adaptive_worst": ("worst", True),
}


class ProbesSpec(Spec):
    """Curvature and perturbation probes on fixed prompts, shared by all methods of a study."""

    preset: Preset = Field(
        "light",
        description="Defaults of the fields below: off; light: sharpness by perturbation and critical sharpness; cheap; standard: also "
        "curvature, on more prompts; full.",
    )
    check: Check = Field(
        "first",
        description="When to compare score norms, attribution and curvature with autograd on the policy: at first use (first), at "
        "every use (always), never (off). Numbers that differ are not recorded, with an event.",
    )
    every: int | None = Field(
        None,
        ge=0,
        description="Interval between probes, also before the first and after the last step; null: `rounds` of them, evenly spread, or "
        "fewer within recording.budget; 0: never [steps].",
    )
    rounds: int = Field(
        10, ge=2, description="Number of probes over the run where `every` is null, those before and after it included."
    )
    budget: float | None = Field(
        None,
        gt=0,
        description="Maximum average cost of the probes [Hessian-vector products per step]; above it the interval grows, with an "
        "event; null: no limit.",
    )
    probe_set: str | None = Field(
        None, description="Parquet file of a probe set; null: built from the task and saved with the run."
    )
    probe_set_seed: int = Field(
        0, ge=0, description="Seed of the probe set's prompts; use the same for all runs of a study."
    )
    prompts: int = Field(12, ge=1, description="Training prompts in the probe set.")
    heldout_prompts: int = Field(8, ge=0, description="Held-out prompts in the probe set.")
    splits: tuple[Split, ...] = Field(
        ("train", "heldout"), min_length=1, description="Parts of the probe set whose loss surface is probed."
    )
    functionals: tuple[ObjectiveName, ...] = Field(
        ("nll", "expected_failure"),
        description="Objectives to probe: nll of stored solutions; surrogate and expected_failure on new rollouts.",
    )
    samples: int = Field(2, ge=1, description="Completions per probe prompt for surrogate and expected_failure.")
    gradient_samples: int = Field(
        8,
        ge=0,
        description="Completions per training prompt for the unbiased squared gradient norm: even, at least 4; 0: none.",
    )
    stale_threshold: float = Field(
        0.5,
        gt=0,
        le=1,
        description="Minimum effective sample size, as a share of the samples, of a valid estimate on stale rollouts.",
    )
    critical_sharpness: bool = Field(
        True,
        description="Whether to compute the critical sharpness of the first update of a probed step, by a few forward passes over the "
        "update's completions.",
    )
    curvature: bool = Field(True, description="Whether to compute eigenvalues, trace and density of the Hessian.")
    curvature_prompts: int = Field(
        0, ge=0, description="Prompts of each split on which curvature is computed, the first ones; 0: all."
    )
    backend: Backend = Field("lanczos", description="Algorithm for eigenvalues and trace; pyhessian for comparison.")
    top: int = Field(
        2,
        ge=1,
        le=100,
        description="Number of largest Hessian eigenvalues; their eigenvectors span the subspace of sharp_alignment.",
    )
    smallest: bool = Field(True, description="Whether to compute the smallest (signed) Hessian eigenvalue.")
    tolerance: float = Field(
        1e-2, gt=0, lt=1, description="Tolerance of an eigenpair's residual, relative to the largest |eigenvalue|."
    )
    max_products: int = Field(
        60,
        ge=4,
        description="Maximum number of Hessian-vector products for the eigenpairs; if reached, converged = false.",
    )
    trace_probes: int = Field(4, ge=0, description="Random vectors for the trace; 0: no trace.")
    density_samples: int = Field(
        1, ge=0, description="Random starting vectors for the spectral density; 0: no density."
    )
    density_steps: int = Field(15, ge=2, description="Lanczos steps per starting vector of the spectral density.")
    gauss_newton: bool = Field(False, description="Whether to probe the Gauss-Newton matrix in the same way.")
    groups: bool = Field(
        False, description="Whether to probe each parameter group separately: embedding, attention, mlp, norm, head."
    )
    preconditioned: bool = Field(
        True, description="Whether to compute the largest eigenvalue of the AdamW-preconditioned Hessian."
    )
    rhos: tuple[float, ...] = Field((0.01, 0.05, 0.5), description="Radii of perturbations [parameters' L2 norm].")
    kinds: tuple[Literal["sam", "asam", "average", "adaptive_average", "worst", "adaptive_worst"], ...] = Field(
        ("sam", "asam", "average"), description="Sharpness measures, at every radius."
    )
    worst_steps: int = Field(20, ge=1, description="Maximum number of steps of the projected gradient ascent.")
    average_samples: int = Field(
        2,
        ge=2,
        description="Antithetic pairs for average-case sharpness, each on its own part of the prompts if there are at least two prompts for "
        "a pair, else on all.",
    )
    m: int = Field(0, ge=0, description="Examples per group of m-sharpness (SAM), at every radius; 0: none.")
    slices: bool = Field(
        True,
        description="Whether to compute loss slices along the gradient, the top eigenvector and random directions, on training prompts.",
    )
    microbatch_tokens: int = Field(
        4096, ge=64, description="Maximum size of a probe's forward pass, including padding [tokens]."
    )
    graph_mb: float = Field(
        1024.0, gt=0, description="Maximum memory for graphs kept between Hessian-vector products [MiB]."
    )
    head_mb: float = Field(64.0, gt=0, description="Maximum memory for blocks of logits [MiB].")
    basis_mb: float = Field(2048.0, gt=0, description="Maximum memory for Lanczos vectors [MiB].")

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        given = dict(data)
        for name in ("preset", "check"):
            if given.get(name) is False:  # YAML reads a bare `off` as false
                given[name] = "off"
        return PRESETS.get(str(given.get("preset", "light")), {}) | given

    @model_validator(mode="after")
    def _off_has_no_interval(self) -> ProbesSpec:
        """`preset: off` in a sweep must not be combined with `every: 75` of its base."""
        if self.preset == "off" and self.every != 0:
            raise ValueError(
                f"every = {self.every}: preset off probes nothing; set preset to light, standard or full, or every to 0"
            )
        return self

    @field_validator("rhos")
    @classmethod
    def _rhos(cls, value: tuple[float, ...]) -> tuple[float, ...]:
        if not value or any(not (rho > 0 and math.isfinite(rho)) for rho in value) or list(value) != sorted(set(value)):
            raise ValueError("must be one or more positive radii in strictly ascending order")
        return value

    @field_validator("trace_probes")
    @classmethod
    def _trace_probes(cls, value: int) -> int:
        if value == 1:
            raise ValueError("must be at least 2 (for a standard error), or 0 for no trace")
        return value

    @field_validator("gradient_samples")
    @classmethod
    def _gradient_samples(cls, value: int) -> int:
        if value and (value < 4 or value % 2):
            raise ValueError("must be even and at least 4 (two halves of at least two completions), or 0 for none")
        return value

    def cost(self, *, gradient: float = 0.5, value: float = 0.2, groups: int = 6) -> float:
        """Upper bound of the cost of one round of probes [Hessian-vector products].

        Args:
            gradient: Cost of a gradient [products]; see `measured_cost`.
            value: Cost of a loss [products].
            groups: Number of parameter groups, if they are probed.
        """
        eigen = self.max_products + (self.top + int(self.smallest)) * (
            1 + 2 * value
        )  # values by prompt are two losses each
        # The Lanczos run for the eigenpairs is also the first sample of the density.
        trace = 2 * value * (self.max_products + self.trace_probes) * int(self.trace_probes > 0)
        curvature = eigen + trace + self.trace_probes + max(self.density_samples - 1, 0) * self.density_steps
        curvature *= 1 + int(self.gauss_newton)
        curvature += eigen * (groups * int(self.groups) + int(self.preconditioned))
        # Pairs on parts of the prompts cost one pair on all.
        average = 2 * value * (1 if self.prompts >= 2 * self.average_samples else self.average_samples)
        each = {
            "sam": value,
            "asam": value,
            "average": average,
            "adaptive_average": average,
            "worst": gradient * (1 + self.worst_steps),
            "adaptive_worst": gradient * (1 + self.worst_steps),
        }
        perturbation = gradient + 2 * value + len(self.rhos) * sum(each[kind] for kind in self.kinds)
        perturbation += len(self.rhos) * (gradient + value) * int(self.m > 0)
        slices = 4 * 10 * value * int(self.slices)
        # Two gradients per sample, relative to the rows of the functional with which the costs were measured.
        two_batches = 2 * gradient * self.gradient_samples
        share = min(1.0, (self.curvature_prompts or self.prompts) / self.prompts) if self.curvature else 0.0
        sets = len(self.splits) if self.heldout_prompts else 1
        return len(self.functionals) * (sets * (share * curvature + perturbation) + slices) + two_batches

    def interval(self, steps: int, cost: float = 0.0) -> int:
        """Interval between probes in a run of `steps` steps [steps]; 0: never.

        Within the budget it is the smallest multiple of the configured interval that keeps `cost` [products per round] to it.
        """
        every = math.ceil(steps / (self.rounds - 1)) if self.every is None else self.every
        if every == 0 or self.budget is None:
            return every
        return every * max(1, math.ceil(cost / self.budget / every))
