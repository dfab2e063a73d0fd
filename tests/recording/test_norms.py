"""Norms of gradients and of AdamW's steps, against the parameters themselves."""

from __future__ import annotations

import math

import pytest
import torch

from sharpscope.config.training import OptimizerSpec
from sharpscope.recording.norms import gradient_norm, gradient_norms, layer_groups, update_norm, update_norms
from sharpscope.training.setup import build_optimizer
from tests.models import tiny_model


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_update_norm_is_the_distance_that_the_parameters_moved(decay):
    model = tiny_model("qwen2")
    optimizer = build_optimizer(model, OptimizerSpec(lr=0.01, weight_decay=decay))
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.step()
        moved = math.sqrt(
            sum(float((a.detach() - b).pow(2).sum()) for a, b in zip(model.parameters(), before, strict=True))
        )
        assert update_norm(optimizer) == pytest.approx(moved, rel=1e-6)


def test_a_parameter_without_gradient_does_not_count():
    model = tiny_model("qwen2", tie=False)
    optimizer = build_optimizer(model, OptimizerSpec(lr=0.01, weight_decay=0.1))
    parameters = list(model.parameters())
    parameters[0].grad = torch.ones_like(parameters[0])
    before = parameters[0].detach().clone()
    optimizer.step()
    assert update_norm(optimizer) == pytest.approx(float((parameters[0].detach() - before).norm()), rel=1e-9)
    assert gradient_norm(parameters) == pytest.approx(math.sqrt(parameters[0].numel()))


def test_norms_by_layer_are_those_of_the_parameters_of_each_name():
    """Against a loop over names; the squares sum to the total. A shared embedding counts once."""
    for tie in (False, True):
        model = tiny_model("qwen2", tie=tie)
        optimizer = build_optimizer(model, OptimizerSpec(lr=0.01, weight_decay=0.1))
        groups = layer_groups(model)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, dtype=parameter.dtype)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        gradient = gradient_norms(model.parameters(), groups)
        optimizer.step()
        moved = update_norms(optimizer, groups)
        expected: dict[str, list[float]] = {}
        for name, p in model.named_parameters():
            kind = next(
                kind
                for word, kind in (
                    ("norm", "norm"),
                    ("attn", "attention"),
                    ("mlp", "mlp"),
                    ("embed", "embedding"),
                    ("lm_", "head"),
                )
                if word in name
            )
            group = f"{name.split('.')[2]}.{kind}" if ".layers." in name else kind
            squares = expected.setdefault(group, [0.0, 0.0])
            assert p.grad is not None
            squares[0] += float(p.grad.double().square().sum())
            squares[1] += float((p.detach() - before[name]).double().square().sum())
        assert set(gradient.layers) == set(moved.layers) == set(expected)
        for group, (square, change) in expected.items():
            assert gradient.layers[group] == pytest.approx(math.sqrt(square), rel=1e-6)
            assert moved.layers[group] == pytest.approx(math.sqrt(change), rel=1e-4)
        assert gradient.total == pytest.approx(math.hypot(*gradient.layers.values()), rel=1e-12)
