"""Direct decoding against transformers' `generate`, the full forward pass, and decoding through transformers' layers."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from torch import nn

from sharpscope.config.policy import LoraSpec, SamplingSpec
from sharpscope.policy import Completions, Policy, decoding, direct_decoding, shared_decoding
from sharpscope.policy.adapters import add_adapters
from sharpscope.policy.direct_decoding import why_not_direct
from sharpscope.policy.generation import generate, left_pad
from sharpscope.policy.loading import make_policy
from tests.policy.helpers import random_prompts, tiny_policy, word_tokenizer

PROMPTS = random_prompts((11, 3, 6), seed=1)
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 64}
MODELS = {
    "llama": ("llama", {}),
    "llama, biases, untied": ("llama", {"attention_bias": True, "mlp_bias": True, "tie": False}),
    "llama, scaled frequencies": ("llama", {"rope_parameters": LLAMA3}),
    "qwen2": ("qwen2", {}),
    "qwen2, one key head": ("qwen2", {"num_key_value_heads": 1}),
    "qwen2, as many key heads": ("qwen2", {"num_key_value_heads": 4, "tie": False}),
    "qwen3": ("qwen3", {}),
    "qwen3, untied": ("qwen3", {"num_key_value_heads": 1, "tie": False, "attention_bias": True}),
}


def sample(policy: Policy, **spec: float) -> Completions:
    spec = {"temperature": 1.3, "max_new_tokens": 12} | spec
    return generate(policy, PROMPTS, 3, SamplingSpec(**spec), torch.Generator().manual_seed(3))


@pytest.fixture
def through_transformers(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Completions]:
    def sampled(policy: Policy, **spec: float) -> Completions:
        with monkeypatch.context() as patch:
            patch.setattr(decoding, "why_not_direct", lambda model: "a test")
            return sample(policy, **spec)

    return sampled


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_are_those_of_generate_and_logp_that_of_the_full_pass(name):
    architecture, overrides = MODELS[name]
    policy = tiny_policy(architecture, **overrides)
    assert why_not_direct(policy.model) is None
    ours = generate(policy, PROMPTS, 1, SamplingSpec(temperature=0, max_new_tokens=12), torch.Generator())
    ids, attention = left_pad(PROMPTS, policy.pad_id)
    theirs = policy.model.generate(  # type: ignore[operator]
        ids, attention_mask=attention, do_sample=False, max_new_tokens=12, pad_token_id=0, eos_token_id=1
    )
    width, mask = ours.input_ids.shape[1], ours.completion_mask
    assert theirs.shape[1] == width
    assert torch.equal(ours.input_ids, theirs)
    position = (ours.attention_mask.cumsum(1) - 1).clamp_min(0)
    with torch.no_grad():
        out = policy.model(input_ids=theirs, attention_mask=ours.attention_mask, position_ids=position)
    logp = out.logits[:, ours.prompt_width - 1 : -1].log_softmax(-1).gather(2, ours.completion_ids[..., None])[..., 0]
    assert torch.allclose(ours.behavior_logp.double(), logp * mask, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", MODELS)
def test_samples_are_those_of_decoding_through_transformers(name, dtype, through_transformers, monkeypatch):
    # Prompts are shared in single precision, as short ones copied in double precision.
    monkeypatch.setattr(shared_decoding, "SHORT", 0 if dtype == torch.float32 else 16)
    architecture, overrides = MODELS[name]
    policy = tiny_policy(architecture, dtype=dtype, **overrides)
    direct, general = sample(policy), through_transformers(policy)
    assert torch.equal(direct.completion_ids, general.completion_ids)
    assert torch.allclose(direct.behavior_logp, general.behavior_logp, rtol=0, atol=2e-6)


def test_large_layers_are_not_concatenated(monkeypatch):
    policy = tiny_policy("qwen2", dtype=torch.float32)
    fused = sample(policy)
    monkeypatch.setattr(direct_decoding, "SMALL_BYTES", 0)
    apart = sample(policy)
    assert torch.equal(fused.completion_ids, apart.completion_ids)
    assert torch.allclose(fused.behavior_logp, apart.behavior_logp, rtol=0, atol=2e-6)


@pytest.mark.parametrize("change", ["adapters", "bfloat16"])
def test_adapters_and_autocast_are_applied(change, through_transformers):
    policy = tiny_policy("qwen2", dtype=torch.float32)
    if change == "adapters":
        model = add_adapters(policy.model, LoraSpec(r=2), "tiny")
        with torch.no_grad():
            for parameter in (p for p in model.parameters() if p.requires_grad):
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
        changed = make_policy(model, word_tokenizer(), "tiny")
    else:
        changed = make_policy(policy.model, word_tokenizer(), "tiny", compute=torch.bfloat16)
    assert why_not_direct(changed.model) is None
    direct, general = sample(changed, temperature=0), through_transformers(changed, temperature=0)
    assert torch.equal(direct.completion_ids, general.completion_ids)
    assert torch.allclose(direct.behavior_logp, general.behavior_logp, rtol=0, atol=2e-6)
    if change == "adapters":
        with model.disable_adapter():
            assert not torch.equal(sample(changed, temperature=0).completion_ids, direct.completion_ids)


def hook(model: nn.Module) -> None:
    model.model.layers[1].register_forward_hook(lambda module, args, output: output)  # type: ignore[operator, index, union-attr]


def hook_mlp(model: nn.Module) -> None:
    model.model.layers[0].mlp.register_forward_pre_hook(lambda module, args: None)  # type: ignore[operator, index, union-attr]


def replace_forward(model: nn.Module) -> None:
    attention = model.model.layers[0].self_attn  # type: ignore[index, union-attr]
    attention.forward = attention.forward


@pytest.mark.parametrize(
    ("architecture", "overrides", "change", "reason"),
    [
        ("gpt2", {}, None, "GPT2LMHeadModel is not one of LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM"),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
            None,
            "layers of type sliding_attention",
        ),
        ("llama", {"rope_parameters": YARN}, None, "rotary embeddings of type yarn"),
        ("llama", {}, hook, "a hook on, or a replaced forward method of, LlamaDecoderLayer"),
        ("qwen2", {}, hook_mlp, "a hook on, or a replaced forward method of, Qwen2MLP"),
        ("qwen3", {}, replace_forward, "a hook on, or a replaced forward method of, Qwen3Attention"),
    ],
)
def test_other_models_are_decoded_through_transformers_and_the_log_says_why(
    architecture, overrides, change, reason, caplog, monkeypatch
):
    policy = tiny_policy(architecture, **overrides)
    if change is not None:
        change(policy.model)
    assert why_not_direct(policy.model) == reason
    decoding._tell_general.cache_clear()
    monkeypatch.setattr(decoding, "DirectDecoder", None)  # calling it would fail
    with caplog.at_level(logging.INFO, logger="sharpscope"):
        sample(policy, max_new_tokens=2)
        sample(policy, max_new_tokens=2)
    assert [record.getMessage() for record in caplog.records if record.name == decoding.__name__] == [
        f"tiny: decoding steps run through transformers, not directly: {reason}"
    ]


def test_the_default_policies_are_decoded_directly_without_a_trace_of_it_in_later_gradients():
    """Tensors of inference mode must not reach a later backward pass."""
    policy = tiny_policy()
    out = sample(policy)
    assert not any(t.is_inference() for t in (out.input_ids, out.behavior_logp, out.completion_mask, out.truncated))
    policy.model.zero_grad()
    logits = policy.model(input_ids=out.input_ids, attention_mask=out.attention_mask).logits
    (logits.log_softmax(-1)[:, -1, 0] * out.behavior_logp[:, 0]).sum().backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in policy.model.parameters())
