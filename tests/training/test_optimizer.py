"""AdamW's schedule and the size of its step, against the parameters themselves."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import get_scheduler

from sharpscope.config.training import OptimizerSpec
from sharpscope.recording.norms import gradient_norm
from sharpscope.training.optimizer import build_optimizer, learning_rate, scale_gradients
from tests.models import tiny_model


def test_decay_spares_vectors():
    model = tiny_model("gpt2")
    groups = build_optimizer(model, OptimizerSpec(weight_decay=0.1)).param_groups
    assert {p.ndim >= 2 for p in groups[0]["params"]} == {True} and groups[0]["weight_decay"] == 0.1
    assert {p.ndim for p in groups[1]["params"]} == {1} and groups[1]["weight_decay"] == 0.0
    assert sum(len(g["params"]) for g in groups) == len(list(model.parameters()))


def test_learning_rate_by_hand():
    spec = OptimizerSpec(lr=1.0, warmup_steps=4, schedule="linear")
    assert [learning_rate(spec, step, 8) for step in range(1, 9)] == [0.25, 0.5, 0.75, 1.0, 0.75, 0.5, 0.25, 0.0]
    cosine = spec.model_copy(update={"schedule": "cosine", "warmup_steps": 0})
    assert [learning_rate(cosine, step, 5) for step in range(1, 6)] == pytest.approx(
        [1.0, 0.5 * (1 + math.cos(math.pi / 4)), 0.5, 0.5 * (1 + math.cos(3 * math.pi / 4)), 0.0]
    )
    assert {learning_rate(OptimizerSpec(lr=0.1), step, 9) for step in range(1, 10)} == {0.1}
    for schedule in ("constant", "linear", "cosine"):
        assert learning_rate(OptimizerSpec(lr=0.1, schedule=schedule), 1, 1) == 0.1


@pytest.mark.parametrize("warmup", [0, 1, 3, 11])
@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_learning_rate_is_transformers_schedule_and_ends_at_zero(schedule, warmup):
    steps, spec = 12, OptimizerSpec(lr=0.3, warmup_steps=warmup, schedule=schedule)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.3)
    # without warm-up the first step has the peak, which is a warm-up of one step
    scheduler = get_scheduler(schedule, optimizer, num_warmup_steps=max(warmup, 1), num_training_steps=steps)
    for step in range(1, steps + 1):
        optimizer.step()
        scheduler.step()
        assert learning_rate(spec, step, steps) == pytest.approx(scheduler.get_last_lr()[0], abs=1e-15)
    assert learning_rate(spec, steps, steps) == 0.0


def test_scaling_scales_the_norm():
    model = tiny_model("llama")
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    norm = gradient_norm(model.parameters())
    scale_gradients(model.parameters(), 0.25)
    assert gradient_norm(model.parameters()) == pytest.approx(norm / 4)
