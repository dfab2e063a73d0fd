"""Norms of gradients and of AdamW's steps, against the parameters themselves."""

from __future__ import annotations

import math

import pytest
import torch

from sharpscope.config.run import OptimizerSpec
from sharpscope.recording.norms import gradient_norm, gradient_norms, layer_groups, update_norm, update_norms
from sharpscope.training.learner import build_optimizer
from tests.models import tiny_model


def test_a_parameter_without_gradient_does_not_count():
    model = tiny_model("qwen2", tie=False)
    optimizer = build_optimizer(model, OptimizerSpec(lr=0.01, weight_decay=0.1))
    parameters = list(model.parameters())
    parameters[0].grad = torch.ones_like(parameters[0])
    before = parameters[0].detach().clone()
    optimizer.step()
    assert update_norm(optimizer) == pytest.approx(float((parameters[0].detach() - before).norm()), rel=1e-9)
    assert gradient_norm(parameters) == pytest.approx(math.sqrt(parameters[0].numel()))


KINDS = {"norm": "norm", "attn": "attention", "mlp": "mlp", "embed": "embedding", "lm_": "head"}


@pytest.mark.parametrize(("tie", "decay"), [(False, 0.3), (True, 0.3), (True, 0.0)])
def test_norms_by_layer_are_those_of_the_parameters_of_each_name(tie, decay):
    """Against a loop over names, in three steps; the squares sum to the total. A shared embedding counts once."""
    model = tiny_model("qwen2", tie=tie)
    optimizer, groups = build_optimizer(model, OptimizerSpec(lr=0.01, weight_decay=decay)), layer_groups(model)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        gradient = gradient_norms(model.parameters(), groups)
        optimizer.step()
        moved = update_norms(optimizer, groups)
        expected: dict[str, list[float]] = {}
        for name, p in model.named_parameters():
            kind = next(kind for word, kind in KINDS.items() if word in name)
            group = f"{name.split('.')[2]}.{kind}" if ".layers." in name else kind
            squares = expected.setdefault(group, [0.0, 0.0])
            assert p.grad is not None
            squares[0] += float(p.grad.square().sum())
            squares[1] += float((p.detach() - before[name]).square().sum())
        assert gradient.layers == pytest.approx({group: math.sqrt(s) for group, (s, _) in expected.items()}, rel=1e-9)
        assert moved.layers == pytest.approx({group: math.sqrt(s) for group, (_, s) in expected.items()}, rel=1e-6)
        assert gradient.total == pytest.approx(math.hypot(*gradient.layers.values()), rel=1e-12)
        assert update_norm(optimizer) == moved.total == pytest.approx(math.hypot(*moved.layers.values()), rel=1e-12)
