"""Shapings of one's own for tests."""

from __future__ import annotations

import torch

from sharpscope import weight_bounds


@weight_bounds(0.0, 2.0)
def sometimes_nan(step):
    """Weight 1, but NaN at the second step."""
    middle = 0.25 < step.progress < 0.75
    return torch.full_like(step.logp, float("nan") if middle else 1.0)


@weight_bounds(0.5, 1.5)
def by_probability(step):
    """Weight one half more than the token's probability: as good as no two alike."""
    return step.logp.exp() + 0.5
