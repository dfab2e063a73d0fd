"""Key-value caches: one for decoding, written in place, and a differentiable one for shared prompts.

Both keep the keys of all positions in every layer, so positions in the cache equal positions in the row, and the masks of
transformers (full or sliding window) apply.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from sharpscope.errors import UserError
from sharpscope.policy.head import bare

CACHED_LAYER_TYPES = {"full_attention", "sliding_attention"}


def check_cacheable(model: nn.Module) -> None:
    """Check that keys and values are the model's only state.

    Raises:
        UserError: The model has other layers (recurrent, chunked attention).
    """
    config = bare(model).config
    other = set(getattr(config, "layer_types", None) or ()) - CACHED_LAYER_TYPES
    if other:
        raise UserError(
            f"policy.model, {type(bare(model)).__name__}: layers of type {', '.join(sorted(other))} are not supported; "
            "choose a model with full or sliding-window attention only"
        )


class _Layer(CacheLayerMixin):
    """Interface of transformers' cache layers, for layers that keep all keys."""

    is_sliding = False
    past = 0
    keys: Tensor
    values: Tensor

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the first update sets the tensors."""

    def get_seq_length(self) -> int:
        """Number of positions in the cache."""
        return self.past

    def get_mask_sizes(self, query: int | Tensor) -> tuple[int, int]:
        """Number of keys for a query of this length, and the position of the first key."""
        # transformers passes the number of new positions; before 5.5, the positions
        return self.past + (query if isinstance(query, int) else len(query)), 0

    def get_max_length(self) -> int:
        """No maximum length."""
        return -1

    def get_max_cache_shape(self) -> int:
        """No maximum length; the name of `get_max_length` in earlier versions of transformers 5."""
        return -1


class _TakeRows(torch.autograd.Function):
    """Index rows, with a matrix product in the backward pass.

    It is several times as fast as the backward pass of index_select, and deterministic on all devices.
    """

    @staticmethod
    def forward(ctx: Any, states: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.count = len(states)
        return states.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (rows,), gradient = ctx.saved_tensors, gradients[0]  # (n, …)
        selected = torch.arange(ctx.count, device=rows.device)[:, None] == rows  # (B, n)
        total = selected.to(gradient.dtype) @ gradient.reshape(len(rows), -1)
        return total.view(ctx.count, *gradient.shape[1:]), None


def take_rows(states: Tensor, rows: Tensor) -> Tensor:
    """Return `states[rows]`, (B, …) -> (n, …); efficient if `rows` (n,) has many repetitions."""
    return _TakeRows.apply(states, rows)


class PromptLayer(_Layer):
    """Keys and values (B, H, P, d_head) of prompts, with their autograd graph."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Add states (n, H, t, d_head) and return all keys and values to attend to; see transformers."""
        self.keys, self.values = key_states, value_states
        self.past = key_states.shape[2]
        return key_states, value_states


class ContinuationLayer(_Layer):
    """Prepends the keys and values of each row's prompt; stores nothing itself."""

    def __init__(self, prompt: PromptLayer, row_prompt: Tensor) -> None:
        super().__init__()
        self.prompt, self.row_prompt, self.past = prompt, row_prompt, prompt.past

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Add states (n, H, t, d_head) and return all keys and values to attend to; see transformers."""
        keys = take_rows(self.prompt.keys, self.row_prompt)  # (B, H, P, d) -> (n, H, P, d)
        values = take_rows(self.prompt.values, self.row_prompt)
        return torch.cat([keys, key_states], 2), torch.cat([values, value_states], 2)  # (n, H, P+T, d)


class AppendLayer(_Layer):
    """Keys and values (n, H, L, d_head) to which updates are appended."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.keys, self.values, self.past = keys, values, keys.shape[2]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Add states (n, H, t, d_head) and return all keys and values; see transformers."""
        self.keys = torch.cat([self.keys, key_states], 2)
        self.values = torch.cat([self.values, value_states], 2)
        self.past = self.keys.shape[2]
        return self.keys, self.values


class PromptCache(Cache):
    """Differentiable cache of B prompts; `continuation(row_prompt)` is a cache of n rows that continue them."""

    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=PromptLayer)

    @classmethod
    def of(cls, states: Iterable[tuple[Tensor, Tensor]]) -> PromptCache:
        """Create a cache from keys and values, (B, H, P, d_head) each, per layer."""
        cache = cls()
        for keys, values in states:
            layer = PromptLayer()
            layer.update(keys, values)
            cache.layers.append(layer)
        return cache

    @property
    def states(self) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of each layer, both (B, H, P, d_head)."""
        return [(layer.keys, layer.values) for layer in self.layers]  # type: ignore[misc, union-attr]

    def pad_left(self, padding: Tensor) -> None:
        """Turn right padding into left padding: shift each text right by `padding` (B,) positions."""
        if not bool(padding.any()):
            return
        width = self.states[0][0].shape[2]
        index = torch.arange(width, device=padding.device)[None] - padding[:, None]  # (B, P)
        index = index.clamp_min(0)[:, None, :, None]  # padding can have any finite values
        for layer in self.layers:
            for name in ("keys", "values"):
                states = getattr(layer, name)  # (B, H, P, d)
                setattr(layer, name, states.gather(2, index.expand(-1, states.shape[1], -1, states.shape[3])))

    def rows(self, index: Tensor) -> PromptCache:
        """Select the texts `index` (m,) long."""
        return PromptCache.of((keys[index], values[index]) for keys, values in self.states)

    def continuation(self, row_prompt: Tensor) -> Cache:
        """Cache for one forward pass of n rows with the prompts `row_prompt` (n,) long."""
        return Cache(layers=[ContinuationLayer(layer, row_prompt) for layer in self.layers])  # type: ignore[arg-type]


def read_prompts(body: nn.Module, ids: Tensor, lengths: Tensor) -> tuple[Tensor, PromptCache]:
    """Run B prompts once.

    Args:
        body: The model without its output layer.
        ids: (B, P) token ids, padded on the right, so that causal attention needs no mask.
        lengths: (B,) length of each prompt [tokens].

    Returns:
        The hidden state (B, d) of each prompt's last token, and the cache, padded on the *left*, so that completions are
        adjacent to their prompts and distances in the cache are distances in the text.
    """
    cache = PromptCache()
    # A mask of ones: only padding attends to padding.
    mask = torch.ones_like(ids)
    hidden = body(
        input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True
    ).last_hidden_state  # (B, P, d)
    cache.pad_left(ids.shape[1] - lengths)
    return hidden[torch.arange(len(ids), device=ids.device), lengths - 1], cache


def extend(
    body: nn.Module, before: PromptCache, lengths: Tensor, ids: Tensor, new: Tensor
) -> tuple[Tensor, PromptCache, Tensor]:
    """Append tokens to n cached texts.

    Args:
        body: The model without its output layer.
        before: Cache of the texts, (n, H, W, d_head) per layer, padded on the left.
        lengths: (n,) length of each text [tokens].
        ids: (n, K) tokens to append, padded on the right.
        new: (n,) number of tokens to append, at least 1.

    Returns:
        The hidden state (n, d) of each text's last token, the cache of the extended texts, padded on the left, and their
        lengths (n,).
    """
    width, column = before.states[0][0].shape[2], torch.arange(ids.shape[1], device=ids.device)
    mask = torch.arange(width, device=ids.device) >= width - lengths[:, None]  # (n, W)
    cache = Cache(layers=[AppendLayer(keys, values) for keys, values in before.states])
    hidden = body(
        input_ids=ids,
        attention_mask=torch.cat([mask.long(), torch.ones_like(ids)], 1),
        # Padding has the position of the last token, which is inside the context.
        position_ids=lengths[:, None] + torch.minimum(column, new[:, None] - 1),
        past_key_values=cache,
        use_cache=True,
    ).last_hidden_state  # (n, K, d)
    after = PromptCache.of((layer.keys, layer.values) for layer in cache.layers)  # type: ignore[union-attr, misc]
    after.pad_left(ids.shape[1] - new)
    return hidden[torch.arange(len(ids), device=ids.device), new - 1], after, lengths + new


def stack(parts: Sequence[PromptCache]) -> PromptCache:
    """Concatenate the texts of several caches, padded on the left to the widest."""
    width = max(part.states[0][0].shape[2] for part in parts)
    layers = zip(*(part.states for part in parts), strict=True)
    return PromptCache.of(
        (_stack([keys for keys, _ in layer], width), _stack([values for _, values in layer], width)) for layer in layers
    )


def _stack(parts: Sequence[Tensor], width: int) -> Tensor:
    return torch.cat([pad(part, (0, 0, width - part.shape[2], 0)) for part in parts])


class GrowingLayer(_Layer):
    """Keys and values of m texts, written in place; the capacity doubles when it is exceeded.

    Args:
        keys: (m, H, L, d_head), initial keys; L can be 0.
        values: (m, H, L, d_head), initial values.
        room: Number of texts to reserve memory for, at least m.
        capacity: Number of positions to reserve.
        before: Number of earlier positions, stored elsewhere.
    """

    def __init__(self, keys: Tensor, values: Tensor, room: int, capacity: int, before: int = 0) -> None:
        super().__init__()
        self.count, self.used, self.before = len(keys), keys.shape[2], before
        self.keys, self.values = _reserve(keys, room, capacity), _reserve(values, room, capacity)

    @property
    def past(self) -> int:  # type: ignore[override]
        """Number of positions in the cache."""
        return self.before + self.used

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Add states (m, H, t, d_head) and return all keys and values; see transformers."""
        start, self.used = self.used, self.used + key_states.shape[2]
        if self.used > self.keys.shape[2]:
            room, capacity = len(self.keys), max(self.used, 2 * self.keys.shape[2]) - start
            self.keys = _reserve(self.keys[: self.count, :, :start], room, capacity)
            self.values = _reserve(self.values[: self.count, :, :start], room, capacity)
        self.keys[: self.count, :, start : self.used] = key_states
        self.values[: self.count, :, start : self.used] = value_states
        return self.keys[: self.count, :, : self.used], self.values[: self.count, :, : self.used]

    def of(self, texts: Tensor) -> tuple[Tensor, Tensor]:
        """Copies of the keys and values (k, H, L, d_head) of `texts` (k,)."""
        return self.keys[:, :, : self.used][texts], self.values[:, :, : self.used][texts]

    def copy(self, texts: Tensor, to: Tensor, count: int) -> None:
        """Copy `texts` (k,) to the places `to` (k,); there are `count` texts afterwards."""
        self.count = count
        for states in (self.keys[:, :, : self.used], self.values[:, :, : self.used]):
            states.index_copy_(0, to, states.index_select(0, texts))

    def keep(self, texts: Tensor, room: int, skip: int = 0) -> None:
        """Keep only `texts` (k,), which may repeat, with memory for `room`; remove their first `skip` positions."""
        capacity = self.keys.shape[2] - self.used
        self.count = len(texts)
        self.keys = _reserve(self.keys[:, :, skip : self.used], room, capacity, texts)
        self.values = _reserve(self.values[:, :, skip : self.used], room, capacity, texts)
        self.used -= skip


def _reserve(states: Tensor, room: int, capacity: int, texts: Tensor | None = None) -> Tensor:
    """Copy `states` (m, H, L, d), or its `texts`, to a tensor of `room` texts with `capacity` more positions."""
    count, heads, used, width = states.shape
    count = count if texts is None else len(texts)
    grown = states.new_empty(max(count, room), heads, used + capacity, width)
    grown[:count, :, :used] = states if texts is None else states.index_select(0, texts)
    return grown


class DecodeCache(Cache):
    """Decoding cache of m texts, each with a copy of its prompt's keys and values.

    It is used for models whose attention cannot be replaced; `SharedDecodeCache` needs no copies.

    Args:
        prompts: Cache of m prompts, the first texts.
        lengths: (m,) length of each prompt [tokens].
        room: Number of texts to reserve memory for.
        capacity: Initial number of positions after the prompts.
    """

    def __init__(self, prompts: PromptCache, lengths: Tensor, room: int, capacity: int) -> None:
        layers = [GrowingLayer(keys, values, room, capacity) for keys, values in prompts.states]
        super().__init__(layers=layers)  # type: ignore[arg-type]
        self.padding = layers[0].used - lengths  # (m,) padding on the left

    def copy(self, texts: Tensor, to: Tensor, count: int) -> None:
        """See `GrowingLayer.copy`."""
        self.padding = torch.cat([self.padding, self.padding.new_zeros(count - len(self.padding))])
        self.padding[to] = self.padding[texts]
        for layer in self.layers:
            layer.copy(texts, to, count)  # type: ignore[union-attr]

    def keep(self, texts: Tensor, room: int) -> None:
        """Keep only `texts` (k,), see `GrowingLayer.keep`, and remove columns that are padding in all of them."""
        self.padding = self.padding[texts]
        skip = int(self.padding.min())
        self.padding = self.padding - skip
        for layer in self.layers:
            layer.keep(texts, room, skip)  # type: ignore[union-attr]

    def texts(self, index: Tensor) -> PromptCache:
        """Copy the texts `index` (k,) to a new cache."""
        return PromptCache.of(cast(GrowingLayer, layer).of(index) for layer in self.layers)

    def mask(self) -> Tensor:
        """(m, L+1) attention mask of the next forward pass, of one token per text."""
        width = self.get_seq_length() + 1
        return (torch.arange(width, device=self.padding.device) >= self.padding[:, None]).long()
