"""Decoding steps of Llama, Qwen2 and Qwen3 models that call the model's linear layers and norms directly.

A decoding step of a small model takes less time in its matrix products than in Python: masks, the outputs of each layer and
the interface between transformers' layers, attention and cache. `DirectDecoder` does without these. It calls the modules of
norms and linear layers that are not plain (so adapters and quantized layers work as usual) and the functions of those that are,
in the same order, and its attention is that of `shared_decoding`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM

from sharpscope.policy.cache import GrowingLayer
from sharpscope.policy.head import bare
from sharpscope.policy.shared_decoding import SharedDecodeCache, attend

ARCHITECTURES = (LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
SMALL_BYTES = 2**22
"""Weights of linear layers with the same input are concatenated up to this size: above, calling them one by one costs nothing."""
ROPE_TYPES = ("default", "linear", "llama3")
"""Rotary embeddings whose angles depend on the position alone, not on the length of the text."""


def why_not_direct(model: nn.Module) -> str | None:
    """Reason why `DirectDecoder` does not support `model`; None if it does."""
    causal: Any = bare(model)
    if type(causal) not in ARCHITECTURES:
        return f"{type(causal).__name__} is not one of {', '.join(a.__name__ for a in ARCHITECTURES)}"
    config, body = causal.config, causal.model
    sliding = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if sliding:
        return f"layers of type {', '.join(sorted(sliding))}"
    rope = body.rotary_emb.rope_type
    if rope not in ROPE_TYPES:
        return f"rotary embeddings of type {rope}"
    for module in (body, *body.layers, *(part for layer in body.layers for part in (layer.self_attn, layer.mlp))):
        if _hooked(module):
            return f"a hook on, or a replaced forward method of, {type(module).__name__}"
    return None


class DirectDecoder:
    """One decoding step of m texts: tokens (m,) and positions (m,) to hidden states (m, d) after the final norm.

    Args:
        model: A model for which `why_not_direct` is None.
        positions: Number of positions, prompt and completion, of the longest text.
    """

    def __init__(self, model: nn.Module, positions: int) -> None:
        body: Any = cast(Any, bare(model)).model
        self.embed, self.norm = body.embed_tokens, _norm(body.norm)
        embedding = self.embed.weight
        index = torch.arange(positions, device=embedding.device)[None]
        cos, sin = body.rotary_emb(embedding[:1, None], index)  # (1, L, d_head)
        half = cos.shape[-1] // 2
        self.cos, self.half = cos[0, :, None], half  # (L, 1, d_head)
        # The first half is negated here instead of the states in every layer: x·cos + (−x₂, x₁)·sin.
        self.sin = torch.cat([-sin[0, :, :half], sin[0, :, half:]], 1)[:, None]
        self.layers: list[tuple[Any, ...]] = [
            (
                _norm(layer.input_layernorm),
                _linear(layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj),
                layer.self_attn.config.num_key_value_heads,
                getattr(layer.self_attn, "q_norm", None),
                getattr(layer.self_attn, "k_norm", None),
                layer.self_attn.scaling,
                _linear(layer.self_attn.o_proj),
                _norm(layer.post_attention_layernorm),
                _linear(layer.mlp.gate_proj, layer.mlp.up_proj),
                layer.mlp.act_fn,
                _linear(layer.mlp.down_proj),
            )
            for layer in body.layers
        ]

    def __call__(self, token: Tensor, position: Tensor, cache: SharedDecodeCache) -> Tensor:
        """Append one token per text to `cache` and return the hidden states (m, d) that predict the next."""
        m, width = len(token), self.cos.shape[-1]
        cos, sin = self.cos[position], self.sin[position]  # (m, 1, d_head)
        hidden = self.embed(token)  # (m, d)
        for index, layer in enumerate(self.layers):
            norm, qkv, heads, q_norm, k_norm, scaling, out, mlp_norm, gate_up, activation, down = layer
            states = qkv(norm(hidden)).view(m, -1, width)  # (m, H·R + 2·H, d_head)
            both, v = states[:, :-heads], states[:, -heads:, None]
            if q_norm is not None:
                both = torch.cat([q_norm(both[:, :-heads]), k_norm(both[:, -heads:])], 1)
            both = torch.addcmul(both * cos, both.roll(self.half, -1), sin)
            key, value = cast(GrowingLayer, cache.layers[index]).update(both[:, -heads:, None], v)
            q = (both[:, :-heads] * scaling).view(m, heads, -1, width)
            hidden = hidden + out(attend(cache, index, q, key, value).reshape(m, -1))
            gate, up = gate_up(mlp_norm(hidden)).chunk(2, -1)
            hidden = hidden + down(activation(gate) * up)
        return self.norm(hidden)


def _linear(*layers: nn.Module) -> Callable[[Tensor], Tensor]:
    """The outputs of linear layers of the same input, side by side; of small plain layers in one product."""
    plain = [layer for layer in layers if type(layer) is nn.Linear and not _hooked(layer)]
    weights: list[Tensor] = [layer.weight for layer in plain]
    biases: list[Tensor] = [layer.bias for layer in plain if layer.bias is not None]
    if len(plain) == len(layers) == 1:
        return partial(F.linear, weight=weights[0], bias=biases[0] if biases else None)
    # Autocast casts parameters once, but other tensors at every call.
    alike = (
        len(plain) == len(layers)
        and len(biases) in (0, len(layers))
        and not torch.is_autocast_enabled(weights[0].device.type)
    )
    if alike and sum(weight.nbytes for weight in weights) <= SMALL_BYTES:
        return partial(F.linear, weight=torch.cat(weights), bias=torch.cat(biases) if biases else None)
    return layers[0] if len(layers) == 1 else lambda x: torch.cat([layer(x) for layer in layers], -1)


def _norm(norm: Any) -> Callable[[Tensor], Tensor]:
    """An RMSNorm; in single and double precision torch's, which gives the same numbers faster."""
    if norm.weight.dtype not in (torch.float32, torch.float64) or _hooked(norm):
        return cast(Callable[[Tensor], Tensor], norm)
    return partial(F.rms_norm, normalized_shape=norm.weight.shape, weight=norm.weight, eps=norm.variance_epsilon)


def _hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))
