"""A use of a parameter that the hooks do not meet is refused by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers.models.qwen2 import modeling_qwen2

from sharpscope.errors import CheckError, UserError
from sharpscope.probes import attribute, score_norms
from tests.models import random_batch, tiny_model, without_experts
from tests.oracles.token_gradients import local_token_gradients, squared_norms, token_gradients

WIDTH = 16


def run(model, batch, method):
    return score_norms(model, batch["input_ids"], batch["mask"], method, batch["attention_mask"]).squared.double()


def expect(oracle, model, batch):
    gradients = oracle(model, batch["input_ids"], batch["mask"], batch["attention_mask"])
    return squared_norms(gradients, batch["mask"].shape)


def close(found, expected, rtol):
    torch.testing.assert_close(found, expected, rtol=rtol, atol=0)


# x (B, L, d), w (d, d), v (d,) -> (B, L, d).
WHOLE = {
    "matmul": lambda x, w, v: x @ w + v,
    "a scaled weight": lambda x, w, v: F.linear(x, w * 0.5) + v,
    "itself": lambda x, w, v: F.linear(F.linear(x, w), w) * v,
}


class Using(nn.Module):
    """An MLP behind an operation with two parameters."""

    def __init__(self, inner, operation):
        super().__init__()
        self.inner, self.operation = inner, operation
        draw = torch.Generator().manual_seed(7)
        self.matrix = nn.Parameter(0.3 * torch.randn(WIDTH, WIDTH, generator=draw, dtype=torch.float64))
        self.vector = nn.Parameter(1 + 0.3 * torch.randn(WIDTH, generator=draw, dtype=torch.float64))

    def forward(self, x):
        return self.inner(self.operation(x, self.matrix, self.vector))


def using(operation):
    model = tiny_model("qwen2")
    model.model.layers[0].mlp = Using(model.model.layers[0].mlp, operation)
    return model


@pytest.mark.parametrize("way", sorted(WHOLE))
def test_an_unknown_use_is_named(way):
    model, batch = using(WHOLE[way]), random_batch()
    for method in ("exact", "local"):
        with pytest.raises(UserError, match=r"model\.layers\.0\.mlp.*another way"):
            run(model, batch, method)


class Positions(nn.Embedding):
    """Learned positions that are called with the words, as in OPT and MVP."""

    def forward(self, x):
        return super().forward(torch.arange(x.shape[1]).expand(x.shape))


def test_an_embedding_of_something_else_than_its_input_is_refused():
    model, batch = tiny_model("qwen2", tie=False), random_batch()
    given = model.model.embed_tokens
    model.model.embed_tokens = Positions(*given.weight.shape, dtype=torch.float64)
    with pytest.raises(UserError, match=r"embed_tokens.*another way"):
        run(model, batch, "exact")


def test_experts():
    model, batch = tiny_model("qwen2_moe"), random_batch()
    for method in ("exact", "local"):
        with pytest.raises(UserError, match=r"mlp.*another way"):
            run(model, batch, method)
    without_experts(model)
    close(run(model, batch, "local"), expect(local_token_gradients, model, batch), 1e-5)  # its router is in float32


def test_a_parameter_inside_the_models_own_attention(monkeypatch):
    model, batch = tiny_model("qwen2"), random_batch()
    model.config._attn_implementation = "eager"
    layer = model.model.layers[1].self_attn
    layer.factor = nn.Parameter(torch.tensor(1.2, dtype=torch.float64))
    plain = modeling_qwen2.eager_attention_forward

    def attention(module, query, *rest, **others):
        return plain(module, query * getattr(module, "factor", 1.0), *rest, **others)

    monkeypatch.setattr(modeling_qwen2, "eager_attention_forward", attention)
    with pytest.raises(UserError, match=r"layers\.1\.self_attn.*another way"):
        run(model, batch, "local")
    with pytest.raises(CheckError, match="derivative: differs from plain autograd"):
        attribute(model, batch["input_ids"], batch["mask"], batch["mask"].double(), None, batch["attention_mask"])


def adapted(**settings):
    peft = pytest.importorskip("peft")
    model = tiny_model("qwen2", tie=False)
    model = peft.get_peft_model(model, peft.LoraConfig(r=3, init_lora_weights=False, **settings))
    draw = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
    return model.eval()


def test_adapters_on_the_embedding():
    model, batch = adapted(target_modules=["embed_tokens", "q_proj"]), random_batch()
    with pytest.raises(UserError, match="another way"):
        run(model, batch, "exact")


def test_squares_do_not_overflow_float16(kind="gpt2"):
    """Activations and cotangents fit into float16 here; their squares, at most 65504 there, do not."""
    model, batch = tiny_model(kind, dtype=torch.float16), random_batch()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or ".ln_" in name:
                parameter.mul_(120)
            elif parameter.ndim > 1 and "emb" not in name and "wte" not in name:
                parameter.mul_(0.02)
    wide = tiny_model(kind, dtype=torch.float32)
    wide.load_state_dict(model.state_dict())
    full, local = expect(token_gradients, wide, batch), expect(local_token_gradients, wide, batch)
    assert float(local[batch["mask"] == 1].median()) > 65504
    torch.testing.assert_close(run(model, batch, "exact"), full, rtol=3e-2, atol=1.0)
    torch.testing.assert_close(run(model, batch, "local"), local, rtol=3e-2, atol=1.0)
    torch.testing.assert_close(run(model, batch, "head"), run(wide, batch, "head"), rtol=1e-2, atol=1.0)
