"""Configuration of a study's claims: methods, margins, level and order."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from sharpscope.config.base import Spec


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
