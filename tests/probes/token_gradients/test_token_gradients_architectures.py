"""Architectures with parts of their own, each through every method against a loop of autograd in float64.

transformers' norms, rotations and routers compute in float32 in a float64 model too, on both sides: values agree to about
1e-7.
"""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from sharpscope.errors import UserError
from sharpscope.probes import attribute, score_norms
from tests import models
from tests.models import random_batch, tiny_model, without_experts
from tests.oracles.token_gradients import local_token_gradients, squared_norms, token_gradients

COMMON = dict(models.COMMON, vocab_size=37, num_key_value_heads=2, pad_token_id=0, eos_token_id=1, bos_token_id=1)
EXPERTS = dict(
    COMMON,
    num_experts=4,
    num_local_experts=4,
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=8,
    n_shared_experts=1,
    first_k_dense_replace=1,
    topk_group=1,
)
CONFIGS: dict[str, dict] = {
    "bloom": dict(vocab_size=37, hidden_size=16, n_layer=2, n_head=4, hidden_dropout=0.0, attention_dropout=0.0),
    "glm4_moe": dict(EXPERTS, n_group=2, head_dim=8),
    "gpt_oss": dict(EXPERTS, head_dim=8, sliding_window=4),
    "mixtral": EXPERTS,
}


def model_of(architecture, dtype=torch.float64, **overrides):
    """A tiny model with untied embeddings and random weights; experts one after the other."""
    settings = dict(tie_word_embeddings=False, experts_implementation="eager") | CONFIGS[architecture] | overrides
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[architecture](**settings)).to(dtype)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
            parameter.copy_(1 + 0.1 * noise if parameter.ndim == 1 and "norm" in name else 0.3 * noise)
    return model.eval()


def coefficients(batch):
    return (
        torch.randn(batch["mask"].shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        * batch["mask"]
    )


def shares_of(gradients, coef):
    """c_t⟨∇log π_t, ∇L⟩/‖∇L‖² with ∇L = Σ c_t ∇log π_t."""
    total = [
        sum(coef[place] * g[i] for place, g in gradients.items()) for i in range(len(next(iter(gradients.values()))))
    ]
    square = sum(part.square().sum() for part in total)
    out = torch.zeros_like(coef)
    for place, gradient in gradients.items():
        out[place] = coef[place] * sum((g * u).sum() for g, u in zip(gradient, total, strict=True)) / square
    return out


def relative(found, expected):
    return float(((found - expected).abs() / expected.clamp_min(1e-300))[expected > 0].max())


def assert_methods(model, batch, *, exact=True, local=True, forward=True):
    """Every method against a loop; those that are not true must be refused by a line that names another way."""
    given = (model, batch["input_ids"], batch["mask"])
    gradients = token_gradients(*given, batch["attention_mask"])
    full, coef = squared_norms(gradients, batch["mask"].shape), coefficients(batch)
    shares = shares_of(gradients, coef)
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    head = [i for i, name in enumerate(names) if name.startswith("lm_head.")]
    if head:
        only = squared_norms({place: [g[i] for i in head] for place, g in gradients.items()}, full.shape)
        assert relative(score_norms(*given, "head", batch["attention_mask"]).squared, only) < 1e-7
    if exact:
        assert relative(score_norms(*given, "exact", batch["attention_mask"]).squared, full) < 3e-6
    if local:
        expected = squared_norms(local_token_gradients(*given, batch["attention_mask"]), full.shape)
        assert relative(score_norms(*given, "local", batch["attention_mask"]).squared, expected) < 3e-6
        sketch = score_norms(*given, "sketch", batch["attention_mask"], directions=64)
        chosen = batch["mask"].bool()
        assert float(((sketch.squared - full) / sketch.std_error)[chosen].abs().mean()) < 2
    else:
        for method in ("local", "sketch"):
            with pytest.raises(UserError, match="method='exact'"):
                score_norms(*given, method, batch["attention_mask"])
    if forward:
        found = attribute(*given, coef, None, batch["attention_mask"])
        assert float((found - shares).abs().max() / shares.abs().sum()) < 1e-6
        assert float(found.sum()) == pytest.approx(1.0, abs=2e-3)
    else:
        with pytest.raises(UserError, match="no forward-mode derivative"):
            attribute(*given, coef, None, batch["attention_mask"])


# What is not said here works.
REFUSED: dict[str, tuple[str, ...]] = {
    "bloom": ("local", "forward"),
    "gpt_oss": ("local",),
}


@pytest.mark.parametrize("architecture", sorted(CONFIGS))
def test_every_method_matches_a_loop_or_says_what_to_use(architecture):
    refused = REFUSED.get(architecture, ())
    batch = random_batch(rows=2, prompt=3, completion=5)
    assert_methods(without_experts(model_of(architecture)), batch, **dict.fromkeys(refused, False))


@pytest.mark.parametrize("adapter", ["loha", "dora"])
def test_adapters_beyond_linear_maps(adapter):
    """LoHa's product has no forward mode; DoRA's norm is held constant in the gradient."""
    peft = pytest.importorskip("peft")
    target = {"r": 3, "target_modules": ["q_proj", "down_proj"]}
    config = peft.LoHaConfig(**target) if adapter == "loha" else peft.LoraConfig(**target, use_dora=True)
    model = peft.get_peft_model(tiny_model("llama"), config).double().eval()
    draw = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=draw, dtype=torch.float64))
    batch = random_batch(rows=2, prompt=3, completion=5)
    assert_methods(model, batch, **dict.fromkeys(("local", "forward"), adapter == "dora"))
