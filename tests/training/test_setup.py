"""AdamW's schedule against transformers', its groups, and the order of examples."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import get_scheduler

from sharpscope import memory
from sharpscope.config.training import OptimizerSpec
from sharpscope.errors import UserError
from sharpscope.tasks import Example
from sharpscope.training import train
from sharpscope.training.rollouts import DataOrder
from sharpscope.training.setup import build_optimizer, learning_rate, load_start
from tests.models import tiny_model


def test_decay_spares_vectors():
    model = tiny_model("gpt2")
    groups = build_optimizer(model, OptimizerSpec(weight_decay=0.1)).param_groups
    assert {p.ndim >= 2 for p in groups[0]["params"]} == {True} and groups[0]["weight_decay"] == 0.1
    assert {p.ndim for p in groups[1]["params"]} == {1} and groups[1]["weight_decay"] == 0.0
    assert sum(len(g["params"]) for g in groups) == len(list(model.parameters()))


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
    assert learning_rate(OptimizerSpec(lr=0.1, schedule=schedule), 1, 1) == 0.1


def examples(count: int) -> list[Example]:
    return [Example(str(index), "", {"id": str(index)}) for index in range(count)]


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 12), st.lists(st.integers(1, 7), max_size=8), st.integers(0, 5), st.integers(0, 9))
def test_epochs_are_permutations_and_the_cursor_is_the_only_state(count, takes, seed, cut):
    order = DataOrder(examples(count), seed)
    seen = [example.prompt for take in takes for example in order.take(take)]
    assert order.cursor == len(seen)
    for start in range(0, len(seen) - count + 1, count):
        assert sorted(seen[start : start + count], key=int) == [str(index) for index in range(count)]
    rest = DataOrder(examples(count), seed, cursor=min(cut, len(seen))).take(len(seen) - min(cut, len(seen)))
    assert [example.prompt for example in rest] == seen[cut:]


def test_epochs_and_seeds_differ():
    first = DataOrder(examples(50), 0)
    one, two = first.take(50), first.take(50)
    assert one != two and DataOrder(examples(50), 1).take(50) != one


def test_what_training_needs_is_compared_with_free_memory_before_the_folder_is_made(toy_config, monkeypatch):
    """Weights, then as much for the gradient and for each of AdamW's moments."""
    config = toy_config(steps=1)
    policy = load_start(config, None)
    monkeypatch.setattr(memory, "free_memory", lambda device: 11.9 * policy.parameters)
    with pytest.raises(UserError, match="memory: a gradient with AdamW's two moments takes about"):
        train(config)
    assert not config.run_dir.exists()
