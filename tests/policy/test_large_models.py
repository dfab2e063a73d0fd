"""What large models need: adapters, computing in bfloat16 over float32 weights, layers computed twice, one pass."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from sharpscope.config.run import LoraSpec
from sharpscope.errors import UserError
from sharpscope.policy import head, load_policy, output_head, score_completions
from sharpscope.policy.adapters import has_adapters, without_adapters
from sharpscope.policy.head import layers_of
from sharpscope.policy.token_stats import flat_logp
from tests.models import ARCHITECTURES, tiny_model
from tests.policy.helpers import adapted, logp, rows, score_gradients, spec, stir


def saved_adapters(policy, folder: Path) -> Path:
    policy.model.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)
    return folder


def test_new_adapters_for_a_folder_of_adapters_are_refused(saved, tmp_path):
    folder = saved_adapters(adapted(saved), tmp_path)
    wanted = spec(folder, lora=LoraSpec(r=2, alpha=4.0))
    for beneath in (None, str(folder)):  # as a script loads it, and as a run begins with it
        with pytest.raises(UserError, match=r"policy.lora: '.*' is a folder of adapters"):
            load_policy(wanted, base=beneath)
    assert has_adapters(load_policy(wanted, base=str(saved)).model)  # a run that continues
    assert has_adapters(load_policy(spec(folder)).model)


def test_only_the_adapters_train_and_they_start_at_the_model_itself(saved):
    policy, plain = adapted(saved), load_policy(spec(saved))
    trainable = {name for name, p in policy.model.named_parameters() if p.requires_grad}
    assert trainable and all(".lora_" in name for name in trainable)
    assert len(trainable) == 2 * 2 * 7  # A and B of two layers' q, k, v, o, gate, up, down
    assert torch.equal(logp(policy), logp(plain))
    assert output_head(policy.model).weight.requires_grad is False


def test_an_adapted_layer_is_w_plus_alpha_over_r_b_a(saved):
    policy, by_hand = adapted(saved), load_policy(spec(saved))
    stir(policy)
    weights = dict(policy.model.named_parameters())
    with torch.no_grad():
        for name, parameter in by_hand.model.named_parameters():
            stem = f"base_model.model.{name.removesuffix('.weight')}"
            if f"{stem}.lora_A.default.weight" in weights:
                parameter += 2.0 * weights[f"{stem}.lora_B.default.weight"] @ weights[f"{stem}.lora_A.default.weight"]
    assert torch.allclose(logp(policy), logp(by_hand), atol=1e-5)
    assert not torch.allclose(logp(policy), logp(load_policy(spec(saved))), atol=1e-2)


def test_without_adapters_it_is_the_reference(saved):
    policy = adapted(saved)
    stir(policy)
    before = logp(policy)
    with without_adapters(policy.model) as base:
        assert torch.equal(logp(policy, base), logp(load_policy(spec(saved))))
    assert torch.equal(logp(policy), before)


def test_saved_adapters_load_here_and_with_transformers(saved, tmp_path):
    policy = adapted(saved)
    stir(policy)
    assert not (saved_adapters(policy, tmp_path) / "model.safetensors").exists()
    again = load_policy(spec(tmp_path))
    assert has_adapters(again.model) and torch.equal(logp(again), logp(policy))
    assert [p.requires_grad for p in again.model.parameters()] == [p.requires_grad for p in policy.model.parameters()]
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    ids = torch.tensor([[3, 5, 9, 4]])
    assert torch.allclose(theirs(ids).logits, policy.model(ids).logits, atol=1e-5)


def test_pickled_adapters_are_refused_unread(saved, tmp_path):
    weights = saved_adapters(adapted(saved), tmp_path / "adapters") / "adapter_model.safetensors"
    torch.save(load_file(weights), weights.with_suffix(".bin"))
    weights.unlink()
    with pytest.raises(UserError, match=r"adapters': no adapter_model\.safetensors; .* save_pretrained") as refused:
        load_policy(spec(tmp_path / "adapters"))
    assert "\n" not in str(refused.value)


# -- Layers computed twice, one pass for all rows, and bfloat16


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_layers_computed_again_give_the_same_gradient(architecture, share):
    model = tiny_model(architecture)
    kept = score_gradients(model, share_prompt=share)
    again = score_gradients(model, share_prompt=share, gradient_checkpointing=True)
    for one, other in zip(kept, again, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.allclose(one, other, rtol=1e-9, atol=1e-12)
    assert all("forward" not in vars(layer) for layer in layers_of(model))  # the layers' own code is back


def test_one_pass_gives_what_buckets_give():
    model = tiny_model()
    for one, other in zip(
        score_gradients(model, share_prompt=False),
        score_gradients(model, share_prompt=False, one_pass=True),
        strict=True,
    ):
        assert torch.allclose(one, other, rtol=1e-9, atol=1e-12)
    with pytest.raises(ValueError, match="one_pass"):
        score_completions(model, rows(), 1.0, share_prompt=True, with_grad=False, one_pass=True)


@pytest.mark.parametrize("share", [False, True])
def test_bfloat16_computes_in_it_and_keeps_weights_gradients_and_logits_in_float32(saved, share):
    policy = load_policy(spec(saved, dtype="bfloat16"))
    assert policy.compute == torch.bfloat16
    assert {p.dtype for p in policy.model.parameters()} == {torch.float32}
    seen, norms = set(), set()
    for name, module in policy.model.named_modules():
        if name.endswith(("q_proj", "down_proj")):
            module.register_forward_hook(lambda m, i, out: seen.add(out.dtype))
        if "norm" in name:
            module.register_forward_hook(lambda m, i, out: norms.add(out.dtype))
    found = score_gradients(policy.model, share_prompt=share, compute=torch.bfloat16)
    assert seen == {torch.bfloat16} and norms == {torch.float32}
    assert {g.dtype for g in found} == {torch.float32}
    exact = score_gradients(policy.model, share_prompt=share)
    one, other = (torch.cat([g.flatten() for g in part]) for part in (found, exact))
    assert 1e-5 < float((one - other).norm() / other.norm()) < 0.05  # it is rounded, and no more than that
    scored = score_completions(
        policy.model, rows(), 1.0, share_prompt=share, with_grad=False, compute=policy.compute, stats=True
    )
    assert scored.logp.dtype == scored.stats.entropy.dtype == torch.float32


def test_frozen_weights_under_bfloat16_are_held_in_it(saved):
    policy = load_policy(spec(saved, dtype="bfloat16", lora=LoraSpec(r=2, alpha=4.0)))
    kinds = {(p.requires_grad, p.dtype) for p in policy.model.parameters()}
    assert kinds == {(True, torch.float32), (False, torch.bfloat16)}
    stir(policy)
    found = score_gradients(policy.model, share_prompt=True, compute=policy.compute, gradient_checkpointing=True)
    assert {g.dtype for g in found} == {torch.float32}
    exact = adapted(saved)
    stir(exact)
    one, other = (
        torch.cat([g.flatten() for g in part]) for part in (found, score_gradients(exact.model, share_prompt=True))
    )
    assert float((one - other).norm() / other.norm()) < 0.1


@pytest.mark.parametrize("keep", [None, True])
def test_a_hidden_state_is_pulled_through_a_layer_in_bfloat16_in_float32(keep, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(4, 3, generator=generator).requires_grad_()
    weight, bias = (torch.randn(shape, generator=generator).bfloat16() for shape in ((7, 3), (7,)))
    monkeypatch.setattr(head, "BLOCK_BYTES", {"cpu": 2 * 3 * 4, "cuda": 1})  # two words at once
    targets = torch.tensor([0, 6, 2, 3])
    logp, _ = flat_logp(hidden, head.Head(weight, bias), targets, 0.5, stats=False, keep_logits=keep)
    logp.sum().backward()
    p = torch.softmax((hidden.detach() @ weight.float().T + bias.float()) / 0.5, 1)
    torch.testing.assert_close(logp.detach(), p.gather(1, targets[:, None])[:, 0].log(), rtol=1e-5, atol=1e-5)
    expected = (torch.nn.functional.one_hot(targets, 7) - p) @ weight.float() / 0.5
    torch.testing.assert_close(hidden.grad, expected, rtol=1e-5, atol=1e-5)
