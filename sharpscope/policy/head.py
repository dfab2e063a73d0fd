"""From hidden states to logits: the part of a causal language model after its last normalisation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from sharpscope.errors import UserError

# Half-precision weights that are made float32 at once.
BLOCK_BYTES = {"cpu": 16 * 2**20, "cuda": 256 * 2**20}


@dataclass(frozen=True)
class Head:
    """z = cap·tanh(scale·(W h + b)/cap), without the cap where `soft_cap` is None.

    Attributes:
        weight: W (V, d), the model's own parameter (the input embedding's too, where they are tied).
        bias: b (V,) or None.
        soft_cap: bound of the logits (Gemma 2's final_logit_softcapping) or None.
        scale: factor on the logits (1 for most models).
    """

    weight: Tensor
    bias: Tensor | None = None
    soft_cap: float | None = None
    scale: float = 1.0

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits z (..., V) before any temperature of `hidden` (..., d); at least float32. Differentiable.

        Computed in the weight's own type, at least float32, also where autocast is on. Of a half-precision weight only a
        block of rows is float32 at a time, but a graph keeps them all.
        """
        autocast = torch.is_autocast_enabled(hidden.device.type)
        with torch.autocast(hidden.device.type, enabled=False) if autocast else nullcontext():
            parts = []
            for rows, block in widened(self.weight):
                bias = None if self.bias is None else self.bias[rows].to(block.dtype)
                parts.append(F.linear(hidden.to(block.dtype), block, bias))
            z = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        if self.scale != 1.0:
            z = z * self.scale
        if self.soft_cap is not None:
            z = torch.tanh(z / self.soft_cap) * self.soft_cap
        return z


def widened(weight: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """A matrix (V, d) in at least float32: itself, or of a half-precision one consecutive blocks of rows, copied."""
    dtype = torch.promote_types(weight.dtype, torch.float32)
    count = len(weight)
    if weight.dtype == dtype:
        yield slice(0, count), weight
        return
    budget = BLOCK_BYTES.get(weight.device.type, BLOCK_BYTES["cuda"])
    size = max(1, budget // (weight.shape[1] * dtype.itemsize))
    for start in range(0, count, size):
        rows = slice(start, min(start + size, count))
        yield rows, weight[rows].to(dtype)


def computing(model: nn.Module, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """Within it, matrix products of `model` are computed in `dtype` (autocast); None: in the weights' own type."""
    if dtype is None:
        return nullcontext()
    return torch.autocast(next(model.parameters()).device.type, dtype=dtype)


def bare(model: nn.Module) -> PreTrainedModel:
    """The causal LM itself where adapters (PEFT) wrap it; the adapters stay inside its layers."""
    unwrap = getattr(model, "get_base_model", None)
    return unwrap() if unwrap is not None else model  # type: ignore[return-value]


def backbone(model: nn.Module) -> nn.Module:
    """The model without its output layer: its `last_hidden_state` (after the final norm) is what `Head` reads."""
    causal = bare(model)
    # `base_model` is the causal model itself where its prefix names nothing (Llama 4's text model).
    return causal.base_model if causal.base_model is not causal else getattr(causal, "model", causal)


def output_head(model: nn.Module) -> Head:
    """The output layer of a Hugging Face causal LM.

    Raises:
        UserError: the output layer is not one linear map.
    """
    causal = bare(model)
    layer, config = causal.get_output_embeddings(), causal.config
    if not isinstance(layer, nn.Linear):
        raise UserError(
            f"policy.model, {type(causal).__name__}: its output layer is {type(layer).__name__}, not one linear map; "
            "choose another architecture, or leave the output layer out of the adapters"
        )
    scale = float(getattr(config, "logit_scale", None) or 1.0)
    scale /= float(getattr(config, "logits_scaling", None) or 1.0)
    return Head(layer.weight, layer.bias, getattr(config, "final_logit_softcapping", None), scale)


@torch.no_grad()
def check_head(model: nn.Module, head: Head) -> None:
    """Check on two short rows that `head` of the backbone's hidden states gives the model's own logits, and that these
    do not depend on later tokens.

    Raises:
        UserError: the logits are another function of the hidden states than `Head` knows, or the model is not causal.
    """
    causal = bare(model)
    name = f"policy.model, {type(causal).__name__}"
    ids = (torch.arange(14, device=head.weight.device).view(2, 7) * 5 + 1) % head.weight.shape[0]
    own = causal(input_ids=ids, use_cache=False).logits.float()
    if not bool(own.isfinite().all()):
        return  # weights that have diverged say nothing about the architecture
    hidden = backbone(model)(input_ids=ids, use_cache=False).last_hidden_state
    ours = head.logits(hidden).float() if hidden.shape[-1] == head.weight.shape[1] else None
    tolerance = 1e-3 if head.weight.dtype in (torch.float32, torch.float64) else 5e-2
    slack = tolerance * (1 + float(own.abs().max()))
    if ours is None or own.shape != ours.shape or not torch.allclose(own, ours, rtol=tolerance, atol=slack):
        raise UserError(
            f"{name}: its logits are not a linear map (with soft cap or scale) of its last hidden state; choose another "
            "architecture"
        )
    part = causal(input_ids=ids[:, :-2], use_cache=False).logits.float()
    # The median, since rounding may send single tokens of a mixture to other experts.
    if float((own[:, :-2] - part).abs().amax(-1).median()) > slack:
        raise UserError(f"{name}: its logits depend on later tokens; choose a causal language model")
