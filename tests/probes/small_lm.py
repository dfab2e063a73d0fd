"""A causal language model small enough for a dense Hessian, and objectives of it."""

from __future__ import annotations

import torch

from sharpscope.probes.language_model import Objective, token_batch
from tests.models import tiny_model

SMALL = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
VOCAB, TEMPERATURE = 13, 0.8
OBJECTIVES = ("nll", "expected_failure")


def small_model(**overrides):
    return tiny_model("qwen2", vocab=VOCAB, **{**SMALL, **overrides})


def rewards(rows: int = 3):
    return torch.rand(rows, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def objective(name: str, batch: dict, **rest) -> Objective:
    reward = rewards(len(batch["input_ids"]))
    tokens = token_batch(batch["input_ids"], batch["attention_mask"], batch["mask"], reward=reward)
    return Objective(name, tokens, TEMPERATURE, **rest)


def all_scored(ids: torch.Tensor) -> Objective:
    scored = torch.ones_like(ids)
    scored[:, 0] = 0
    return Objective("nll", token_batch(ids, torch.ones_like(ids), scored))
