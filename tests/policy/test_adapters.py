"""A folder of saved adapters as the model: what is asked of it and how it is held."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from sharpscope.config.policy import LoraSpec
from sharpscope.errors import UserError
from sharpscope.policy import (
    load_policy,
    output_head,
)
from sharpscope.policy.adapters import has_adapters, without_adapters
from tests.models import tiny_model
from tests.policy.helpers import adapted, logp, spec, stir, word_tokenizer


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    tiny_model(dtype=torch.float32).save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return folder


def adapters(base: Path, folder: Path, **lora: Any) -> Path:
    policy = load_policy(spec(base, lora=LoraSpec(**{"r": 2, "alpha": 4.0} | lora)))
    policy.model.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)
    return folder


def test_new_adapters_for_a_folder_of_adapters_are_refused(base, tmp_path):
    folder = adapters(base, tmp_path / "adapters")
    wanted = spec(folder, lora=LoraSpec(r=2, alpha=4.0))
    for beneath in (None, str(folder)):  # as a script loads it, and as a run begins with it
        with pytest.raises(UserError, match=r"policy.lora: '.*' is a folder of adapters"):
            load_policy(wanted, base=beneath)
    assert has_adapters(load_policy(wanted, base=str(base)).model)  # a run that continues
    assert has_adapters(load_policy(spec(folder)).model)


def test_only_the_adapters_train_and_they_start_at_the_model_itself(saved):
    policy, plain = adapted(saved), load_policy(spec(saved))
    trainable = {name for name, p in policy.model.named_parameters() if p.requires_grad}
    assert trainable and all(".lora_" in name for name in trainable)
    assert len(trainable) == 2 * 2 * 7  # A and B of two layers' q, k, v, o, gate, up, down
    assert torch.equal(logp(policy), logp(plain))
    assert output_head(policy.model).weight.requires_grad is False
    few = adapted(saved, target_modules=("q_proj",))
    assert {
        name.split(".lora_")[0].rsplit(".", 1)[-1] for name, p in few.model.named_parameters() if p.requires_grad
    } == {"q_proj"}
    with pytest.raises(UserError, match="target_modules"):
        adapted(saved, target_modules=("no_such_layer",))


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
    policy.model.save_pretrained(tmp_path / "adapters")
    policy.tokenizer.save_pretrained(tmp_path / "adapters")
    assert not (tmp_path / "adapters" / "model.safetensors").exists()
    again = load_policy(spec(tmp_path / "adapters"))
    assert has_adapters(again.model) and torch.equal(logp(again), logp(policy))
    assert [p.requires_grad for p in again.model.parameters()] == [p.requires_grad for p in policy.model.parameters()]
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "adapters").eval()
    ids = torch.tensor([[3, 5, 9, 4]])
    assert torch.allclose(theirs(ids).logits, policy.model(ids).logits, atol=1e-5)


def test_pickled_adapters_are_refused_unread(saved, tmp_path):
    policy = adapted(saved)
    policy.model.save_pretrained(tmp_path / "adapters")
    policy.tokenizer.save_pretrained(tmp_path / "adapters")
    weights = tmp_path / "adapters" / "adapter_model.safetensors"
    torch.save(load_file(weights), weights.with_suffix(".bin"))
    weights.unlink()
    with pytest.raises(UserError, match=r"adapters': no adapter_model\.safetensors; .* save_pretrained") as refused:
        load_policy(spec(tmp_path / "adapters"))
    assert "\n" not in str(refused.value)
