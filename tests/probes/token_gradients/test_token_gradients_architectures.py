"""Architectures with parts of their own, each through every tier against a loop of autograd in float64.

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
from sharpscope.probes.token_gradients.choices import Choices
from tests import models
from tests.models import random_batch, tiny_model
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
LATENT = dict(
    num_key_value_heads=4,
    q_lora_rank=8,
    kv_lora_rank=8,
    qk_rope_head_dim=4,
    qk_nope_head_dim=4,
    v_head_dim=4,
    head_dim=4,
)
SPARSE = dict(index_n_heads=16, index_head_dim=8, index_topk=4)
CONFIGS: dict[str, dict] = {
    "bloom": dict(vocab_size=37, hidden_size=16, n_layer=2, n_head=4, hidden_dropout=0.0, attention_dropout=0.0),
    "deepseek_v2": EXPERTS | LATENT | dict(n_group=2),
    "deepseek_v32": EXPERTS | LATENT | SPARSE | dict(n_group=2),
    "doge": dict(COMMON, keep_window_size=4),
    "glm4_moe": dict(EXPERTS, n_group=2, head_dim=8),
    "glm_moe_dsa": EXPERTS | LATENT | SPARSE | dict(n_group=1),
    "gpt_oss": dict(EXPERTS, head_dim=8, sliding_window=4),
    "hrm_text": COMMON,
    "llama4_text": dict(EXPERTS, intermediate_size_mlp=24, head_dim=8, attention_chunk_size=8),
    "mixtral": EXPERTS,
    "mpt": dict(vocab_size=37, d_model=16, n_layers=2, n_heads=4, max_seq_len=64),
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


def assert_tiers(model, batch, *, exact=True, local=True, forward=True, central=True):
    """Every tier against a loop; those that are not true must be refused by a line that names another way."""
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
        for tier in ("local", "sketch"):
            with pytest.raises(UserError, match="tier='exact'"):
                score_norms(*given, tier, batch["attention_mask"])
    for method, works in (("forward", forward), ("central", central)):
        if works:
            found = attribute(*given, coef, None, batch["attention_mask"], 1.0, method)
            assert float((found - shares).abs().max() / shares.abs().sum()) < (1e-6 if method == "forward" else 2e-4)
            assert float(found.sum()) == pytest.approx(1.0, abs=2e-3)
        else:
            with pytest.raises(UserError, match="use method="):
                attribute(*given, coef, None, batch["attention_mask"], 1.0, method)


# What is not said here works.
REFUSED: dict[str, tuple[str, ...]] = {
    "bloom": ("local", "forward"),
    "deepseek_v2": ("local",),
    "deepseek_v32": ("local",),
    "doge": ("local",),
    "glm_moe_dsa": ("local",),
    "hrm_text": ("local", "central"),
    "llama4_text": ("local",),
    "mpt": ("local",),
}


@pytest.mark.parametrize("architecture", sorted(CONFIGS))
def test_every_tier_matches_a_loop_or_says_what_to_use(architecture):
    refused = REFUSED.get(architecture, ())
    batch = random_batch(rows=2, prompt=3, completion=5)
    assert_tiers(model_of(architecture), batch, **dict.fromkeys(refused, False))


@pytest.mark.parametrize(("adapter", "refused"), [("loha", "forward"), ("dora", "central")])
def test_adapters_that_one_way_of_attribution_cannot_follow(adapter, refused):
    """LoHa's product has no forward mode; DoRA's norm is held constant in the gradient, not by a finite step."""
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
    assert_tiers(model, batch, local=False, **{refused: False})
    given = (model, batch["input_ids"], batch["mask"], coefficients(batch), None, batch["attention_mask"], 1.0)
    other = "central" if refused == "forward" else "forward"
    assert torch.equal(attribute(*given, "auto"), attribute(*given, other))


@pytest.mark.parametrize("architecture", ["deepseek_v32", "mixtral"])
def test_central_differences_hold_the_choices_of_the_unperturbed_model(architecture):
    """Experts (and keys) that are nearly tied: a finite step would exchange them, and shares would be anything."""
    model, batch = model_of(architecture, torch.float32), random_batch(rows=8, completion=16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "gate.weight" in name or "weights_proj" in name:
                parameter.mul_(1e-3)
    coef = coefficients(batch)
    forward, central = (
        attribute(model, batch["input_ids"], batch["mask"], coef, None, batch["attention_mask"], 1.0, way)
        for way in ("forward", "central")
    )
    assert float((central - forward).abs().max() / forward.abs().sum()) < 1e-4
    assert float(central.sum()) == pytest.approx(1.0, abs=1e-3)


X = torch.randn(3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize(
    "choose",
    [
        lambda x: torch.topk(x, 2, dim=-1, sorted=False),
        lambda x: x.topk(2, 0),
        lambda x: x.sort(dim=0, descending=True),
        lambda x: x.sort(),
        lambda x: x.max(1),
        lambda x: torch.min(x, dim=0, keepdim=True),
        lambda x: (x.gather(1, x.argsort(1)), x.argsort(1)),
        lambda x: (x * (x > 0.1), x > 0.1),
    ],
)
def test_held_choices_are_those_made_before(choose):
    with Choices() as noted:
        before = choose(X)
    moved = X.flip(1) + 1
    with Choices(noted.made):
        places = choose(moved)[1]
    assert torch.equal(places, before[1]) and not torch.equal(choose(moved)[1], before[1])
    size = torch.arange(15.0, dtype=torch.float64).view(3, 5)  # the same places hold other numbers
    with Choices(noted.made):
        other = choose(size)[0]
    flat = {float(x): float(y) for x, y in zip(X.flatten(), size.flatten(), strict=True)} | {0.0: 0.0}
    assert [flat[float(x)] for x in before[0].flatten()] == other.flatten().tolist()


def test_another_course_of_choices_is_refused():
    with Choices() as noted:
        X.topk(2)
    with pytest.raises(UserError, match="method='forward'"), Choices(noted.made):
        X.topk(3)
    with pytest.raises(UserError, match="`argmax`"), Choices(noted.made):
        X.topk(2)
        X.argmax(1)
