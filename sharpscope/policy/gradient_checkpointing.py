"""Gradient checkpointing: store only the inputs of layers and recompute the layers in the backward pass."""

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
    """Return the model's repeated layers in order.

    Raises:
        UserError: The architecture does not mark its layers.
    """
    layers = [module for module in backbone(model).modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise UserError(
            f"policy.model, {type(backbone(model)).__name__}: gradient checkpointing and sharding are not supported; set "
            "update.gradient_checkpointing=false, or choose another architecture"
        )
    return layers


@contextmanager
def recompute_layers(model: nn.Module) -> Iterator[None]:
    """Checkpoint the layers in forward passes within this context; backward passes can follow later.

    Unlike transformers' gradient checkpointing it works in eval mode and with a cache: a recomputed layer reads the same
    cached values as in the forward pass.
    """
    layers = layers_of(model)

    def wrapped(forward: Callable[..., Any]) -> Callable[..., Any]:
        """A layer's forward pass that is computed again in the backward pass."""

        def run(*args: Any, **kwargs: Any) -> Any:
            # Without dropout there is no RNG state to preserve.
            return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

        return run

    for layer in layers:
        layer.forward = wrapped(layer.forward)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward  # restores the method of the class
