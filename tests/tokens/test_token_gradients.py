"""Score norms and attribution against a loop of autograd in float64, for every architecture."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.gemma2 import modeling_gemma2

from sharpscope.errors import UserError
from sharpscope.policy import Head
from sharpscope.tokens import (
    attribute,
    attribution,
    failure_coefficients,
    logp_gradient,
    norms,
    rows,
    score_norms,
    structure,
)
from tests.loops import some
from tests.models import ARCHITECTURES, COMMON, random_batch, tiny_model, without_experts
from tests.oracles.token_gradients import (
    aligned,
    along,
    gradient_shares,
    local_token_gradients,
    log_probabilities,
    squared_norms,
    token_gradients,
    weighted_sum,
)

peft = pytest.importorskip("peft")

T = 1.3  # a temperature other than 1, so that its place in every formula is tested


@pytest.fixture
def exact_eager(monkeypatch):
    """Gemma 2 needs eager attention, whose softmax transformers takes in float32: give it one in double precision."""

    def attention(
        module, query, key, value, attention_mask, dropout=0.0, scaling=None, softcap=None, **_
    ):
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        scores = query @ key.mT * scaling
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        weights = torch.softmax(scores + attention_mask[..., : key.shape[2]], -1)
        return (weights @ value).transpose(1, 2).contiguous(), weights

    monkeypatch.setattr(modeling_gemma2, "eager_attention_forward", attention)


def run(model, batch, **options):
    return score_norms(
        model,
        batch["input_ids"],
        batch["mask"],
        attention_mask=batch["attention_mask"],
        temperature=T,
        **options,
    )


def expect(oracle, model, batch):
    gradients = oracle(model, batch["input_ids"], batch["mask"], batch["attention_mask"], T)
    return gradients, squared_norms(gradients, batch["mask"].shape)


def relative(found, expected):
    """The largest relative error."""
    return float(((found - expected).abs() / expected.clamp_min(1e-300))[expected > 0].max())


def compare(model, batch):
    """The squared exact norms (N, S) by the loop, with which both methods agree."""
    full, cut = (
        expect(oracle, model, batch)[1] for oracle in (token_gradients, local_token_gradients)
    )
    assert relative(run(model, batch, method="exact").squared, full) < 1e-8
    assert relative(run(model, batch).squared, cut) < 1e-8
    return full


@pytest.mark.parametrize("architecture", ["qwen2", "gpt2", "gemma2"])
def test_long_rows_in_segments_match_a_loop(architecture, exact_eager, monkeypatch):
    """Also where a prefix is shared, and where the first segment holds no token of interest."""
    monkeypatch.setattr(norms, "SEGMENT", 3)
    monkeypatch.setattr(rows, "WORTH", 1)
    model, batch = tiny_model(architecture), random_batch()
    batch["mask"][1, :-2] = 0
    _, expected = expect(local_token_gradients, model, batch)
    passes, own = [], norms.add_local
    monkeypatch.setattr(norms, "add_local", lambda *given: passes.append(given) or own(*given))
    assert relative(run(model, batch).squared, expected) < 1e-8
    assert len(passes) > 3
    same = {name: value[:1].repeat(3, 1) for name, value in batch.items() if name != "coef"}
    same["input_ids"] = torch.where(same["mask"] == 1, batch["input_ids"], same["input_ids"])
    same["input_ids"][:, : int(same["mask"].argmax(1)[0])] = batch["input_ids"][
        0, : int(same["mask"].argmax(1)[0])
    ]
    _, expected = expect(local_token_gradients, model, same)
    assert relative(run(model, same).squared, expected) < 1e-8


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_exact_and_local_match_a_loop(architecture, tie, exact_eager):
    model, batch = without_experts(tiny_model(architecture, tie=tie)), random_batch()
    full, exact, cut = compare(model, batch), run(model, batch, method="exact"), run(model, batch)
    assert relative(exact.values, full.sqrt()) < 1e-8
    assert not exact.squared[batch["mask"] == 0].any() and not cut.values[batch["mask"] == 0].any()
    # an approximation, but of the right thing
    assert float((cut.values / full.sqrt())[full > 0].median()) > 0.3


@pytest.mark.parametrize("architecture", ["qwen2", "gpt_neox"])
def test_groups_are_the_norms_of_their_parameters(architecture):
    model, batch = tiny_model(architecture, tie=False), random_batch()
    gradients, _ = expect(token_gradients, model, batch)
    found = run(model, batch, method="exact")
    place = next(iter(gradients))
    squares = {
        name: float(g.square().sum())
        for (name, _), g in zip(model.named_parameters(), gradients[place], strict=True)
    }
    members = {
        "layers.0": lambda n: ".0." in n,
        "layers.1": lambda n: ".1." in n,
        "head": lambda n: "lm_head" in n or "embed_out" in n,
        "attention": lambda n: ("attn" in n or "attention." in n) and "norm" not in n,
    }
    for group, inside in some(members.items()):
        norm = sum(square for name, square in squares.items() if inside(name)) ** 0.5
        assert float(found.groups[group][place]) == pytest.approx(norm, rel=1e-8)
    kinds = sum(
        found.groups[kind].square() for kind in found.groups if not kind.startswith("layers.")
    )
    torch.testing.assert_close(kinds, found.squared, rtol=1e-8, atol=0)


def test_one_token_of_a_long_row_and_rows_without_tokens():
    model, batch = tiny_model("llama"), random_batch(rows=4, completion=14)
    batch["mask"][0] = 0
    batch["mask"][2] = 0
    batch["mask"][2, 5] = 1
    _, full = expect(token_gradients, model, batch)
    assert relative(run(model, batch, method="exact").squared, full) < 1e-8
    assert not run(model, batch).values[0].any()
    batch["mask"][:] = 0
    assert not run(model, batch, method="exact").values.any()


@pytest.mark.parametrize(
    "length", [4, 2, 8]
)  # as many positions as heads, key heads, …: shapes must not be confused
def test_lengths_that_equal_the_number_of_heads(length):
    model = tiny_model("qwen3")
    ids = torch.randint(2, 37, (2, length), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[:, 0] = 0
    compare(model, {"input_ids": ids, "mask": mask, "attention_mask": torch.ones_like(ids)})


@pytest.mark.parametrize("architecture", ["qwen2", "gemma2"])
def test_head_norm_is_the_output_layers_gradient(architecture, exact_eager):
    model, batch = tiny_model(architecture, tie=False), random_batch()
    gradients, _ = expect(token_gradients, model, batch)
    found = run(model, batch, method="head")
    at = [name for name, _ in model.named_parameters()].index("lm_head.weight")
    for place, gradient in some(gradients.items()):
        assert float(found.values[place]) == pytest.approx(float(gradient[at].norm()), rel=1e-8)


def test_head_norm_keeps_its_precision_for_confident_tokens():
    """1 − π near 1e-6 in float32: the root of a difference of near-equal numbers would lose all digits."""
    hidden = torch.tensor([[1.0, 0.5]])
    weight = torch.tensor([[14.0, 0.0], [0.0, 1.0], [-1.0, 0.3]])
    found = norms.head_gradients(hidden, Head(weight), torch.tensor([0]), 1.0)
    p = torch.softmax(weight.double() @ hidden[0].double(), 0)
    expected = ((p[1:].sum() ** 2 + p[1:].square().sum()) * hidden.double().square().sum()).sqrt()
    assert float(found.weight_squared.sqrt()) == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("target", ["all-linear", ["q_proj", "down_proj"]])
def test_adapters_on_a_frozen_base(target):
    model, batch = tiny_model("qwen2"), random_batch()
    model = peft.get_peft_model(
        model, peft.LoraConfig(r=3, target_modules=target, init_lora_weights=False)
    )
    with torch.no_grad():
        generator = torch.Generator().manual_seed(5)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = 0.3 * torch.randn(
                    parameter.shape, generator=generator, dtype=torch.float64
                )
    compare(model.eval(), batch)
    assert "head" not in run(model, batch).groups


@pytest.mark.parametrize("kept", ["norm", "bias", "v_proj", "embed_tokens"])
def test_only_trainable_parameters_count(kept):
    model, batch = tiny_model("qwen2"), random_batch()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(kept in name)
    compare(model, batch)


def test_positions_that_mix_outside_attention_are_refused():
    model, batch = tiny_model("qwen2"), random_batch()
    model.model.layers[1].mlp.register_forward_pre_hook(lambda _, given: (given[0].cumsum(1) / 10,))
    with pytest.raises(UserError, match=r"local: differs from plain autograd.*method='exact'"):
        run(model, batch)
    _, full = expect(token_gradients, model, batch)
    assert relative(run(model, batch, method="exact").squared, full) < 1e-8


def test_mistakes_are_told():
    model, batch = tiny_model("qwen2"), random_batch()
    ids, mask, attention = batch["input_ids"], batch["mask"], batch["attention_mask"]
    with pytest.raises(UserError, match="did you mean 'local'"):
        score_norms(model, ids, mask, method="locl")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="first token"):
        score_norms(model, ids, torch.ones_like(mask))
    with pytest.raises(UserError, match="padding"):
        score_norms(model, ids, torch.ones_like(mask), attention_mask=attention)
    with pytest.raises(UserError, match="vocabulary"):
        score_norms(model, ids + 30, mask)
    with pytest.raises(UserError, match="coef"):
        attributed(model, batch, mask[:, 1:])
    with pytest.raises(UserError, match="direction"):
        attributed(model, batch, mask, [torch.zeros(3) for _ in model.parameters()])


def test_exact_norms_do_not_depend_on_batches(monkeypatch):
    model = tiny_model("qwen2")
    ids = torch.randint(2, 37, (2, 24), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[:, 0] = 0
    found = []
    for positions, slots in ((10**6, 16), (10**6, 3), (1, 1)):
        monkeypatch.setitem(norms.POSITIONS, "cpu", positions)
        monkeypatch.setattr(norms, "SLOTS", slots)
        found.append(score_norms(model, ids, mask, "exact").squared)
    for other in some(found[1:]):
        torch.testing.assert_close(other, found[0], rtol=1e-12, atol=0)


OTHERS: dict[str, dict] = {
    "bloom": dict(vocab_size=37, hidden_size=16, n_layer=2, n_head=4),
    "gpt_oss": dict(
        COMMON,
        vocab_size=37,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        head_dim=8,
    ),
}


@pytest.mark.parametrize(
    ("architecture", "says"), [("bloom", "AttentionInterface"), ("gpt_oss", "another way")]
)
def test_what_does_not_work_says_why(architecture, says):
    config = CONFIG_MAPPING[architecture](**OTHERS[architecture])
    model, batch = AutoModelForCausalLM.from_config(config).eval(), random_batch()
    given = (model, batch["input_ids"], batch["mask"])
    with pytest.raises(UserError, match=f"method, local: .*{says}"):
        score_norms(*given, "local", batch["attention_mask"])
    if architecture == "bloom":
        with pytest.raises(UserError, match="no forward-mode derivative"):
            attribute(*given, batch["mask"].float(), None, batch["attention_mask"])


# -- A use of a parameter that the hooks do not meet is refused by name

# x (B, L, d), w (d, d)
WAYS = {
    "matmul": lambda x, w: x @ w,
    "itself": lambda x, w: F.linear(F.linear(x, w), w),
}


class Positions(nn.Embedding):
    """Learned positions that are called with the words, as in OPT and MVP."""

    def forward(self, x):
        return super().forward(torch.arange(x.shape[1]).expand(x.shape))


def using(way):
    """A model with an unknown use of a parameter, and the module that the refusal names."""
    model = tiny_model("qwen2", tie=False)
    layers = model.model.layers
    if way == "a weight of two layers":
        layers[1].mlp.up_proj.weight = layers[0].mlp.up_proj.weight
    elif way == "positions":
        model.model.embed_tokens = Positions(
            *model.model.embed_tokens.weight.shape, dtype=torch.float64
        )
    elif way == "an adapter on the embedding":
        config = peft.LoraConfig(
            r=3, init_lora_weights=False, target_modules=["embed_tokens", "q_proj"]
        )
        model = peft.get_peft_model(model, config).eval()
    elif way in WAYS:
        layers[0].mlp.matrix = nn.Parameter(torch.eye(16, dtype=torch.float64))
        layers[0].mlp.register_forward_pre_hook(
            lambda module, given: (WAYS[way](given[0], module.matrix),)
        )
    return model, {"positions": "embed_tokens", "an adapter on the embedding": "embed_tokens"}.get(
        way, r"layers\.0\.mlp"
    )


@pytest.mark.parametrize(
    "way", [*WAYS, "a weight of two layers", "positions", "an adapter on the embedding"]
)
def test_an_unknown_use_is_named(way):
    (model, named), batch = using(way), random_batch()
    for method in ("exact", "local"):
        with pytest.raises(UserError, match=rf"{named}.*another way"):
            run(model, batch, method=method)


def test_squares_do_not_overflow_float16():
    """Activations and cotangents fit into float16 here; their squares, at most 65504 there, do not."""
    model, batch = tiny_model("gpt2", dtype=torch.float16), random_batch()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".ln_" in name:
                parameter.mul_(120)
            elif parameter.ndim > 1 and "wte" not in name:
                parameter.mul_(0.02)
    wide = tiny_model("gpt2", dtype=torch.float32)
    wide.load_state_dict(model.state_dict())
    full, cut = (
        expect(oracle, wide, batch)[1] for oracle in (token_gradients, local_token_gradients)
    )
    assert float(cut[batch["mask"] == 1].median()) > 65504
    for method, expected in (
        ("exact", full),
        ("local", cut),
        ("head", run(wide, batch, method="head").squared),
    ):
        found = run(model, batch, method=method).squared.double()
        torch.testing.assert_close(found, expected.double(), rtol=3e-2, atol=1.0)


# -- Attention against autograd, with every mask and soft caps

B, HEADS, KEY_HEADS, L, D, BEFORE = 2, 4, 2, 11, 6, 3
SCALE = 0.4


def masked(name):
    """A mask or None; what is None or hidden by all of them is a later key."""
    draw = torch.Generator().manual_seed(5)
    causal = torch.ones(L, BEFORE + L, dtype=torch.bool).tril(BEFORE)
    heads = torch.randn(B, HEADS, L, BEFORE + L, generator=draw, dtype=torch.float64)
    shared = torch.zeros(1, 1, L, BEFORE + L, dtype=torch.float64)
    return {
        "causal": None,
        "shared": shared.masked_fill(~causal, torch.finfo(torch.float64).min),
        "heads": heads.masked_fill(~causal, -torch.inf),
    }[name]


def plain(q, k, v, mask, cap):
    """The same by ordinary operations."""
    scores = q @ k.repeat_interleave(HEADS // KEY_HEADS, 1).mT * SCALE
    scores = scores if cap is None else cap * torch.tanh(scores / cap)
    scores = scores + (
        torch.full((L, BEFORE + L), -torch.inf).triu(BEFORE + 1) if mask is None else mask
    )
    return torch.softmax(scores, -1) @ v.repeat_interleave(HEADS // KEY_HEADS, 1)


def test_a_boolean_mask_says_what_is_seen():
    draw = torch.Generator().manual_seed(1)
    q, k, v = (
        torch.randn(B, heads, L, D, generator=draw) for heads in (HEADS, KEY_HEADS, KEY_HEADS)
    )
    seen = torch.ones(1, 1, L, L, dtype=torch.bool).tril()
    added = torch.zeros(1, 1, L, L).masked_fill(~seen, torch.finfo(torch.float32).min)
    out = [
        structure._attention(torch.nn.Identity(), q, k, v, mask, cut=True)[0]
        for mask in (seen, added, None)
    ]
    assert torch.equal(out[0], out[1]) and torch.allclose(out[0], out[2])


@pytest.mark.parametrize(
    ("mask", "cap"), [("causal", None), ("causal", 3.0), ("shared", None), ("heads", 3.0)]
)
def test_attention_leaves_out_other_positions_keys_and_values(mask, cap, monkeypatch):
    """Position by position, with all keys and values constant but the position's own."""
    monkeypatch.setattr(structure, "QUERY_BLOCK", 4)
    mask, draw = masked(mask), torch.Generator().manual_seed(1)
    shapes = ((B, HEADS, L, D), (B, KEY_HEADS, BEFORE + L, D), (B, KEY_HEADS, BEFORE + L, D))
    q, k, v = (
        torch.randn(*shape, generator=draw, dtype=torch.float64, requires_grad=True)
        for shape in shapes
    )
    out = structure.attend(q, k, v, mask, SCALE, cap, cut=True)
    torch.testing.assert_close(out, plain(q, k, v, mask, cap), rtol=1e-9, atol=1e-11)
    g = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    found = torch.autograd.grad(out, (q, k, v), g)
    expected = [torch.zeros_like(x) for x in (q, k, v)]
    for t in range(L):
        k_own, v_own = k.detach().clone(), v.detach().clone()
        k_own[:, :, BEFORE + t], v_own[:, :, BEFORE + t] = k[:, :, BEFORE + t], v[:, :, BEFORE + t]
        own = (plain(q, k_own, v_own, mask, cap)[:, :, t] * g[:, :, t]).sum()
        for total, part in zip(expected, torch.autograd.grad(own, (q, k, v)), strict=True):
            total += part
    torch.testing.assert_close(list(found), expected, rtol=1e-9, atol=1e-11)


# -- Completions of one prompt: reading the prompt once changes nothing

PROMPTS = (19, 25)


def completions():
    """Three completions of each of two prompts, one row that shares with none; prompts padded on the left."""
    draw = torch.Generator().manual_seed(4)
    width, longest = max(PROMPTS), 4
    prompts = [torch.randint(2, 37, (n,), generator=draw) for n in PROMPTS]
    prompts = [prompts[0]] * 3 + [prompts[1]] * 3 + [torch.randint(2, 37, (20,), generator=draw)]
    ids = torch.zeros(7, width + longest, dtype=torch.long)
    attention, mask = torch.zeros_like(ids), torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        n = longest - row % 3
        ids[row, width - len(prompt) : width] = prompt
        ids[row, width : width + n] = torch.randint(2, 37, (n,), generator=draw)
        attention[row, width - len(prompt) : width + n] = 1
        mask[row, width : width + n] = 1
    mask[1, width : width + 2] = 0  # its beginning is two tokens longer
    coef = torch.randn(mask.shape, generator=draw, dtype=torch.float64) * mask
    coef[2] = 0
    return {"input_ids": ids, "mask": mask, "attention_mask": attention}, coef


@pytest.mark.parametrize(
    ("architecture", "options"),
    [("qwen2", {}), ("gpt2", {}), ("gpt_neox", {}), ("gemma2", {"attn_logit_softcapping": 3.0})],
)
def test_shared_prompts_match_the_loop(architecture, options, exact_eager, monkeypatch):
    monkeypatch.setattr(rows, "WORTH", 16)
    monkeypatch.setattr(structure, "QUERY_BLOCK", 4)
    model, (given, coef) = tiny_model(architecture, **options), completions()
    assert structure.structure_of(model).shares
    gradients = token_gradients(model, **given)
    local = squared_norms(local_token_gradients(model, **given), given["mask"].shape)
    torch.testing.assert_close(score_norms(model, **given).squared, local, rtol=1e-9, atol=0)
    found, shares = logp_gradient(model, coef=coef, **given), attribute(model, coef=coef, **given)
    torch.testing.assert_close(found, weighted_sum(gradients, coef), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(shares, gradient_shares(gradients, coef), rtol=0, atol=1e-9)


# -- Attribution against a loop of autograd


def coefficients(batch, dtype=torch.float64, seed=1):
    return (
        torch.randn(batch["mask"].shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)
        * batch["mask"]
    )


def shares(model, batch, coef):
    return gradient_shares(expect(token_gradients, model, batch)[0], coef)


def attributed(model, batch, coef, direction=None):
    return attribute(
        model, batch["input_ids"], batch["mask"], coef, direction, batch["attention_mask"], T
    )


def off(found, expected):
    """Largest error relative to Σ|share|."""
    return float((found.double() - expected).abs().max() / expected.abs().sum())


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_shares_match_a_loop(architecture, tie):
    model, batch = tiny_model(architecture, tie=tie), random_batch()
    coef = coefficients(batch)
    expected = shares(model, batch, coef)
    found = attributed(model, batch, coef)
    assert off(found, expected) < 1e-6
    assert float(found.sum()) == pytest.approx(1.0, abs=1e-6)
    assert not found[batch["mask"] == 0].any()
    single = tiny_model(architecture, tie=tie, dtype=torch.float32)
    assert off(attributed(single, batch, coef.float()), expected) < 1e-5


def test_along_any_direction_without_normalising():
    model, batch = tiny_model("qwen2"), random_batch()
    coef = coefficients(batch)
    generator = torch.Generator().manual_seed(2)
    direction = [
        torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in model.parameters()
    ]
    expected = along(expect(token_gradients, model, batch)[0], coef, direction)
    torch.testing.assert_close(
        attributed(model, batch, coef, direction), expected, rtol=1e-9, atol=1e-10
    )


@pytest.mark.parametrize("architecture", ["qwen2", "gemma2"])
def test_what_a_gradient_keeps_changes_no_share(architecture, monkeypatch):
    model, batch = tiny_model(architecture), random_batch()
    coef = coefficients(batch)
    coef[1] = 0.0
    expected = shares(model, batch, coef)
    monkeypatch.setitem(rows.CHUNK_TOKENS, "cpu", 1)  # a row at a time
    attributed(model, batch, coef)  # with the checks of a first call
    passes, derivative = [], attribution.logp_derivative
    monkeypatch.setattr(
        attribution,
        "logp_derivative",
        lambda *given: (passes.append(given[5]), derivative(*given))[1],
    )

    def kept(room):
        """Numbers of outputs that were kept of each row."""
        monkeypatch.setitem(attribution.KEPT_BYTES, "cpu", room)
        assert off(attributed(model, batch, coef), expected) < 1e-6
        return [len(known) for known in passes[-1]]

    count = sum(isinstance(module, torch.nn.Linear) for module in model.base_model.modules())
    assert kept(2**30) == [count, count]
    assert kept(sum(x.nbytes for x in passes[-1][0]) + 1) == [count, 0]
    assert kept(0) == [0, 0]


def test_only_the_adapters_count():
    model, batch = tiny_model("qwen2"), random_batch()
    lora = peft.LoraConfig(r=3, target_modules="all-linear", init_lora_weights=False)
    model = peft.get_peft_model(model, lora).eval().double()
    coef = coefficients(batch)
    assert off(attributed(model, batch, coef), shares(model, batch, coef)) < 1e-7


def test_no_gradient_no_shares():
    model, batch = tiny_model("qwen2"), random_batch()
    found = attributed(model, batch, torch.zeros(batch["mask"].shape))
    assert torch.equal(found.isnan(), batch["mask"].bool())


def test_failure_and_nll_coefficients_give_their_gradients():
    model, batch = tiny_model("qwen2"), random_batch()
    success = torch.tensor([1.0, 0.25, 0.5], dtype=torch.float64)
    parameters = list(model.parameters())
    parts = []
    for row in range(3):
        ids, columns = aligned(batch["input_ids"], batch["attention_mask"], row)
        parts.append(log_probabilities(model, ids, T)[batch["mask"][row, columns].bool()])
    failure = torch.stack(
        [1 - r * (logp - logp.detach()).sum().exp() for r, logp in zip(success, parts, strict=True)]
    ).mean()
    nll = -torch.cat(parts).mean()
    for scalar, coef in (
        (failure, failure_coefficients(batch["mask"], success)),
        (nll, -batch["mask"].double() / batch["mask"].sum()),
    ):
        expected = list(torch.autograd.grad(scalar, parameters, retain_graph=True))
        found = logp_gradient(
            model, batch["input_ids"], batch["mask"], coef, batch["attention_mask"], T
        )
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)
