"""Parts of a causal language model: its output layer, from the final norm's output to logits, and its repeated layers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from sharpscope.errors import UserError

# Maximum size of the float32 copy of half-precision weights.
BLOCK_BYTES = {"cpu": 16 * 2**20, "cuda": 256 * 2**20}


@dataclass(frozen=True)
class Head:
    """Output layer: z = cap·tanh(scale·(W h + b)/cap), or z = scale·(W h + b) if `soft_cap` is None.

    Attributes:
        weight: W (V, d), the model's parameter (shared with the input embedding if they are tied).
        bias: b (V,) or None.
        soft_cap: Bound of the logits (Gemma 2's final_logit_softcapping) or None.
        scale: Factor on the logits (1 for most models).
    """

    weight: Tensor
    bias: Tensor | None = None
    soft_cap: float | None = None
    scale: float = 1.0

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute logits z (..., V) of `hidden` (..., d), before division by the temperature. Differentiable.

        The compute type is that of the weight, at least float32, also with autocast. A half-precision weight is cast in
        blocks of rows, but the autograd graph stores all of them.
        """
        autocast = torch.is_autocast_enabled(hidden.device.type)
        with torch.autocast(hidden.device.type, enabled=False) if autocast else nullcontext():
            count = len(self.weight)
            dtype = torch.promote_types(self.weight.dtype, torch.float32)
            whole = self.weight.dtype == dtype
            budget = BLOCK_BYTES.get(hidden.device.type, BLOCK_BYTES["cuda"])
            size = count if whole else max(1, budget // (self.weight.shape[1] * dtype.itemsize))
            parts = []
            for start in range(0, count, size):
                rows = slice(start, start + size)
                weight = self.weight if whole else self.weight[rows].to(dtype)
                bias = None if self.bias is None else self.bias[rows].to(dtype)
                parts.append(F.linear(hidden.to(dtype), weight, bias))
            z = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        if self.scale != 1.0:
            z = z * self.scale
        if self.soft_cap is not None:
            z = torch.tanh(z / self.soft_cap) * self.soft_cap
        return z


def computing(model: nn.Module, dtype: torch.dtype | None) -> AbstractContextManager[object]:
    """Context in which matrix products of `model` use `dtype` (autocast); None: the type of the weights."""
    if dtype is None:
        return nullcontext()
    return torch.autocast(next(model.parameters()).device.type, dtype=dtype)


def bare(model: nn.Module) -> PreTrainedModel:
    """Return the causal LM inside a PEFT model, or the model itself; adapters in its layers remain."""
    unwrap = getattr(model, "get_base_model", None)
    return unwrap() if unwrap is not None else model  # type: ignore[return-value]


def backbone(model: nn.Module) -> nn.Module:
    """Return the model without its output layer; its `last_hidden_state` (after the final norm) is the input of `Head`."""
    causal = bare(model)
    # `base_model` is the causal model itself if its prefix is not an attribute (Llama 4's text model).
    return (
        causal.base_model if causal.base_model is not causal else getattr(causal, "model", causal)
    )


def output_head(model: nn.Module) -> Head:
    """Return the output layer of a Hugging Face causal LM.

    Raises:
        UserError: The output layer is not a linear layer.
    """
    causal = bare(model)
    layer = causal.get_output_embeddings()
    config = causal.config
    if not isinstance(layer, nn.Linear):
        what = f"{type(causal).__name__}: its output layer is {type(layer).__name__}, not linear"
        raise UserError(
            f"policy.model, {what}; choose another architecture, or leave that layer out of the adapters"
        )
    scale = float(getattr(config, "logit_scale", None) or 1.0)
    scale /= float(getattr(config, "logits_scaling", None) or 1.0)
    return Head(layer.weight, layer.bias, getattr(config, "final_logit_softcapping", None), scale)


@torch.no_grad()
def check_head(model: nn.Module, head: Head) -> None:
    """Check on two short rows that `head` reproduces the model's logits, and that the model is causal.

    Raises:
        UserError: `Head` does not describe the output layer, or the logits depend on later tokens.
    """
    causal = bare(model)
    name = f"policy.model, {type(causal).__name__}"
    ids = (torch.arange(14, device=head.weight.device).view(2, 7) * 5 + 1) % head.weight.shape[0]
    expected = causal(input_ids=ids, use_cache=False).logits.float()
    if not bool(expected.isfinite().all()):
        return  # diverged weights; the check needs finite logits
    hidden = backbone(model)(input_ids=ids, use_cache=False).last_hidden_state
    tolerance = 1e-3 if head.weight.dtype in (torch.float32, torch.float64) else 5e-2
    atol = tolerance * (1 + float(expected.abs().max()))
    actual = (
        head.logits(hidden).float()
        if hidden.shape[-1] == head.weight.shape[1]
        else hidden.new_empty(0)
    )
    if expected.shape != actual.shape or not torch.allclose(
        expected,
        actual,
        rtol=tolerance,
        atol=atol,
    ):
        raise UserError(
            f"{name}: its logits are not a linear function of its last hidden state; choose another model"
        )
    part = causal(input_ids=ids[:, :-2], use_cache=False).logits.float()
    # The median, since rounding can route single tokens of a mixture to other experts.
    if float((expected[:, :-2] - part).abs().amax(-1).median()) > atol:
        raise UserError(
            f"{name}: its logits depend on later tokens; choose a causal language model"
        )


def layers_of(model: nn.Module) -> list[GradientCheckpointingLayer]:
    """Return the model's repeated layers in order.

    Raises:
        UserError: The architecture does not mark its layers.
    """
    layers = [
        module
        for module in backbone(model).modules()
        if isinstance(module, GradientCheckpointingLayer)
    ]
    if not layers:
        what = f"{type(backbone(model)).__name__}: no gradient checkpointing or sharding"
        raise UserError(
            f"policy.model, {what}; set update.gradient_checkpointing=false, or choose another model"
        )
    return layers


@contextmanager
def recompute_layers(model: nn.Module) -> Iterator[None]:
    """Checkpoint the layers in forward passes within this context; backward passes can follow later.

    Unlike transformers' gradient checkpointing it works in eval mode and with a cache: a recomputed layer reads the same
    cached values as in the forward pass.
    """
    layers = layers_of(model)

    for layer in layers:
        # Without dropout there is no RNG state to preserve.
        layer.forward = partial(
            checkpoint,
            layer.forward,
            use_reentrant=False,
            preserve_rng_state=False,
        )
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward  # restores the method of the class
