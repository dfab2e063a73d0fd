"""`--shaping`: where a method's weight takes another shaping, so that a control stays a control."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sharpscope.config.token_weights import shaping_kinds
from sharpscope.errors import UserError


def shaping_value(text: str) -> dict[str, Any]:
    """What `--shaping` means: a preset of the sigmoid, or a user's own function `module:function`.

    Raises:
        UserError: it is neither.
    """
    if ":" in text:
        return {"kind": "custom", "function": text}
    if text in ("paper", "calibrated"):
        return {"preset": text}
    raise UserError(f"--shaping {text}: must be paper, calibrated, or your own as module:function")


def shaping_layer(text: str, method: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that give `method`, all its parts filled in, the shaping `text`.

    A weight that is made of another one (shuffled, reverse, constant, mean_one) keeps its own kind: the innermost weight
    is the one that changes.

    Raises:
        UserError: `text` is no shaping, or the method's weight has no place for it.
    """
    value = shaping_value(text)
    weight, depth = method.get("weight"), 0
    while isinstance(weight, Mapping) and _is_made_of_another(weight):
        weight, depth = weight.get("of"), depth + 1
    kind = weight.get("kind") if isinstance(weight, Mapping) else None
    name = method.get("name")
    if kind == "entropy":
        raise UserError(
            f"--shaping {text}: does not fit method {name}, whose weights follow the entropy and hold no other shaping; "
            "leave --shaping out, or choose another control such as -shuffled"
        )
    if "preset" in value and kind not in (None, "sigmoid"):
        raise UserError(
            f"--shaping {text}: is a preset of the sigmoid, and the weights of method {name} are {kind}; choose a method "
            "with the sigmoid, such as grpo-sg, or leave --shaping out"
        )
    for _ in range(depth):
        value = {"of": value}
    return {"method": {"weight": value}}


def _is_made_of_another(weight: Mapping[str, Any]) -> bool:
    kind = weight.get("kind")
    model = shaping_kinds().get(kind) if isinstance(kind, str) else None
    return model is not None and "of" in model.model_fields
