"""Configuration of counterfactual updates, and of a study's claims: methods, margins, level and order."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from sharpscope.config.base import Spec
from sharpscope.config.methods import arm_name

OutcomeGroup = Literal["failure", "entropy", "greedy", "sharpness"]


class ForkSpec(Spec):
    """Counterfactual updates: what each arm does from one state, and what is measured."""

    methods: tuple[str, ...] = Field(("grpo", "grpo-sg", "grpo-sg-reverse", "grpo-sg-shuffled"), min_length=1)
    """Arms: [name=]method[+field=value…], such as grpo or strong=grpo-sg+weight.U=4. The first is the reference."""
    batches: int = Field(30, ge=1, le=100_000, description="Batches of rollouts per state; every arm learns from each.")
    outcomes: tuple[OutcomeGroup, ...] = Field(("failure", "entropy"), min_length=1)
    """failure: expected failure on held-out and training prompts; entropy: on the held-out tokens; greedy: accuracy
    of new greedy answers to the held-out prompts; sharpness: SAM sharpness on training prompts."""
    prompts: int = Field(64, ge=2, le=100_000, description="Held-out prompts per batch for the outcomes.")
    samples: int = Field(2, ge=1, le=10_000)
    """Completions per held-out prompt; the training prompts get as many in total."""
    rho: float | None = Field(None, gt=0)
    """Radius of SAM sharpness [parameters' L2 norm]; null: that of the run's probes, else one whose saturation on the
    first batch is moderate."""
    warm_up: int = Field(4, ge=0)
    """Where no optimizer state is stored: steps of the reference method, at a learning rate of 0, whose gradients
    fill AdamW's moments; 0: start from an empty state, whose first step is the gradient's sign."""

    @field_validator("methods")
    @classmethod
    def _distinct(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        names = [arm_name(text) for text in value]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"two arms are called {twice!r}; give one a name: name=method")
        return value


class ClaimsSpec(Spec):
    """What a study claims, and by which rules; `sharpscope study declare` freezes it."""

    baseline: str = Field("grpo", description="Baseline method.")
    treatment: str = Field("grpo-sg", description="Method that the claims are tested for.")
    order: tuple[str, ...] = ("C7", "C4", "C10")
    """Primary claims, in the order in which they are tested."""
    level: float = Field(0.05, gt=0, lt=0.5, description="Error rate of each test.")
    margins: dict[str, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    """Claim to the smallest effect that matters, in the unit of its rule: 0.02 is two points."""
    least_rotation: float = Field(5.0, ge=0)
    """Mean rotation of the update that a method must cause to be compared [degrees]; by default half of what weights in
    [1, 1.4] can do to orthogonal token gradients, arctan(0.4/(2·√1.4)) = 9.6°."""
