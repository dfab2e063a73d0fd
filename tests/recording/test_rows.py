"""Rows of steps: statistics of weights by the gradient that tokens carry."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sharpscope.recording.rows import steps_row, unweighted_gradient
from sharpscope.recording.step import StepTokens
from tests.training.test_learner import learn, learner_of, method_of, world  # noqa: F401 - a fixture


def tokens_of(coef, weight, advantage=1.0, ratio=1.0) -> StepTokens:
    """Tokens with these values (N, T) and ‖p − e_y‖ of 1, 2, 3, …"""
    from sharpscope.policy.token_stats import STAT_NAMES, TokenStats

    shape = coef.shape
    norms = torch.arange(1.0, coef.numel() + 1, dtype=torch.float64).view(shape)
    tokens = StepTokens.unused(TokenStats(**dict.fromkeys(STAT_NAMES, norms)))
    tokens.loss_coef, tokens.weight = coef, weight
    tokens.advantage, tokens.ratio = torch.full(shape, advantage).double(), torch.full(shape, ratio).double()
    return tokens


def test_the_gradient_carried_is_the_coefficient_without_the_weight():
    """c = −w·A·r/n with completions of 3 and 2 tokens, of which the second of each has weight 0."""
    weight = torch.tensor([[1.0, 0.0, 1.4], [0.5, 0.0, 9.0]], dtype=torch.float64)
    used = torch.tensor([[True, True, True], [True, True, False]])
    plain = torch.tensor([[2 / 3] * 3, [1.0] * 3], dtype=torch.float64)  # |A|·r/n with A = −2, r = 1
    tokens = tokens_of(plain * weight, weight, advantage=-2.0)
    torch.testing.assert_close(unweighted_gradient(tokens, used), torch.where(used, plain, 0.0))
    tokens.clipped = torch.tensor([[0, 1, 0], [0, 0, 0]], dtype=torch.int8)  # without a gradient at any weight
    plain[0, 1] = 0.0
    torch.testing.assert_close(unweighted_gradient(tokens, used), torch.where(used, plain, 0.0))
    nothing = tokens_of(torch.zeros(1, 2).double(), torch.ones(1, 2).double(), advantage=0.0)
    assert not unweighted_gradient(nothing, torch.ones(1, 2, dtype=torch.bool)).any()


def test_weight_statistics_count_tokens_by_the_gradient_they_carry(world):  # noqa: F811
    policy, drawn = world
    method = method_of("grpo-sg")
    learned = learn(learner_of(policy, mini_batches=2), drawn, "grpo-sg")
    tokens, mask = learned.tokens, drawn.rollouts.completion_mask.bool()
    row = steps_row(1, drawn, learned, method, 0.0, 1e-3)
    pairs = [
        (float(tokens.weight[i, t]), float(tokens.loss_coef[i, t].abs() / tokens.weight[i, t]), i, t)
        for i, t in mask.nonzero().tolist()
    ]
    mass = np.array([c * float(tokens.stats.logit_grad_norm[i, t]) for _, c, i, t in pairs])
    w = np.array([w for w, *_ in pairs])
    mean = (mass * w).sum() / mass.sum()
    for name, value in {
        "mean": mean,
        "saturation_low": mass[w <= 0.1 + 1e-6].sum() / mass.sum(),
        "saturation_high": mass[w >= 1.4 - 1e-6].sum() / mass.sum(),
    }.items():
        assert row[f"weight_{name}_gradient"] == pytest.approx(value, rel=1e-9, abs=1e-12)
    assert abs(row["weight_mean_gradient"] - row["weight_mean"]) > 1e-3
    assert row["gradient_rotation"] is None
