"""Measurements between a forward and its backward pass: the graph of a compiled model keeps rotary frequencies for it."""

from __future__ import annotations

import torch

from sharpscope.policy.guard import guarded
from tests.models import tiny_model


def test_a_backward_pass_may_follow_that_had_saved_the_rotary_frequencies():
    model = tiny_model("llama")
    frequencies = next(b for name, b in model.named_buffers() if name.endswith("inv_freq"))
    scale = torch.ones_like(frequencies, requires_grad=True)
    loss = (frequencies * scale).sum()  # its backward pass needs the frequencies
    before = frequencies.clone()
    with guarded(model):
        frequencies.data.mul_(2.0)  # as embeddings that depend on the length do
    loss.backward()
    assert scale.grad is not None and torch.equal(scale.grad, before)
    assert torch.equal(frequencies, before)
