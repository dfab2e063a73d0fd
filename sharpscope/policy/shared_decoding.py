"""Decoding in which the texts of a group share their prompt's keys and values.

Decoding is limited by memory bandwidth, and with G completions per prompt most of the memory would be G copies of the
prompt. Here, attention scores of the prompt are one matrix product per group and those of a text's own tokens one per text,
followed by a joint softmax. transformers calls it through its attention interface, without changes to the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sharpscope.errors import UserError
from sharpscope.policy.cache import GrowingLayer, PromptCache
from sharpscope.policy.head import bare

ATTENTION = "sharpscope_shared_prompt"
# A softmax on a CPU takes ten times as long for numbers that do not fill a vector register.
VECTOR = 16
# Prompts of at most so many positions are copied: that costs less than a product of their own in every step.
SHORT = 16
_running: ContextVar[SharedDecodeCache] = ContextVar("sharpscope_shared_decode_cache")


def can_share_decoding(model: nn.Module) -> bool:
    """Whether the model's attention can be replaced through transformers' attention interface."""
    return bool(getattr(bare(model), "_supports_attention_backend", False))


class SharedDecodeCache(Cache):
    """Keys and values of m texts after their prompts, and those of B prompts, left-padded and shared.

    Args:
        prompts: Cache of B prompts; the first texts are these.
        lengths: (B,) length of each prompt [tokens].
        room: Number of texts to reserve memory for.
        capacity: Initial number of positions after the prompts.
    """

    def __init__(self, prompts: PromptCache, lengths: Tensor, room: int, capacity: int) -> None:
        width = prompts.states[0][0].shape[2]  # P
        self.width = width if width > SHORT else 0  # positions that are shared
        self.prompts = [(keys[:, :, : self.width], values[:, :, : self.width]) for keys, values in prompts.states]
        own = [(keys[:, :, self.width :], values[:, :, self.width :]) for keys, values in prompts.states]
        super().__init__(layers=[GrowingLayer(*pair, room, capacity, before=self.width) for pair in own])
        padding = torch.arange(width, device=lengths.device) < width - lengths[:, None]  # (B, P)
        self._padding = padding if bool(padding.any()) else None
        self._assign_slots(torch.arange(len(lengths), device=lengths.device))

    def copy(self, texts: Tensor, to: Tensor, count: int) -> None:
        """See `GrowingLayer.copy`; a copy shares the prompt of its text."""
        for layer in self.layers:
            layer.copy(texts, to, count)  # type: ignore[union-attr]
        prompt = torch.cat([self._text_prompt, self._text_prompt.new_zeros(count - len(self._text_prompt))])
        prompt[to] = prompt[texts]
        self._assign_slots(prompt)

    def keep(self, texts: Tensor, room: int) -> None:
        """Keep only `texts` (k,), see `GrowingLayer.keep`, and their prompts."""
        for layer in self.layers:
            layer.keep(texts, room)  # type: ignore[union-attr]
        used, prompt = self._text_prompt[texts].unique(return_inverse=True)
        if len(used) < self._prompt_count:
            self.prompts = [(keys[used], values[used]) for keys, values in self.prompts]
            self._padding = None if self._padding is None else self._padding[used]
        self._assign_slots(prompt)

    def texts(self, index: Tensor) -> PromptCache:
        """Copy the texts `index` (k,) with their prompts to a new cache."""
        prompt = self._text_prompt[index]
        own = [cast(GrowingLayer, layer).of(index) for layer in self.layers]
        return PromptCache.of(
            (torch.cat([keys[prompt], own_keys], 2), torch.cat([values[prompt], own_values], 2))
            for (keys, values), (own_keys, own_values) in zip(self.prompts, own, strict=True)
        )

    def mask(self) -> Tensor:
        """(m, L+1) ones; the attention function masks padding."""
        return torch.ones(
            len(self._text_prompt), self.get_seq_length() + 1, dtype=torch.long, device=self._text_prompt.device
        )

    def _assign_slots(self, text_prompt: Tensor) -> None:
        """Assign a slot (prompt, index in the group) to each text, so that groups of any size use one batched product."""
        self._text_prompt, self._prompt_count = text_prompt, len(self.prompts[0][0])
        self.text_padding = None if self._padding is None else self._padding[text_prompt][:, None, None]  # (m, 1, 1, P)
        if not self.width:  # each text has a copy of its prompt
            return
        sizes = torch.bincount(text_prompt, minlength=self._prompt_count)
        self._group = int(sizes.max())  # G: slots per prompt
        place = torch.arange(len(text_prompt), device=text_prompt.device)
        order = text_prompt.argsort(stable=True)
        index = torch.empty_like(place).scatter(0, order, place - (sizes.cumsum(0) - sizes)[text_prompt[order]])
        slot = text_prompt * self._group + index  # (m,)
        full = self._prompt_count * self._group == len(slot) and torch.equal(slot, place)
        self._slot = None if full else slot  # None: slot i is text i

    def by_prompt(self, x: Tensor) -> Tensor:
        """Reshape texts (m, H, R, e) to prompts (B, H, G·R, e); slots without a text are zero."""
        if self._group == 1 and self._slot is None:  # one text per prompt
            return x
        _, heads, repeat, width = x.shape
        prompts, group = self._prompt_count, self._group
        if self._slot is not None:
            slots = x.new_zeros(prompts * group, heads, repeat, width)
            x = slots.index_copy_(0, self._slot, x)
        x = x.view(prompts, group, heads, repeat, width).transpose(1, 2)  # (B, H, G, R, e)
        return x.reshape(prompts, heads, group * repeat, width)

    def by_text(self, x: Tensor, repeat: int) -> Tensor:
        """Inverse of `by_prompt`: (B, H, G·R, e) -> (m, H, R, e)."""
        if self._group == 1 and self._slot is None:
            return x
        (prompts, heads, _, width), group = x.shape, self._group
        x = x.view(prompts, heads, group, repeat, width).transpose(1, 2)  # (B, G, H, R, e)
        x = x.reshape(prompts * group, heads, repeat, width)
        return x if self._slot is None else x.index_select(0, self._slot)


@contextmanager
def shared_attention(model: nn.Module, cache: SharedDecodeCache) -> Iterator[None]:
    """Context in which `model` decodes one token per forward pass with `cache`; restores its attention at the end."""
    config = bare(model).config
    before, token = config._attn_implementation, _running.set(cache)
    config._attn_implementation = ATTENTION
    try:
        yield
    finally:
        config._attn_implementation = before
        _running.reset(token)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention of one query per text, (m, H·R, 1, d), to its prompt and its keys and values (m, H, t, d)."""
    extra = [name for name, other in others.items() if isinstance(other, Tensor) and name not in _IGNORED_ARGUMENTS]
    if extra:
        raise UserError(
            f"policy.model: decoding does not support the attention arguments {', '.join(extra)}; choose another architecture"
        )
    m, heads, _, d = query.shape
    q = query.reshape(m, key.shape[1], -1, d) * (d**-0.5 if scaling is None else scaling)
    index = int(module.layer_idx)  # type: ignore[arg-type]
    out = attend(_running.get(), index, q, key, value, softcap, sliding_window)  # (m, H, R, e)
    return out.reshape(m, 1, heads, -1), None


def attend(
    cache: SharedDecodeCache,
    index: int,
    q: Tensor,
    key: Tensor,
    value: Tensor,
    softcap: float | None = None,
    sliding_window: int | None = None,
) -> Tensor:
    """Attention (m, H, R, e) of layer `index` to the prompts in `cache` and to each text's own keys and values.

    Args:
        cache: The cache.
        index: Number of the layer.
        q: (m, H, R, d) scaled queries, one position per text; R query heads share a key head.
        key: (m, H, t, d) keys of each text's own tokens.
        value: (m, H, t, e) values of the same tokens.
        softcap: Bound of the scores, or None.
        sliding_window: Number of latest positions to attend to, or None for all.
    """
    # The query is the last of P+t positions; a sliding window contains the last `sliding_window` of them.
    first = max(0, cache.width + key.shape[2] - sliding_window) if sliding_window else 0
    if first > cache.width:
        key, value = key[:, :, first - cache.width :], value[:, :, first - cache.width :]
    scores = q @ key.transpose(2, 3)  # (m, H, R, t)
    shared = max(0, cache.width - first)  # positions of the prompts
    if shared:
        prompt_key, prompt_value = (states[:, :, first:] for states in cache.prompts[index])
        of_prompt = cache.by_prompt(q) @ prompt_key.transpose(2, 3)  # (B, H, G·R, P)
        scores = torch.cat([cache.by_text(of_prompt, q.shape[2]), scores], 3)  # (m, H, R, P+t)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if cache.text_padding is not None:
        padding = cache.text_padding[..., first:]
        scores[..., : padding.shape[3]].masked_fill_(padding, -torch.inf)
    positions = scores.shape[3]
    if scores.device.type == "cpu" and positions % VECTOR:
        scores = pad(scores, (0, -positions % VECTOR), value=-torch.inf)
    wide = torch.promote_types(scores.dtype, torch.float32)
    weights = torch.softmax(scores, 3, dtype=wide)[..., :positions].to(value.dtype)
    if not shared:
        return weights @ value
    to_prompt, to_own = weights.split([shared, key.shape[2]], 3)
    return to_own @ value + cache.by_text(cache.by_prompt(to_prompt) @ prompt_value, q.shape[2])


_IGNORED_ARGUMENTS = {"position_ids", "cache_position"}
ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attend)
