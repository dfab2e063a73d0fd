"""Controls around a shaping: what is left of it when its alignment, its mean or its spread is taken away."""

from __future__ import annotations

import torch
from torch import Tensor

from sharpscope.errors import UserError


def shuffled(weight: Tensor, mask: Tensor, generator: torch.Generator) -> Tensor:
    """Permute each row's weights over its loss tokens, uniformly; the mask may have holes.

    Args:
        weight: (N, T).
        mask: (N, T) bool.
        generator: where the permutations come from; drawn on its own device.

    Returns:
        (N, T), the same multiset of weights in each row's mask.
    """
    key = torch.rand(mask.shape, generator=generator, device=generator.device, dtype=torch.float64).to(weight.device)
    random_order = torch.where(mask, key, 2.0).argsort(dim=-1, stable=True)  # (N, T) loss tokens first, in random order
    in_order = (~mask).to(torch.int8).argsort(dim=-1, stable=True)  # (N, T) loss tokens first, in their order
    return torch.empty_like(weight).scatter_(-1, in_order, weight.gather(-1, random_order))


def mean_weight(weight: Tensor, mask: Tensor) -> Tensor:
    """Mean over the step's loss tokens, a scalar of weight's dtype."""
    return weight[mask].double().mean().to(weight.dtype)


def constant(weight: Tensor, mask: Tensor) -> Tensor:
    """Every weight is the step's mean."""
    return mean_weight(weight, mask).expand_as(weight)


def mean_one(weight: Tensor, mask: Tensor) -> Tensor:
    """Weights divided by the step's mean.

    Raises:
        UserError: the mean is 0.
    """
    mean = mean_weight(weight, mask)
    if not bool(mean > 0):
        raise UserError("method.weight: mean_one around weights that are all 0; choose another shaping")
    return weight / mean


def reverse(weight: Tensor, bounds: tuple[float, float]) -> Tensor:
    """L + U − w."""
    return bounds[0] + bounds[1] - weight
