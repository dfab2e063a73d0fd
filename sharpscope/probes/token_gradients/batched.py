"""Backward functions that see all cotangents of a `torch.func.vmap` at once.

A `torch.autograd.Function` may state its own rule for `vmap`, but each call of such a rule costs about as much as thirty
tensor operations, and a backward pass makes dozens of them. Unwrapping the batched tensor by the functions that `vmap`
itself uses costs next to nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_C = torch._C._functorch


def unwrapped(g: Tensor) -> Tensor:
    """(n, *shape): the cotangents behind `g`, of shape `shape` as the backward pass shows it; n is 1 outside `vmap`."""
    if not _C.is_batchedtensor(g):
        return g[None]
    return _C.get_unwrapped(g).movedim(_C.maybe_get_bdim(g), 0)


def each(g: Tensor, function: Callable[[Tensor], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """`function`, which maps (n, *shape) to tensors of n entries, of the cotangents behind `g`, wrapped again as `g` is."""
    results = function(unwrapped(g))
    if not _C.is_batchedtensor(g):
        return tuple(result[0] for result in results)
    level = _C.maybe_get_level(g)
    return tuple(_C._add_batch_dim(result, 0, level) for result in results)
