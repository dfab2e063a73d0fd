"""Each probe compares itself with plain autograd, and leaves a model bit for bit as it was, also when it raises."""

from __future__ import annotations

import copy
import gc
import math
import weakref

import pytest
import torch

from sharpscope.errors import CheckError, UserError
from sharpscope.policy.guard import remembered
from sharpscope.tokens import attribute, forward_mode, norms, score_norms
from sharpscope.tokens.structure import structure_of
from tests.loops import some
from tests.models import random_batch, tiny_model, without_experts
from tests.oracles.token_gradients import along, token_gradients


def given(batch):
    return {name: batch[name] for name in ("input_ids", "mask", "attention_mask")}


@pytest.mark.parametrize("tie", [True, False])
def test_a_padding_token_within_a_row_has_no_gradient_in_any_mode(tie):
    """Reverse mode gives an embedding's padding row none; forward mode and differences used to move it."""
    model, batch = tiny_model("llama", tie=tie), random_batch()
    batch["input_ids"][batch["attention_mask"].bool() & (batch["mask"] == 0)] = 0
    generator, coef = torch.Generator().manual_seed(1), batch["mask"].double()
    direction = [
        torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in model.parameters()
    ]
    found = attribute(model, **given(batch), coef=coef, direction=direction, check="off")
    expected = along(token_gradients(model, **given(batch)), coef, direction)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


peft = pytest.importorskip("peft")
NORMS = ("local", "exact")


def call(model, probe, batch=None, **options):
    """The checked error of one probe."""
    batch = random_batch() if batch is None else batch
    if probe in NORMS:
        return score_norms(model, **given(batch), method=probe, **options).checked
    generator = torch.Generator().manual_seed(1)
    direction = [
        torch.randn(p.shape, generator=generator).to(p)
        for p in model.parameters()
        if p.requires_grad
    ]
    attribute(
        model, **given(batch), coef=batch["mask"].to(direction[0]), direction=direction, **options
    )
    return structure_of(model).checked["derivative"] if options.get("check") != "off" else None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt2", "qwen2_moe"])
def test_clean_models_pass(architecture, dtype):
    model = without_experts(tiny_model(architecture, tie=dtype == torch.float32, dtype=dtype))
    for probe in (*NORMS, "derivative"):
        assert 0 <= call(model, probe) < (2e-5 if dtype == torch.float32 else 0.1), probe
        assert call(model, probe, check="off") is None


def without_value_projections(squares):
    def dropped(use, g):
        return [(name, value * 0 if "v_proj" in name else value) for name, value in squares(use, g)]

    return dropped


FAULTS = {
    "local": (norms, "local_squares", without_value_projections),
    "exact": (norms, "exact_squares", without_value_projections),
    "derivative": (
        forward_mode,
        "pushed_hidden",
        lambda own: (
            lambda *a, **k: tuple(x * f for x, f in zip(own(*a, **k), (1, 1.02), strict=True))
        ),
    ),
}


@pytest.mark.parametrize("probe", sorted(FAULTS))
def test_a_planted_fault_is_refused_by_name(probe, monkeypatch):
    module, name, fault = FAULTS[probe]
    model = tiny_model("llama", tie=False, dtype=torch.float32)
    monkeypatch.setattr(module, name, fault(getattr(module, name)))
    with pytest.raises(CheckError, match=rf"LlamaForCausalLM, {probe}: .*autograd.*use ") as caught:
        call(model, probe)
    assert caught.value.probe == probe and caught.value.error > caught.value.tolerance
    assert call(model, probe, check="off") is None


def test_shares_that_do_not_sum_to_one(monkeypatch):
    """After the derivatives have passed only the sum shows that they are wrong."""
    model, batch = tiny_model("llama", dtype=torch.float32), random_batch()
    arguments = {**given(batch), "coef": batch["mask"].float()}
    assert attribute(model, **arguments).sum() == pytest.approx(1.0, abs=1e-5)
    module, name, fault = FAULTS["derivative"]
    monkeypatch.setattr(module, name, fault(getattr(module, name)))
    with pytest.raises(CheckError, match=r"shares of the gradient sum to 1\.\d+ instead of 1"):
        attribute(model, **arguments)
    assert attribute(model, **arguments, check="off").sum() != pytest.approx(1.0, abs=1e-2)


def test_attention_that_the_probes_do_not_know(monkeypatch):
    """A model's own attention with a window that the attention of the probes has not."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    def sharper(module, query, key, value, mask, **rest):
        return sdpa_attention_forward(module, 1.3 * query, key, value, mask, **rest)

    AttentionInterface.register("sharper", sharper)
    model = tiny_model("llama", dtype=torch.float32)
    model.config._attn_implementation_internal = "sharper"
    for probe in ("local", "exact", "derivative"):
        with pytest.raises(CheckError, match="differs from plain autograd"):
            call(model, probe)
        call(model, probe, check="off")


def test_diverged_weights_and_calls_without_a_token_check_nothing():
    model, batch = tiny_model("llama", dtype=torch.float32), random_batch()
    assert call(model, "local", batch | {"mask": torch.zeros_like(batch["mask"])}) is None
    with torch.no_grad():
        model.model.norm.weight[0] = math.nan
    assert math.isnan(call(model, "local")) and structure_of(model).checked == {}


def test_always_sees_what_first_has_already_passed(monkeypatch):
    model = tiny_model("llama", dtype=torch.float32)
    call(model, "exact")
    monkeypatch.setattr(norms, "exact_squares", without_value_projections(norms.exact_squares))
    assert call(model, "exact") < 1e-5
    with pytest.raises(CheckError):
        call(model, "exact", check="always")
    with pytest.raises(UserError, match="check, 'never': use off, first or always"):
        call(model, "exact", check="never")


# -- what is known of a model is known of that model only --------------------------------------------------------------


CHANGES = {
    "output layer": lambda m: setattr(m, "lm_head", copy.deepcopy(m.lm_head)),
    "soft cap": lambda m: setattr(m.config, "final_logit_softcapping", 2.0),
    "freezing": lambda m: m.model.layers[0].mlp.requires_grad_(False),
    "dtype": lambda m: m.to(torch.bfloat16),
    "layer": lambda m: m.model.layers.__setitem__(0, copy.deepcopy(m.model.layers[1])),
    "forward of a module": lambda m: setattr(m.model.norm, "forward", lambda x: x),
    "hook": lambda m: m.model.norm.register_forward_hook(lambda *_: None),
}


@pytest.mark.parametrize("change", sorted(CHANGES))
def test_a_changed_model_is_looked_at_again(change):
    model = tiny_model("gemma2", dtype=torch.float32, tie=False)
    before = remembered(model)
    assert remembered(model) is before
    CHANGES[change](model)
    assert remembered(model) is not before


@pytest.mark.parametrize("change", ["set_scale", "merge_adapter", "disable_adapter_layers"])
def test_changed_adapters_are_looked_at_again(change):
    config = peft.LoraConfig(target_modules=["q_proj"], r=2, init_lora_weights=False)
    model = peft.get_peft_model(tiny_model("gemma2", dtype=torch.float32), config)
    before = remembered(model)
    if change == "set_scale":
        model.base_model.model.model.layers[0].self_attn.q_proj.set_scale("default", 4.0)
    else:
        getattr(model, change)()
    assert remembered(model) is not before


def test_training_leaves_what_is_known():
    model = tiny_model("llama", dtype=torch.float32)
    call(model, "local")
    before = structure_of(model)
    model.train()
    model(input_ids=random_batch()["input_ids"]).logits.sum().backward()
    torch.optim.AdamW(model.parameters()).step()
    model.eval()
    assert structure_of(model) is before and set(before.checked) == {"local"}


# -- the model is left as it was -----------------------------------------------------------------------------------------


def snapshot(model):
    """What must be equal, and tensors that must be equal bit for bit."""
    parameters, modules = list(model.parameters()), list(model.modules())
    equal = {
        "parameters": [(id(p), p.data_ptr(), id(p.grad), p.requires_grad) for p in parameters],
        "modes": [module.training for module in modules],
        "attention": model.config._attn_implementation,
        "experts": getattr(model.config, "_experts_implementation", None),
        "hooks": sum(
            len(module._forward_pre_hooks) + len(module._forward_hooks) for module in modules
        ),
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
    "local": lambda m, b: score_norms(m, **given(b)),
    "exact": lambda m, b: score_norms(m, method="exact", **given(b)),
    "forward": lambda m, b: attribute(m, coef=b["mask"].double(), **given(b)),
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
def test_rotary_frequencies_that_follow_the_length_are_put_back_and_limit_rows(rope):
    """A long text has set them; the probe's shorter rows set them anew."""
    model, batch = (
        tiny_model("llama", max_position_embeddings=12, rope_parameters=ROPES[rope]),
        random_batch(),
    )
    rotary, long = model.model.rotary_emb, torch.arange(20)[None]
    with torch.no_grad():
        logits = model(input_ids=long).logits
    buffers = {name: (buffer, buffer.clone()) for name, buffer in rotary.named_buffers()}
    attributes = dict(rotary.__dict__)
    CALLS["exact"](model, batch)
    assert rotary.__dict__ == attributes
    for name, buffer in some(rotary.named_buffers()):
        assert buffer is buffers[name][0] and torch.equal(buffer, buffers[name][1])
    with torch.no_grad():
        assert torch.equal(model(input_ids=long).logits, logits)
    batch = random_batch(prompt=6, completion=7)
    batch["attention_mask"][:] = 1
    # longer rows would change them
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
    model = without_experts(
        tiny_model("qwen2_moe", dtype=torch.float32, experts_implementation="grouped_mm")
    )
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
