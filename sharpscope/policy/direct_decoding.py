"""Decoding steps of Llama, Qwen2 and Qwen3 models that call the model's linear layers and norms directly.

A decoding step of a small model takes less time in its matrix products than in Python: masks, the outputs of each layer and
the interface between transformers' layers, attention and cache. `DirectDecoder` does without these. It calls the same modules
(so adapters, quantized layers and autocast work as usual) in the same order, and its attention is that of `shared_decoding`.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM

from sharpscope.policy.cache import GrowingLayer
from sharpscope.policy.head import bare
from sharpscope.policy.shared_decoding import SharedDecodeCache, attend

ARCHITECTURES = (LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
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
    for module in (body, *body.layers, *(layer.self_attn for layer in body.layers)):
        if module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):
            return f"a hook on, or a replaced forward method of, {type(module).__name__}"
    return None


class DirectDecoder:
    """One decoding step of all rows: tokens (n,) and positions (n,) to hidden states (n, d) after the final norm.

    Args:
        model: A model for which `why_not_direct` is None.
        positions: Number of positions, prompt and completion, of the longest row.
    """

    def __init__(self, model: nn.Module, positions: int) -> None:
        self.body: Any = cast(Any, bare(model)).model
        embedding = self.body.embed_tokens.weight
        index = torch.arange(positions, device=embedding.device)[None]
        cos, sin = self.body.rotary_emb(embedding[:1, None], index)  # (1, L, d_head)
        half = cos.shape[-1] // 2
        self.cos, self.half = cos[0, :, None], half  # (L, 1, d_head)
        # The first half is negated here instead of the states in every layer: x·cos + (−x₂, x₁)·sin.
        self.sin = torch.cat([-sin[0, :, :half], sin[0, :, half:]], 1)[:, None]
        self.layers: list[tuple[Any, ...]] = [
            (
                layer.input_layernorm,
                layer.self_attn,
                layer.self_attn.q_proj,
                layer.self_attn.k_proj,
                layer.self_attn.v_proj,
                layer.self_attn.o_proj,
                getattr(layer.self_attn, "q_norm", None),
                getattr(layer.self_attn, "k_norm", None),
                layer.post_attention_layernorm,
                layer.mlp,
            )
            for layer in self.body.layers
        ]

    def __call__(self, token: Tensor, position: Tensor, cache: SharedDecodeCache) -> Tensor:
        """Append one token per row to `cache` and return the hidden states (n, d) that predict the next."""
        n, width = len(token), self.cos.shape[-1]
        cos, sin = self.cos[position], self.sin[position]  # (n, 1, d_head)
        hidden = self.body.embed_tokens(token)  # (n, d)
        for index, (norm, attention, q_proj, k_proj, v_proj, o_proj, q_norm, k_norm, mlp_norm, mlp) in enumerate(
            self.layers
        ):
            x = norm(hidden)
            q, k = q_proj(x).view(n, -1, width), k_proj(x).view(n, -1, width)  # (n, H·R, d_head), (n, H, d_head)
            v = v_proj(x).view(n, -1, 1, width)
            if q_norm is not None:
                q, k = q_norm(q), k_norm(k)
            both = torch.cat([q, k], 1)
            both = both * cos + both.roll(self.half, -1) * sin
            q, k = both.split([q.shape[1], k.shape[1]], 1)
            key, value = cast(GrowingLayer, cache.layers[index]).update(k[:, :, None], v)
            q = q.reshape(n, key.shape[1], -1, width) * attention.scaling
            hidden = hidden + o_proj(attend(cache, index, q, key, value).reshape(n, -1))
            hidden = hidden + mlp(mlp_norm(hidden))
        return cast(Tensor, self.body.norm(hidden))
