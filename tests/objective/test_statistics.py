"""Summaries of weights by value."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from sharpscope.config.token_weights import LinearWeight, SigmoidWeight
from sharpscope.config.weighting import percentile
from sharpscope.objective import (
    named_method,
    summarize_weights,
)
from tests.oracles import objective as oracle


def test_weight_summary_by_value():
    weight = torch.tensor([[1.0, 1.0, 1.2, 1.4, 9.0]])
    mask = torch.tensor([[1, 1, 1, 1, 0]])
    got = summarize_weights(SigmoidWeight(), weight, mask)
    assert (got.saturation_low, got.saturation_high, got.minimum, got.maximum) == (0.5, 0.25, 1.0, pytest.approx(1.4))
    assert got.mean == pytest.approx(1.15)
    assert got.std == pytest.approx(math.sqrt((2 * 0.15**2 + 0.05**2 + 0.25**2) / 4))
    assert got.ess == pytest.approx(4.6**2 / (4 * (1 + 1 + 1.44 + 1.96)))
    assert got.warning is None
    unbounded = summarize_weights(named_method("cov-grpo").weight, weight, mask)
    assert unbounded.saturation_low is None
    assert unbounded.warning is None
    assert math.isnan(summarize_weights(SigmoidWeight(), weight, torch.zeros_like(mask)).mean)


@pytest.mark.parametrize(("at_bound", "warns"), [(95, False), (96, True)])
def test_saturation_warns_above_95_percent(at_bound: int, warns: bool):
    weight: Tensor = torch.full((1, 100), 0.9)
    weight[0, :at_bound] = 1.0
    got = summarize_weights(LinearWeight(), weight, torch.ones(1, 100))
    assert got.saturation_high == pytest.approx(at_bound / 100)
    assert (got.warning is not None) == warns


@pytest.mark.parametrize("seed", range(5))
def test_weighted_percentiles_against_brute_force(seed: int):
    """The smallest value with at least q % of the mass at or below it; with equal masses, of the sorted values."""
    g = torch.Generator().manual_seed(seed)
    value = torch.randint(0, 12, (4, 9), generator=g).double()  # ties
    mass = torch.rand(4, 9, generator=g, dtype=torch.float64) * (torch.rand(4, 9, generator=g) < 0.7)
    mask = torch.rand(4, 9, generator=g) < 0.8
    value[~mask] = torch.nan
    inside, masses = value[mask].tolist(), mass[mask].tolist()
    for q in (0.5, 10, 37, 50, 90, 100):
        assert percentile(value, mask, q, mass) == oracle.mass_percentile(inside, masses, q / 100)
        repeated = np.percentile(inside, q, method="inverted_cdf")
        assert percentile(value, mask, q, torch.full_like(mass, 0.25)) == repeated
