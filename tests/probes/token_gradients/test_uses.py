"""Every way in which a model may use a parameter is counted, formed whole, or refused by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.qwen2 import modeling_qwen2

from sharpscope.errors import UserError
from sharpscope.probes import attribute, score_norms
from tests.models import random_batch, tiny_model
from tests.oracles.token_gradients import local_token_gradients, squared_norms, token_gradients

WIDTH = 16


def run(model, batch, method):
    return score_norms(model, batch["input_ids"], batch["mask"], method, batch["attention_mask"]).squared.double()


def expect(oracle, model, batch):
    gradients = oracle(model, batch["input_ids"], batch["mask"], batch["attention_mask"])
    return squared_norms(gradients, batch["mask"].shape)


def close(found, expected, rtol):
    torch.testing.assert_close(found, expected, rtol=rtol, atol=0)


class OwnNorm(torch.autograd.Function):
    """A normalization written as a custom function, which `TorchFunctionMode` does not see."""

    @staticmethod
    def forward(ctx, x, gain):
        ctx.save_for_backward(x, gain)
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-3) * gain

    @staticmethod
    def backward(ctx, g):
        x, gain = ctx.saved_tensors
        root = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-3)
        normed = x * root
        inner = g * gain
        to_gain = (g * normed).sum(tuple(range(g.ndim - 1)))
        return root * (inner - normed * (inner * normed).mean(-1, keepdim=True)), to_gain


def in_place_output(x, w, v):
    out = F.linear(x, w)
    out *= 1.7
    return out + x


# x (B, L, d), w (d, d), v (d,) -> (B, L, d).
COUNTED = {
    "keywords": lambda x, w, v: F.linear(bias=v, weight=w, input=x),
    "a cast": lambda x, w, v: F.linear(x, w.type(torch.float64), v.to(x)),
    "in-place product": in_place_output,
    "in-place sum": lambda x, w, v: F.linear(x, w, v).add_(x).mul_(0.3),
    "flattened": lambda x, w, v: torch.addmm(v, x.reshape(-1, WIDTH), w).view_as(x),
    "a constant copy": lambda x, w, v: F.linear(x, w, v) + x @ w.detach() + v.data,
}
WHOLE = {
    "matmul": lambda x, w, v: x @ w + v,
    "einsum of a list": lambda x, w, v: torch.einsum("bld,de->ble", [x, w]) + v,
    "cat": lambda x, w, v: F.linear(x, torch.cat([w, w])[4:20]) + v,
    "a scaled weight": lambda x, w, v: F.linear(x, w * 0.5) + v,
    "itself": lambda x, w, v: F.linear(F.linear(x, w), w) + v,
    "a known use and another": lambda x, w, v: F.linear(x, w, v) + x @ w,
    "a custom function": lambda x, w, v: OwnNorm.apply(F.linear(x, w), v),
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


@pytest.mark.parametrize("way", sorted(COUNTED))
def test_a_known_use_however_it_is_written(way):
    model, batch = using(COUNTED[way]), random_batch()
    close(run(model, batch, "exact"), expect(token_gradients, model, batch), 1e-8)
    close(run(model, batch, "local"), expect(local_token_gradients, model, batch), 1e-8)
    given = (model, batch["input_ids"], batch["mask"], "sketch", batch["attention_mask"])
    assert score_norms(*given, directions=2, check="first").checked < 1e-8


@pytest.mark.parametrize("way", sorted(WHOLE))
def test_an_unknown_use_is_formed_whole_and_named(way):
    model, batch = using(WHOLE[way]), random_batch()
    close(run(model, batch, "exact"), expect(token_gradients, model, batch), 1e-8)
    with pytest.raises(UserError, match=r"model\.layers\.0\.mlp.*another way"):
        run(model, batch, "local")


class Scaled(nn.Module):
    """An MLP times a number."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.factor = inner, nn.Parameter(torch.tensor(1.3, dtype=torch.float64))

    def forward(self, x):
        return self.factor * self.inner(x)


def test_a_trainable_number():
    model, batch = tiny_model("qwen2"), random_batch()
    model.model.layers[0].mlp = Scaled(model.model.layers[0].mlp)
    close(run(model, batch, "exact"), expect(token_gradients, model, batch), 1e-8)


def test_experts_shared_between_layers():
    model, batch = tiny_model("qwen2_moe"), random_batch()
    model.model.layers[1].mlp.experts = model.model.layers[0].mlp.experts
    close(run(model, batch, "exact"), expect(token_gradients, model, batch), 1e-5)  # its router is in float32
    with pytest.raises(UserError, match=r"experts.*another way"):
        run(model, batch, "local")


def test_a_parameter_inside_the_models_own_attention(monkeypatch):
    """The attention of `local` does not know the factor; exact norms and shares use the model's own."""
    model, batch = tiny_model("qwen2"), random_batch()
    model.config._attn_implementation = "eager"
    layer = model.model.layers[1].self_attn
    layer.factor = nn.Parameter(torch.tensor(1.2, dtype=torch.float64))
    plain = modeling_qwen2.eager_attention_forward

    def attention(module, query, *rest, **others):
        return plain(module, query * getattr(module, "factor", 1.0), *rest, **others)

    monkeypatch.setattr(modeling_qwen2, "eager_attention_forward", attention)
    close(run(model, batch, "exact"), expect(token_gradients, model, batch), 1e-6)
    coef = batch["mask"].double()
    shares = attribute(model, batch["input_ids"], batch["mask"], coef, None, batch["attention_mask"])
    assert float(shares.sum()) == pytest.approx(1.0, abs=1e-6)
    with pytest.raises(UserError, match=r"layers\.1\.self_attn.*method='exact'"):
        run(model, batch, "local")


COMMON = dict(
    hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=64
)
GEMMA = dict(
    COMMON,
    num_key_value_heads=2,
    head_dim=8,
    sliding_window=8,
    vocab_size_per_layer_input=37,
    hidden_size_per_layer_input=6,
    num_kv_shared_layers=0,
    layer_types=["sliding_attention", "full_attention"],
)
FALCON = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=4, hidden_dropout=0.0, attention_dropout=0.0)
# Settings, and relative accuracy: Gemma's norms and softmax are in float32.
MODELS: dict[str, tuple[str, dict, float]] = {
    "falcon": ("falcon", dict(FALCON, bias=False, multi_query=True, alibi=False), 1e-8),
    "falcon, new layout": ("falcon", dict(FALCON, new_decoder_architecture=True, num_kv_heads=2, bias=True), 1e-8),
    "ctrl": ("ctrl", dict(n_embd=16, dff=24, n_layer=2, n_head=4, n_positions=64, resid_pdrop=0, embd_pdrop=0), 1e-8),
    "gemma4": ("gemma4_text", dict(GEMMA, global_head_dim=8), 1e-5),
    "gemma3n": (
        "gemma3n_text",
        dict(GEMMA, laurel_rank=3, altup_num_inputs=2, activation_sparsity_pattern=[0.0, 0.0]),
        1e-5,
    ),
}


def architecture(name, dtype=torch.float64):
    kind, settings, _ = MODELS[name]
    config = CONFIG_MAPPING[kind](vocab_size=37, pad_token_id=0, eos_token_id=1, bos_token_id=1, **settings)
    model = AutoModelForCausalLM.from_config(config).to(dtype).eval()
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
            parameter.copy_(1 + 0.1 * noise if parameter.ndim == 1 and "bias" not in key else 0.3 * noise)
    return model


@pytest.mark.parametrize("name", sorted(MODELS))
def test_exact_norms_of_architectures_with_unusual_uses(name):
    model, batch = architecture(name), random_batch()
    close(run(model, batch, "exact"), expect(token_gradients, model, batch), MODELS[name][2])


@pytest.mark.parametrize("name", ["ctrl", "gemma4"])
def test_local_norms_of_architectures_with_unusual_uses(name):
    model, batch = architecture(name), random_batch()
    close(run(model, batch, "local"), expect(local_token_gradients, model, batch), MODELS[name][2])


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
    close(run(model, batch, "exact"), expect(token_gradients, model, batch), 1e-8)
    with pytest.raises(UserError, match="another way"):
        run(model, batch, "local")


def test_adapters_that_detach_their_norm():
    model, batch = adapted(target_modules=["q_proj", "up_proj"], use_dora=True), random_batch()
    close(run(model, batch, "exact"), expect(token_gradients, model, batch), 1e-8)
    coef = batch["mask"].double()
    shares = attribute(model, batch["input_ids"], batch["mask"], coef, None, batch["attention_mask"])
    assert float(shares.sum()) == pytest.approx(1.0, abs=1e-9)


@pytest.mark.parametrize("kind", ["gpt2", "qwen2_moe"])
def test_squares_do_not_overflow_float16(kind):
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
    with pytest.raises(UserError, match="relative error inf"):
        run(model, batch, "sketch")
