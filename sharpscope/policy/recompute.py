"""Gradient checkpointing: a layer keeps its input only and is computed again in the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from sharpscope.errors import UserError
from sharpscope.policy.head import backbone


def layers_of(model: nn.Module) -> list[GradientCheckpointingLayer]:
    """The model's repeated layers, first to last.

    Raises:
        UserError: the architecture does not mark them.
    """
    found = [module for module in backbone(model).modules() if isinstance(module, GradientCheckpointingLayer)]
    if not found:
        raise UserError(
            f"policy.model, {type(backbone(model)).__name__}: its layers are not marked as such, so they can be neither "
            "recomputed nor sharded; set update.gradient_checkpointing=false, or choose another architecture"
        )
    return found


@contextmanager
def recomputed(model: nn.Module) -> Iterator[None]:
    """Forward passes within it keep each layer's input only; backward passes may come later.

    transformers' own switch works in training mode only and forbids a cache; here the mode stays what it is, and a layer
    that is computed again finds what it found in the cache the first time.
    """
    layers = layers_of(model)

    def wrapped(forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            # Dropout is off, so there is no random state to keep.
            return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

        return run

    for layer in layers:
        layer.forward = wrapped(layer.forward)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward  # the class's own comes to light again
