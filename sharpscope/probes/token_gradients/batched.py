"""Backward functions that receive all cotangents of a `torch.func.vmap` at once.

The public way, a `vmap` rule of a `torch.autograd.Function`, costs about as much as thirty tensor operations per call, and a
backward pass makes dozens of calls. Unwrapping the batched tensor by the functions that `vmap` itself uses costs very little.
These are not public, so they are tested once, and if the test fails the public rule is used: the same values, more slowly.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

Function = Callable[[Tensor], tuple[Tensor, ...]]
_C: Any = getattr(torch._C, "_functorch", None)


@cache
def way() -> Literal["direct", "rule"]:
    """How batched cotangents are accessed: by the functions of `vmap` (`direct`) or by its public rule (`rule`)."""
    g = torch.arange(6.0).view(3, 2)
    seen: list[Tensor] = []

    def doubled(rows: Tensor) -> tuple[Tensor]:
        seen.append(rows)
        return (rows * 2,)

    try:
        outputs = torch.func.vmap(lambda row: _directly(row, doubled)[0] + row, in_dims=1)(g)
        right = torch.equal(outputs, 3 * g.T) and [rows.tolist() for rows in seen] == [g.T.tolist()]
    except (AttributeError, TypeError, RuntimeError, IndexError):
        return "rule"
    return "direct" if right else "rule"


def each(g: Tensor, function: Function) -> tuple[Tensor, ...]:
    """Apply `function` to all cotangents behind `g` at once.

    Args:
        g: (*shape) cotangent, as seen by a backward function.
        function: maps (n, *shape) to tensors with n entries; n is 1 outside `vmap`.
    """
    return _directly(g, function) if way() == "direct" else _Rule.apply(g, function)


def _directly(g: Tensor, function: Function) -> tuple[Tensor, ...]:
    if not _C.is_batchedtensor(g):
        return tuple(result[0] for result in function(g[None]))
    level = _C.maybe_get_level(g)
    behind = _C.get_unwrapped(g).movedim(_C.maybe_get_bdim(g), 0)  # (n, *shape)
    return tuple(_C._add_batch_dim(result, 0, level) for result in function(behind))


class _Rule(torch.autograd.Function):
    """`function` with a rule for `vmap`; it is not differentiated."""

    @staticmethod
    def forward(g: Tensor, function: Function) -> tuple[Tensor, ...]:
        return tuple(result[0] for result in function(g[None]))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], g: Tensor, function: Function) -> tuple[Any, Any]:
        if in_dims[0] is None:
            return tuple(result[0] for result in function(g[None])), None
        outputs = tuple(function(g.movedim(in_dims[0], 0)))
        return outputs, (0,) * len(outputs)
