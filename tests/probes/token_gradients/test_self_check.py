"""Each probe compares itself with plain autograd: planted faults are refused by name, clean models pass."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from sharpscope.errors import CheckError, UserError
from sharpscope.probes import attribute, score_norms
from sharpscope.probes.guard import remembered
from sharpscope.probes.token_gradients import forward_mode, norms
from sharpscope.probes.token_gradients.structure import structure_of
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
    direction = [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in model.parameters()]
    found = attribute(model, **given(batch), coef=coef, direction=direction, check="off")
    expected = along(token_gradients(model, **given(batch)), coef, direction)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


NORMS = ("local", "exact")


def call(model, probe, batch=None, **options):
    """The checked error of one probe."""
    batch = random_batch() if batch is None else batch
    if probe in NORMS:
        return score_norms(model, **given(batch), method=probe, **options).checked
    generator = torch.Generator().manual_seed(1)
    direction = [torch.randn(p.shape, generator=generator).to(p) for p in model.parameters() if p.requires_grad]
    attribute(model, **given(batch), coef=batch["mask"].to(direction[0]), direction=direction, **options)
    return structure_of(model).checked["derivative"] if options.get("check") != "off" else None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt2", "qwen2_moe"])
def test_clean_models_pass(architecture, dtype):
    model = without_experts(tiny_model(architecture, tie=dtype == torch.float32, dtype=dtype))
    for probe in (*NORMS, "derivative"):
        assert 0 <= call(model, probe) < (2e-5 if dtype == torch.float32 else 0.1), probe
        assert call(model, probe, check="off") is None
    attribute(model, **given(random_batch()), coef=random_batch()["mask"].float())


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
        lambda own: lambda *a, **k: tuple(x * f for x, f in zip(own(*a, **k), (1, 1.02), strict=True)),
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


def replace_head(model):
    model.lm_head = torch.nn.Linear(16, 37, bias=False).requires_grad_(False)


CHANGES = {
    "frozen output layer": replace_head,
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
    model.lm_head.requires_grad_(False)
    before = remembered(model)
    assert remembered(model) is before
    CHANGES[change](model)
    assert remembered(model) is not before


def test_changed_adapters_are_looked_at_again():
    peft = pytest.importorskip("peft")

    def scale(model):
        for module in model.modules():
            if hasattr(module, "scaling") and isinstance(module.scaling, dict):
                module.scaling["default"] *= 2

    for change in (scale, lambda model: model.merge_adapter(), lambda model: model.disable_adapter_layers()):
        config = peft.LoraConfig(target_modules=["q_proj"], r=2, init_lora_weights=False)
        model = peft.get_peft_model(tiny_model("gemma2", dtype=torch.float32), config)
        before = remembered(model)
        change(model)
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
