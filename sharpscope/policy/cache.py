"""Differentiable key-value cache of prompts that many completions share.

It keeps all positions in every layer, and positions in the cache equal positions in the row, so the masks of
transformers (full or sliding window) apply.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from sharpscope.errors import UserError
from sharpscope.policy.head import bare

CACHED_LAYER_TYPES = {"full_attention", "sliding_attention"}
WORTH_A_PASS = 512
"""A beginning that all prompts share, such as worked examples or a system message, is run by itself if it saves this many tokens."""


def cache_keyword(model: nn.Module) -> str:
    """The argument of the model's forward that takes a cache: `cache` from transformers 5.24 on, `past_key_values` before.

    Raises:
        UserError: There is none.
    """
    for name in ("cache", "past_key_values"):
        if name in signature(bare(model).forward).parameters:
            return name
    raise UserError(f"{type(bare(model)).__name__} takes no key-value cache")


def check_cacheable(model: nn.Module) -> None:
    """Check that keys and values are the model's only state.

    Raises:
        UserError: The model has other layers (recurrent, chunked attention).
    """
    config = bare(model).config
    other = set(getattr(config, "layer_types", None) or ()) - CACHED_LAYER_TYPES
    if other:
        what = f"{type(bare(model)).__name__}: layers of type {', '.join(sorted(other))}"
        raise UserError(
            f"policy.model, {what} are not supported; choose a model with full or sliding-window attention"
        )


class _Rows(Protocol):
    """What `_TakeRows` keeps for its backward pass."""

    count: int  # of the rows that were there
    saved_tensors: tuple[Tensor]  # the rows that were taken

    def save_for_backward(self, *tensors: Tensor) -> None:
        """Set `saved_tensors`."""


class _TakeRows(torch.autograd.Function):
    """Index rows, with a matrix product in the backward pass.

    It is several times as fast as the backward pass of index_select, and deterministic on all devices.
    """

    @staticmethod
    def forward(ctx: _Rows, states: Tensor, rows: Tensor) -> Tensor:
        """The rows."""
        ctx.save_for_backward(rows)
        ctx.count = len(states)
        return states.index_select(0, rows)

    @staticmethod
    def backward(ctx: _Rows, *gradients: Tensor) -> tuple[Tensor, None]:
        """The sum of the gradients of each row's copies."""
        (rows,) = ctx.saved_tensors
        gradient = gradients[0]  # (n, …)
        selected = torch.arange(ctx.count, device=rows.device)[:, None] == rows  # (B, n)
        total = selected.to(gradient.dtype) @ gradient.reshape(len(rows), -1)
        return total.view(ctx.count, *gradient.shape[1:]), None


def take_rows(states: Tensor, rows: Tensor) -> Tensor:
    """Return `states[rows]`, (B, …) -> (n, …); efficient if `rows` (n,) has many repetitions."""
    return _TakeRows.apply(states, rows)


def change_states(cache: Cache, change: Callable[[Tensor], Tensor]) -> None:
    """Replace the keys and values (B, H, L, d_head) of every layer."""
    for layer in cache.layers:
        assert isinstance(layer, CacheLayerMixin)
        assert layer.keys is not None and layer.values is not None
        layer.keys, layer.values = change(layer.keys), change(layer.values)


class PromptLayer(DynamicLayer):
    """Keys and values (B, H, P, d_head) of prompts, with their autograd graph, after those of `before`: of its only row, or of `rows` (B,).

    An update replaces them, since a layer that is recomputed in the backward pass updates them again; with `rows` they are not kept.
    """

    keys: Tensor
    values: Tensor

    def __init__(self, before: PromptLayer | None = None, rows: Tensor | None = None) -> None:
        super().__init__()
        self.before, self.rows = before, rows

    def get_seq_length(self) -> int:
        """Number of positions."""
        known = self if self.is_initialized else self.before
        return 0 if known is None else known.keys.shape[2]

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        *args: object,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor]:
        """Set states (B, H, t, d_head) and return all keys and values to attend to; see transformers."""
        if self.before is not None:
            key_states, value_states = (
                torch.cat([self._first(part, len(states)), states], 2)
                for part, states in (
                    (self.before.keys, key_states),
                    (self.before.values, value_states),
                )
            )
        if self.rows is None:
            self.keys = key_states
            self.values = value_states
            self.is_initialized = True
        return key_states, value_states

    def _first(self, part: Tensor, count: int) -> Tensor:
        return part.expand(count, -1, -1, -1) if self.rows is None else take_rows(part, self.rows)


class PromptCache(Cache):
    """Differentiable cache of B prompts, after the `beginning` (a cache of one) that they share.

    `continuation(row_prompt)` is a cache of n rows that continue them.
    """

    def __init__(self, beginning: PromptCache | None = None) -> None:
        if beginning is None:
            super().__init__(layer_class_to_replicate=PromptLayer)
        else:
            super().__init__(layers=[PromptLayer(layer) for layer in beginning.layers])  # type: ignore[arg-type]

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
        layers = cast(list[PromptLayer], self.layers)
        for layer, pair in zip(layers, self.states, strict=True):  # (B, H, P, d)
            layer.keys, layer.values = (
                s.gather(2, index.expand(-1, s.shape[1], -1, s.shape[3])) for s in pair
            )

    def continuation(self, row_prompt: Tensor) -> Cache:
        """Cache for one forward pass of n rows with the prompts `row_prompt` (n,) long."""
        return Cache(layers=[PromptLayer(layer, row_prompt) for layer in self.layers])  # type: ignore[arg-type]


def read_prompts(body: nn.Module, ids: Tensor, lengths: Tensor) -> tuple[Tensor, PromptCache]:
    """Run B prompts of `lengths` (B,) once; `ids` (B, P) are padded on the right, so that causal attention needs no mask.

    Returns the hidden state (B, d) of each prompt's last token, and the cache, padded on the *left*, so that completions are
    adjacent to their prompts and distances in the cache are distances in the text.
    """
    keyword = cache_keyword(body)
    same = (ids == ids[:1]).all(0)  # (P,)
    common = int(same.long().cumprod(0).sum().clamp_max(lengths.min() - 1))
    cache = PromptCache()
    if common * (len(ids) - 1) < WORTH_A_PASS:
        common = 0
    else:
        beginning = ids[:1, :common]
        body(
            input_ids=beginning,
            attention_mask=torch.ones_like(beginning),
            use_cache=True,
            **{keyword: cache},
        )
        cache = PromptCache(cache)
    # (B, P - common, d)
    hidden = body(
        input_ids=ids[:, common:],
        attention_mask=torch.ones_like(ids),  # only padding attends to padding
        position_ids=torch.arange(common, ids.shape[1], device=ids.device)[None],
        use_cache=True,
        **{keyword: cache},
    ).last_hidden_state
    cache.pad_left(ids.shape[1] - lengths)
    return hidden[torch.arange(len(ids), device=ids.device), lengths - 1 - common], cache
