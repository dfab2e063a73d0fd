"""Base of every configuration part: frozen, closed to unknown keys, defaults validated."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Spec(BaseModel):
    """A part of the configuration; each room defines its own, `sharpscope.config` composes them."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, protected_namespaces=())
