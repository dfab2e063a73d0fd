"""The base of all curvature operators, and flat vectors: the parameters concatenated in order, (P,)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce

import torch
from torch import Tensor


class Operator:
    """A symmetric linear map (P,) → (P,) of flat vectors like some parameters, which counts its `products`."""

    def __init__(self, parameters: Sequence[Tensor], product: Callable[[Tensor], Tensor]) -> None:
        self.size = sum(p.numel() for p in parameters)
        self.device = parameters[0].device
        self.dtype = common_dtype(parameters)
        self.products = 0
        self._product = product

    def __matmul__(self, vector: Tensor) -> Tensor:
        self.products += 1
        return self._product(vector)


def flatten(tensors: Sequence[Tensor | None], like: Sequence[Tensor]) -> Tensor:
    """Detached tensors concatenated to (P,), with None as zeros, in the widest dtype and on the first device of `like`."""
    dtype, device = common_dtype(like), like[0].device
    pairs = zip(tensors, like, strict=True)
    parts = [
        torch.zeros(r.numel(), dtype=dtype, device=device)
        if t is None
        else t.detach().reshape(-1).to(dtype=dtype, device=device)
        for t, r in pairs
    ]
    return torch.cat(parts)


def unflatten(vector: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """A vector (P,) split into the shapes of `like`; views where dtype and device agree."""
    parts = zip(vector.split([tensor.numel() for tensor in like]), like, strict=True)
    return [part.view(tensor.shape).to(tensor) for part, tensor in parts]


def common_dtype(tensors: Sequence[Tensor]) -> torch.dtype:
    """The widest dtype of `tensors`."""
    return reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
