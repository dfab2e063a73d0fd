"""Architectures with parts of their own against a loop of autograd in float64, or refused in one line.

transformers' norms, rotations and routers compute in float32 in a float64 model too, on both sides: values agree to about 1e-7.
"""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from sharpscope.errors import UserError
from sharpscope.probes import attribute, score_norms
from tests import models
from tests.models import random_batch, without_experts
from tests.oracles.token_gradients import gradient_shares, local_token_gradients, squared_norms, token_gradients

COMMON = dict(models.COMMON, vocab_size=37, num_key_value_heads=2, pad_token_id=0, eos_token_id=1, bos_token_id=1)
EXPERTS = dict(COMMON, num_local_experts=4, num_experts_per_tok=2)
CONFIGS: dict[str, dict] = {
    "bloom": dict(vocab_size=37, hidden_size=16, n_layer=2, n_head=4, hidden_dropout=0.0, attention_dropout=0.0),
    "gpt_oss": dict(EXPERTS, head_dim=8, sliding_window=4),
    "mixtral": EXPERTS,
}


def model_of(architecture):
    """A tiny model with untied embeddings, random weights and frozen experts, which are computed one after the other."""
    settings = dict(tie_word_embeddings=False, experts_implementation="eager") | CONFIGS[architecture]
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[architecture](**settings)).double()
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
            parameter.copy_(1 + 0.1 * noise if parameter.ndim == 1 and "norm" in name else 0.3 * noise)
    return without_experts(model.eval())


def test_a_mixture_of_experts_with_frozen_experts_matches_a_loop():
    model, batch = model_of("mixtral"), random_batch(rows=2, prompt=3, completion=5)
    given = (model, batch["input_ids"], batch["mask"])
    gradients = token_gradients(*given, batch["attention_mask"])
    for method, own in (("exact", gradients), ("local", local_token_gradients(*given, batch["attention_mask"]))):
        found = score_norms(*given, method, batch["attention_mask"]).squared
        torch.testing.assert_close(found, squared_norms(own, found.shape), rtol=3e-6, atol=0)
    coef = torch.randn(found.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * batch["mask"]
    shares = attribute(*given, coef, None, batch["attention_mask"])
    torch.testing.assert_close(shares, gradient_shares(gradients, coef), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("architecture", "says"), [("bloom", "AttentionInterface"), ("gpt_oss", "another way")])
def test_what_does_not_work_says_why(architecture, says):
    model, batch = model_of(architecture), random_batch(rows=2, prompt=3, completion=5)
    given = (model, batch["input_ids"], batch["mask"])
    with pytest.raises(UserError, match=f"method, local: .*{says}"):
        score_norms(*given, "local", batch["attention_mask"])
    if architecture == "bloom":
        with pytest.raises(UserError, match="no forward-mode derivative"):
            attribute(*given, batch["mask"].double(), None, batch["attention_mask"])
