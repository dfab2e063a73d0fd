"""Key-value caches: one that decoding writes in place, one through which gradients reach a shared prompt.

Both keep every key of every layer, so positions in the cache equal positions in the row and transformers' own masks
(full or sliding window) are right for them.
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
    """Make sure that keys and values are the model's only memory of earlier tokens.

    Raises:
        UserError: it has layers of another kind (recurrent, chunked attention).
    """
    config = bare(model).config
    other = set(getattr(config, "layer_types", None) or ()) - CACHED_LAYER_TYPES
    if other:
        raise UserError(
            f"policy.model, {type(bare(model)).__name__}: layers of type {', '.join(sorted(other))} are not supported; "
            "choose a model with full or sliding-window attention only"
        )


class _Layer(CacheLayerMixin):
    """What transformers asks of a cache layer, for layers that hold all their keys."""

    is_sliding = False
    past = 0
    keys: Tensor
    values: Tensor

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to prepare: the first update brings the tensors."""

    def get_seq_length(self) -> int:
        """Positions held."""
        return self.past

    def get_mask_sizes(self, query: int | Tensor) -> tuple[int, int]:
        """Number of keys that a query of this length will see, and the position of the first."""
        # transformers gives the number of new positions, below 5.5 the positions themselves
        return self.past + (query if isinstance(query, int) else len(query)), 0

    def get_max_length(self) -> int:
        """No limit."""
        return -1

    def get_max_cache_shape(self) -> int:
        """No limit; the name of `get_max_length` in earlier versions of transformers 5."""
        return -1


class _TakeRows(torch.autograd.Function):
    """Rows of a tensor, whose gradient is summed by a matrix product: several times as fast as index_select's, which adds
    element by element, and in the same order every time on every device."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.count = len(states)
        return states.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (rows,), gradient = ctx.saved_tensors, gradients[0]  # (n, …)
        chosen = torch.arange(ctx.count, device=rows.device)[:, None] == rows  # (B, n)
        total = chosen.to(gradient.dtype) @ gradient.reshape(len(rows), -1)
        return total.view(ctx.count, *gradient.shape[1:]), None


def take_rows(states: Tensor, rows: Tensor) -> Tensor:
    """`states[rows]`, (B, …) -> (n, …), for `rows` (n,) that repeat many times."""
    return _TakeRows.apply(states, rows)


class PromptLayer(_Layer):
    """Keeps the prompts' keys and values (B, H, P, d_head), with their graph."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """See transformers: adds the new states (n, H, t, d_head) and returns all that is attended to."""
        self.keys, self.values = key_states, value_states
        self.past = key_states.shape[2]
        return key_states, value_states


class ContinuationLayer(_Layer):
    """Puts the keys and values of each row's prompt before those of its completion, and keeps nothing itself."""

    def __init__(self, prompt: PromptLayer, row_prompt: Tensor) -> None:
        super().__init__()
        self.prompt, self.row_prompt, self.past = prompt, row_prompt, prompt.past

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """See transformers: adds the new states (n, H, t, d_head) and returns all that is attended to."""
        keys = take_rows(self.prompt.keys, self.row_prompt)  # (B, H, P, d) -> (n, H, P, d)
        values = take_rows(self.prompt.values, self.row_prompt)
        return torch.cat([keys, key_states], 2), torch.cat([values, value_states], 2)  # (n, H, P+T, d)


class AppendLayer(_Layer):
    """Keeps given keys and values (n, H, L, d_head) and those of what is read after them."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.keys, self.values, self.past = keys, values, keys.shape[2]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """See transformers: adds the new states (n, H, t, d_head) and returns all that is held."""
        self.keys = torch.cat([self.keys, key_states], 2)
        self.values = torch.cat([self.values, value_states], 2)
        self.past = self.keys.shape[2]
        return self.keys, self.values


class PromptCache(Cache):
    """Differentiable cache of B prompts; `continuation(row_prompt)` continues them in n rows."""

    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=PromptLayer)

    @classmethod
    def of(cls, states: Iterable[tuple[Tensor, Tensor]]) -> PromptCache:
        """A cache that holds these keys and values, (B, H, P, d_head) both, layer by layer."""
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

    def move_right(self, behind: Tensor) -> None:
        """Turn right padding into left padding: what stands before the last `behind` (B,) positions goes to the end."""
        if not bool(behind.any()):
            return
        width = self.states[0][0].shape[2]
        place = torch.arange(width, device=behind.device)[None] - behind[:, None]  # (B, P)
        place = place.clamp_min(0)[:, None, :, None]  # what padding holds does not matter, as long as it is finite
        for layer in self.layers:
            for name in ("keys", "values"):
                states = getattr(layer, name)  # (B, H, P, d)
                setattr(layer, name, states.gather(2, place.expand(-1, states.shape[1], -1, states.shape[3])))

    def rows(self, index: Tensor) -> PromptCache:
        """The texts `index` (m,) long."""
        return PromptCache.of((keys[index], values[index]) for keys, values in self.states)

    def continuation(self, row_prompt: Tensor) -> Cache:
        """A cache for rows whose prompts are `row_prompt` (n,) long, for one forward pass."""
        return Cache(layers=[ContinuationLayer(layer, row_prompt) for layer in self.layers])  # type: ignore[arg-type]


def read_prompts(body: nn.Module, ids: Tensor, lengths: Tensor) -> tuple[Tensor, PromptCache]:
    """Run B prompts, once each.

    Args:
        body: the model without its output layer.
        ids: (B, P) token ids, padded on the right: causal attention then needs no mask.
        lengths: (B,) tokens of each prompt.

    Returns:
        The hidden state (B, d) of each prompt's last token; and the cache, padded on the *left*, so that what follows
        is adjacent to every prompt and distances in the cache are distances in the text.
    """
    cache = PromptCache()
    # The mask of ones says that padding is meant to be seen by what is padding itself; nothing earlier looks at it.
    everything = torch.ones_like(ids)
    hidden = body(
        input_ids=ids, attention_mask=everything, past_key_values=cache, use_cache=True
    ).last_hidden_state  # (B, P, d)
    cache.move_right(ids.shape[1] - lengths)
    return hidden[torch.arange(len(ids), device=ids.device), lengths - 1], cache


def read_on(
    body: nn.Module, before: PromptCache, lengths: Tensor, ids: Tensor, new: Tensor
) -> tuple[Tensor, PromptCache, Tensor]:
    """Read more of n texts whose beginnings a cache holds.

    Args:
        body: the model without its output layer.
        before: what was read so far, (n, H, W, d_head) per layer, padded on the left.
        lengths: (n,) tokens of each text so far.
        ids: (n, K) tokens to read, padded on the right.
        new: (n,) of them that are no padding, at least 1.

    Returns:
        The hidden state (n, d) of each text's last token; the cache of all of it, padded on the left; and (n,) the
        tokens of each text now.
    """
    width, here = before.states[0][0].shape[2], torch.arange(ids.shape[1], device=ids.device)
    seen = torch.arange(width, device=ids.device) >= width - lengths[:, None]  # (n, W)
    cache = Cache(layers=[AppendLayer(keys, values) for keys, values in before.states])
    hidden = body(
        input_ids=ids, attention_mask=torch.cat([seen.long(), torch.ones_like(ids)], 1),
        # Padding gets the last token's position: one of its own might lie outside the context.
        position_ids=lengths[:, None] + torch.minimum(here, new[:, None] - 1),
        past_key_values=cache, use_cache=True,
    ).last_hidden_state  # (n, K, d)  # fmt: skip
    after = PromptCache.of((layer.keys, layer.values) for layer in cache.layers)  # type: ignore[union-attr, misc]
    after.move_right(ids.shape[1] - new)
    return hidden[torch.arange(len(ids), device=ids.device), new - 1], after, lengths + new


def stack(parts: Sequence[PromptCache]) -> PromptCache:
    """The texts of several caches, padded on the left, one after the other in one cache as wide as the widest."""
    width = max(part.states[0][0].shape[2] for part in parts)
    layers = zip(*(part.states for part in parts), strict=True)
    return PromptCache.of(
        (_stack([keys for keys, _ in layer], width), _stack([values for _, values in layer], width)) for layer in layers
    )


def _stack(parts: Sequence[Tensor], width: int) -> Tensor:
    return torch.cat([pad(part, (0, 0, width - part.shape[2], 0)) for part in parts])


class GrowingLayer(_Layer):
    """Keys and values of n rows, written in place one position a forward pass.

    Args:
        keys: (n, H, L, d_head), what the rows start with; L may be 0.
        values: (n, H, L, d_head).
        room: positions to make room for; the room doubles when it is full.
        before: positions that precede these ones and are kept elsewhere.
    """

    def __init__(self, keys: Tensor, values: Tensor, room: int, before: int = 0) -> None:
        super().__init__()
        self.used, self.before = keys.shape[2], before
        self.keys, self.values = _with_room(keys, room), _with_room(values, room)

    @property
    def past(self) -> int:  # type: ignore[override]
        """Positions so far."""
        return self.before + self.used

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """See transformers: adds the new states (n, H, t, d_head) and returns all that is held."""
        start, self.used = self.used, self.used + key_states.shape[2]
        if self.used > self.keys.shape[2]:
            room = max(self.used, 2 * self.keys.shape[2]) - start
            self.keys, self.values = (
                _with_room(self.keys[:, :, :start], room),
                _with_room(self.values[:, :, :start], room),
            )
        self.keys[:, :, start : self.used] = key_states
        self.values[:, :, start : self.used] = value_states
        return self.keys[:, :, : self.used], self.values[:, :, : self.used]

    def of(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values (m, H, L, d_head) of `rows` (m,)."""
        return self.keys[rows, :, : self.used], self.values[rows, :, : self.used]

    def keep(self, rows: Tensor, skip: int = 0) -> None:
        """Keep only `rows` (long), without their first `skip` positions."""
        room = self.keys.shape[2] - self.used
        self.keys = _with_room(self.keys[:, :, skip : self.used], room, rows)
        self.values = _with_room(self.values[:, :, skip : self.used], room, rows)
        self.used -= skip


def _with_room(states: Tensor, room: int, rows: Tensor | None = None) -> Tensor:
    """`states` (n, H, L, d), or `rows` of it, in a new tensor with `room` positions behind them."""
    count, heads, used, width = states.shape
    grown = states.new_empty(count if rows is None else len(rows), heads, used + room, width)
    grown[:, :, :used] = states if rows is None else states.index_select(0, rows)
    return grown


class DecodeCache(Cache):
    """The cache of n rows being decoded, each with a copy of its prompt's keys and values.

    For models whose attention cannot be replaced; `SharedDecodeCache` needs no copies.

    Args:
        prompts: the B prompts' cache.
        lengths: (B,) tokens of each prompt.
        row_prompt: (n,) prompt of each row.
        room: positions behind the prompts to start with.
    """

    def __init__(self, prompts: PromptCache, lengths: Tensor, row_prompt: Tensor, room: int) -> None:
        layers = [GrowingLayer(keys[row_prompt], values[row_prompt], room) for keys, values in prompts.states]
        super().__init__(layers=layers)  # type: ignore[arg-type]
        self.padding = (layers[0].used - lengths)[row_prompt]  # (n,) columns of padding on the left
        self.tokens = lengths[row_prompt]  # (n,) tokens so far

    def keep(self, rows: Tensor) -> None:
        """Keep only `rows` (long), without the columns that are padding in all of them."""
        self.padding, self.tokens = self.padding[rows], self.tokens[rows]
        skip = int(self.padding.min())
        self.padding = self.padding - skip
        for layer in self.layers:
            layer.keep(rows, skip)  # type: ignore[union-attr]

    def texts(self, rows: Tensor, behind: Tensor) -> PromptCache:
        """All that `rows` (m,) hold but their last `behind` (m,) positions, in a cache of its own."""
        found = PromptCache.of(cast(GrowingLayer, layer).of(rows) for layer in self.layers)
        found.move_right(behind)
        return found

    def mask(self) -> Tensor:
        """(n, L+1) attention mask of the next forward pass, of one token a row."""
        width = self.get_seq_length() + 1
        return (torch.arange(width, device=self.padding.device) >= self.padding[:, None]).long()
