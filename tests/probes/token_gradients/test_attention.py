"""Attention's derivatives against autograd in float64: every mask and soft caps."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad

from sharpscope.probes import attribute, logp_gradient, score_norms
from sharpscope.probes.token_gradients import attention
from sharpscope.probes.token_gradients import rows as rows_module
from sharpscope.probes.token_gradients.structure import structure_of
from tests.models import tiny_model
from tests.oracles.token_gradients import (
    gradient_shares,
    local_token_gradients,
    squared_norms,
    token_gradients,
    weighted_sum,
)

B, HEADS, KEY_HEADS, L, D, BEFORE = 2, 4, 2, 11, 6, 3
SCALE = 0.4
CASES = pytest.mark.parametrize(
    ("mask", "cap"),
    [("causal", None), ("causal", 3.0), ("shared", None), ("rows", 3.0), ("heads", 3.0), ("heads", None)],
)


def masked(name):
    """A mask or None; what is None or hidden by all of them is a later key."""
    draw = torch.Generator().manual_seed(5)
    causal = torch.ones(L, BEFORE + L, dtype=torch.bool).tril(BEFORE)
    some = torch.rand(B, 1, L, BEFORE + L, generator=draw) < 0.7
    heads = torch.randn(B, HEADS, L, BEFORE + L, generator=draw, dtype=torch.float64)
    shared = torch.zeros(1, 1, L, BEFORE + L, dtype=torch.float64)
    return {
        "causal": None,
        "shared": shared.masked_fill(~causal, torch.finfo(torch.float64).min),
        "rows": causal & some | torch.eye(L, BEFORE + L).roll(BEFORE, 1).bool(),
        "heads": heads.masked_fill(~causal, -torch.inf),
    }[name]


def inputs():
    draw = torch.Generator().manual_seed(1)
    shapes = ((B, HEADS, L, D), (B, KEY_HEADS, BEFORE + L, D), (B, KEY_HEADS, BEFORE + L, D))
    return [torch.randn(*shape, generator=draw, dtype=torch.float64, requires_grad=True) for shape in shapes]


def plain(q, k, v, mask, cap):
    """The same by ordinary operations."""
    scores = q @ k.repeat_interleave(HEADS // KEY_HEADS, 1).mT * SCALE
    scores = scores if cap is None else cap * torch.tanh(scores / cap)
    mask = torch.ones(L, BEFORE + L, dtype=torch.bool).tril(BEFORE) if mask is None else mask
    scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    return torch.softmax(scores, -1) @ v.repeat_interleave(HEADS // KEY_HEADS, 1)


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """By default reading a beginning once must save about a thousand tokens."""
    monkeypatch.setattr(attention, "QUERY_BLOCK", 4)
    monkeypatch.setattr(rows_module, "WORTH", 16)


@CASES
def test_cut_attention_leaves_out_other_positions_keys_and_values(mask, cap):
    """Position by position, with all keys and values constant but the position's own."""
    mask, (q, k, v) = masked(mask), inputs()
    out = attention.attend(q, k, v, mask, SCALE, cap, cut=True)
    close(out, plain(q, k, v, mask, cap))
    g = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    found = torch.autograd.grad(out, (q, k, v), g)
    expected = [torch.zeros_like(x) for x in (q, k, v)]
    for t in range(L):
        k_own, v_own = k.detach().clone(), v.detach().clone()
        k_own[:, :, BEFORE + t], v_own[:, :, BEFORE + t] = k[:, :, BEFORE + t], v[:, :, BEFORE + t]
        own = (plain(q, k_own, v_own, mask, cap)[:, :, t] * g[:, :, t]).sum()
        for total, part in zip(expected, torch.autograd.grad(own, (q, k, v)), strict=True):
            total += part
    for one, total in zip(found, expected, strict=True):
        close(one, total)


@CASES
def test_forward_mode(mask, cap):
    mask, given = masked(mask), inputs()
    draw = torch.Generator().manual_seed(2)
    tangents = tuple(torch.randn(x.shape, generator=draw, dtype=x.dtype) for x in given)
    value, moved = torch.func.jvp(lambda *x: plain(*x, mask, cap), tuple(given), tangents)
    with torch.no_grad(), forward_ad.dual_level():
        duals = [forward_ad.make_dual(x.detach(), t) for x, t in zip(given, tangents, strict=True)]
        out = forward_ad.unpack_dual(attention.attend(*duals, mask, SCALE, cap, cut=False))
        close(out.primal, value)
        close(out.tangent, moved)


# -- Completions of one prompt: reading the prompt once changes nothing

PROMPTS = (19, 25)


def batch():
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
    return {"input_ids": ids, "mask": mask, "attention_mask": attention}


def coefficients(mask):
    coef = torch.randn(mask.shape, generator=torch.Generator().manual_seed(6), dtype=torch.float64) * mask
    coef[2] = 0
    return coef


@pytest.mark.parametrize("architecture", ["qwen2", "gpt2", "gpt_neox"])
def test_shared_prompts_match_the_loop(architecture):
    model, given = tiny_model(architecture), batch()
    assert structure_of(model).shares
    gradients = token_gradients(model, **given)
    local = squared_norms(local_token_gradients(model, **given), given["mask"].shape)
    torch.testing.assert_close(score_norms(model, **given).squared, local, rtol=1e-9, atol=0)
    coef = coefficients(given["mask"])
    found, shares = logp_gradient(model, coef=coef, **given), attribute(model, coef=coef, **given)
    torch.testing.assert_close(found, weighted_sum(gradients, coef), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(shares, gradient_shares(gradients, coef), rtol=0, atol=1e-9)


def test_shared_prompts_under_sliding_windows_and_soft_caps(monkeypatch):
    model, given = tiny_model("gemma2", attn_logit_softcapping=3.0), batch()
    assert structure_of(model).shares
    coef = coefficients(given["mask"])
    direction = [torch.ones_like(p) for p in model.parameters()]

    def everything():
        derivative = attribute(model, coef=given["mask"].double(), direction=direction, **given)
        return score_norms(model, **given).squared, attribute(model, coef=coef, **given), derivative

    shared = everything()
    monkeypatch.setattr(rows_module, "WORTH", 10**6)
    for one, other in zip(shared, everything(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)  # Gemma's eager softmax is in float32
