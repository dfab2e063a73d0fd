"""Configuration of the loss-surface probes: what is measured, on which prompts, how often."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from sharpscope.config.base import Spec

ObjectiveName = Literal["nll", "expected_failure"]
SharpnessKind = Literal["sam", "asam"]
Backend = Literal["lanczos", "pyhessian"]
Split = Literal["train", "heldout"]
Check = Literal["off", "first", "always"]
"""When probes are compared with autograd on the model: never, at first use, or at every call."""

PRESETS: dict[str, dict[str, Any]] = {
    "off": {"every": 0},
    "standard": {
        "every": 25,
        "kinds": ("sam", "asam"),
        "functionals": ("nll", "expected_failure"),
        "prompts": 128,
        "heldout_prompts": 128,
        "splits": ("train", "heldout"),
        "curvature_prompts": 12,
    },
}
"""What a preset changes of the defaults, which are those of `light`; fields set by the user take precedence."""


class ProbesSpec(Spec):
    """Sharpness and curvature on fixed prompts, shared by all methods of a study."""

    preset: Literal["off", "light", "standard"] = "light"
    """Defaults of the fields below: off; light: sharpness by perturbation and critical sharpness; standard: also
    curvature and the expected failure, on more prompts."""
    check: Check = "first"
    """When to compare score norms, attribution and curvature with autograd on the policy: at first use (first), at
    every use (always), never (off). Numbers that differ are not recorded, with an event."""
    every: int | None = Field(None, ge=0)
    """Interval between probes, also before the first and after the last step; null: these two only; 0: never [steps].
    """
    probe_set_seed: int = Field(0, ge=0)
    """Seed of the probe set's prompts; use the same for all runs of a study."""
    prompts: int = Field(12, ge=1, description="Training prompts in the probe set.")
    heldout_prompts: int = Field(32, ge=0, description="Held-out prompts in the probe set.")
    splits: tuple[Split, ...] = Field(("train",), min_length=1)
    """Parts of the probe set whose loss surface is probed."""
    functionals: tuple[ObjectiveName, ...] = ("nll",)
    """Objectives to probe: nll of stored solutions; expected_failure on new rollouts."""
    samples: int = Field(8, ge=1, description="Completions per probe prompt for expected_failure.")
    rho: Annotated[float, Field(gt=0)] | Literal["auto"] = "auto"
    """Radius of perturbations [parameters' L2 norm]; auto: chosen at the first probe of a run such that SAM sharpness
    of the expected failure is between 5 and 30 % of the largest possible rise. Give the same number to all runs of a
    study."""
    kinds: tuple[SharpnessKind, ...] = Field(("sam",), description="Sharpness measures; standard: also asam.")
    critical_sharpness: bool = True
    """Whether to compute the critical sharpness of the first update of a probed step, by a few forward passes over
    the update's completions."""
    curvature_prompts: int = Field(0, ge=0)
    """Prompts of each split on which eigenvalues and trace of the Hessian are computed, the first ones; 0: no
    curvature."""
    memory_mb: float = Field(2048.0, gt=0)
    """Maximum memory for graphs of Hessian products, and for Lanczos vectors [MiB]."""

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, data: Any) -> Any:
        return PRESETS.get(str(data.get("preset")), {}) | dict(data) if isinstance(data, Mapping) else data

    @model_validator(mode="after")
    def _off_is_off(self) -> ProbesSpec:
        if self.preset == "off" and self.every != 0:  # such as preset off in a sweep whose base has an interval
            raise ValueError(f"every = {self.every}: preset off probes nothing; set another preset, or every to 0")
        return self

    def interval(self, steps: int) -> int:
        """Interval between probes in a run of `steps` steps [steps]; 0: never."""
        return steps if self.every is None else self.every
