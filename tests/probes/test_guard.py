"""Probes leave a model bit for bit as it was, also when they raise."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from sharpscope.errors import UserError
from sharpscope.probes import attribute, score_norms
from sharpscope.probes.guard import guarded
from tests.models import random_batch, tiny_model, without_experts


def snapshot(model):
    """What must be equal, and tensors that must be equal bit for bit."""
    parameters, modules = list(model.parameters()), list(model.modules())
    equal = {
        "parameters": [(id(p), p.data_ptr(), id(p.grad), p.requires_grad) for p in parameters],
        "modes": [module.training for module in modules],
        "attention": model.config._attn_implementation,
        "experts": getattr(model.config, "_experts_implementation", None),
        "hooks": sum(len(module._forward_pre_hooks) + len(module._forward_hooks) for module in modules),
    }
    tensors = [*parameters, *model.buffers(), *(p.grad for p in parameters if p.grad is not None)]
    return equal, [torch.get_rng_state(), *(tensor.detach().clone() for tensor in tensors)]


def assert_same(before, after):
    assert before[0] == after[0]
    assert all(torch.equal(x, y) for x, y in zip(before[1], after[1], strict=True))


def disturbed(architecture):
    """A model in a state of its own: training mode in part, some gradients, one parameter frozen."""
    model = without_experts(tiny_model(architecture))
    model.train()
    next(iter(model.children())).eval()
    parameters = list(model.parameters())
    parameters[1].grad = torch.ones_like(parameters[1])
    parameters[2].requires_grad_(False)
    torch.manual_seed(5)
    return model


CALLS = {
    "head": lambda m, b: score_norms(m, b["input_ids"], b["mask"], "head", b["attention_mask"]),
    "local": lambda m, b: score_norms(m, b["input_ids"], b["mask"], "local", b["attention_mask"]),
    "exact": lambda m, b: score_norms(m, b["input_ids"], b["mask"], "exact", b["attention_mask"]),
    "forward": lambda m, b: attribute(m, b["input_ids"], b["mask"], b["mask"].double(), None, b["attention_mask"]),
}


ROPES = {
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 12,
        "factor": 4.0,
        "short_factor": [1.0, 1.1],
        "long_factor": [3.0, 4.0],
    },
}


@pytest.mark.parametrize("rope", sorted(ROPES))
def test_rotary_frequencies_that_follow_the_length_are_put_back(rope):
    """A long text has set them; the probe's shorter rows set them anew."""
    model, batch = tiny_model("llama", max_position_embeddings=12, rope_parameters=ROPES[rope]), random_batch()
    rotary, long = model.model.rotary_emb, torch.arange(20)[None]
    with torch.no_grad():
        logits = model(input_ids=long).logits
    buffers = {name: (buffer, buffer.clone()) for name, buffer in rotary.named_buffers()}
    attributes = dict(rotary.__dict__)
    CALLS["exact"](model, batch)
    assert rotary.__dict__ == attributes
    for name, buffer in rotary.named_buffers():
        assert buffer is buffers[name][0] and torch.equal(buffer, buffers[name][1])
    with torch.no_grad():
        assert torch.equal(model(input_ids=long).logits, logits)


@pytest.mark.parametrize("rope", sorted(ROPES))
def test_rows_that_change_rotary_frequencies_are_refused(rope):
    model = tiny_model("llama", max_position_embeddings=12, rope_parameters=ROPES[rope])
    batch = random_batch(prompt=6, completion=7)
    batch["attention_mask"][:] = 1
    with pytest.raises(UserError, match=f"13 tokens: beyond 12 .*'{rope}'"):
        CALLS["exact"](model, batch)


@pytest.mark.parametrize("call", sorted(CALLS))
def test_nothing_is_kept(call):
    """No graph holds the weights: they can be resized, trained and let go."""
    model, batch = tiny_model("llama"), random_batch()
    CALLS[call](model, batch)
    model.resize_token_embeddings(45, mean_resizing=False)
    model(input_ids=batch["input_ids"]).logits.sum().backward()
    assert all(parameter.grad.shape == parameter.shape for parameter in model.parameters())
    CALLS[call](model, batch)
    parts = [weakref.ref(part) for part in (*model.parameters(), *model.modules())]
    del model
    gc.collect()
    assert not any(part() is not None for part in parts)


@pytest.mark.parametrize("call", ["exact", "forward"])
def test_experts_that_are_computed_together(call):
    """transformers' default has no forward-mode derivative, and no batched backward: probes take the experts in turn."""
    model = without_experts(tiny_model("qwen2_moe", dtype=torch.float32, experts_implementation="grouped_mm"))
    batch = random_batch()
    assert model.config._experts_implementation == "grouped_mm"
    found = CALLS[call](model, batch)
    assert model.config._experts_implementation == "grouped_mm"
    expected = CALLS[call](without_experts(tiny_model("qwen2_moe", dtype=torch.float32)), batch)
    values = [x if isinstance(x, torch.Tensor) else x.squared for x in (found, expected)]
    assert torch.equal(*values)


@pytest.mark.parametrize("call", sorted(CALLS))
def test_left_as_it_was_also_after_an_exception(call):
    """At first the call ends; then a norm raises within the method itself."""
    model, batch = disturbed("qwen2_moe"), random_batch()
    before = snapshot(model)
    CALLS[call](model, batch)
    assert_same(before, snapshot(model))

    def forward(x):
        raise FloatingPointError

    model.model.layers[1].post_attention_layernorm.forward = forward
    before = snapshot(model)
    with pytest.raises(FloatingPointError):
        CALLS[call](model, batch)
    assert_same(before, snapshot(model))


def test_guard_undoes_everything_within_it():
    model = disturbed("qwen2")
    before = snapshot(model)
    with pytest.raises(KeyError), guarded(model, attention="math"):
        assert not any(module.training for module in model.modules())
        assert all(p.grad is None for p in model.parameters())
        first = next(model.parameters())
        first.requires_grad_(False)
        next(iter(model.parameters())).grad = torch.ones_like(first)
        raise KeyError
    assert_same(before, snapshot(model))
