"""The exact tier's cheaper derivatives against autograd's own, and its threads."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from sharpscope.probes import score_norms
from sharpscope.probes.token_gradients import batched, uses
from sharpscope.probes.token_gradients.exact import in_threads
from sharpscope.probes.token_gradients.shortcuts import Shortcuts
from sharpscope.probes.token_gradients.structure import hidden_states
from tests.models import ARCHITECTURES, random_batch, tiny_model


def normed(x, cos, sin):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3)


def rotated(x, cos, sin):
    half = x.shape[-1] // 2
    return (x * cos) + (torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin)


def activated(x, cos, sin):
    return F.silu(x) * F.gelu(x, approximate="tanh") * torch.tanh(x) * torch.sigmoid(x)


def gated(x, cos, sin):
    return F.silu(x) * (x + cos) + (x * sin) * torch.tanh(x)


def gated_by_itself(x, cos, sin):
    y = F.silu(x)
    return y * y


def scaled(x, cos, sin):  # by a constant
    return F.silu(x) * cos


def other_norm(x, cos, sin):  # the root belongs to another tensor
    return x * torch.rsqrt((2 * x).pow(2).mean(-1, keepdim=True) + 1e-3)


def other_mean(x, cos, sin):  # the mean is over another dimension
    return x * torch.rsqrt(x.pow(2).mean(0, keepdim=True) + 1e-3)


def other_turn(x, cos, sin):  # the halves turn the other way
    half = x.shape[-1] // 2
    return (x * cos) + (torch.cat((x[..., half:], -x[..., :half]), dim=-1) * sin)


@pytest.mark.parametrize(
    ("function", "kind", "count"),
    [
        (normed, "norm", 1),
        (rotated, "rotation", 1),
        (activated, "activation", 4),
        (activated, "gate", 3),
        (gated, "gate", 2),
        (gated_by_itself, "gate", 1),
        (scaled, "gate", 0),
        (other_norm, "norm", 0),
        (other_mean, "norm", 0),
        (other_turn, "rotation", 0),
    ],
)
def test_a_recognised_chain_has_autograds_derivative(function, kind, count):
    draw = torch.Generator().manual_seed(0)
    x, cos, sin, g = (torch.randn(5, 6, generator=draw, dtype=torch.float64) for _ in range(4))
    x.requires_grad_()
    plain = function(x, cos, sin)
    with Shortcuts() as taken:
        short = function(x, cos, sin)
    assert taken.taken[kind] == count
    assert torch.equal(plain, short)
    expected = torch.autograd.grad(plain, x, g, retain_graph=True)[0]
    torch.testing.assert_close(torch.autograd.grad(short, x, g, retain_graph=True)[0], expected, rtol=1e-12, atol=1e-14)
    several = torch.stack([g, 2 * g, g.flip(0)], 1)  # (5, 3, 6): cotangents along the middle
    pull = torch.func.vmap(lambda one: torch.autograd.grad(short, x, one, retain_graph=True)[0], in_dims=1)
    exact = torch.stack([torch.autograd.grad(plain, x, one, retain_graph=True)[0] for one in several.unbind(1)])
    torch.testing.assert_close(pull(several), exact, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_every_architecture_is_recognised(architecture):
    """Two layers, of which the second's queries and keys are rotated too; GPT-2 has neither such norms nor rotations."""
    model = tiny_model(architecture, dtype=torch.float32)
    with Shortcuts() as found:
        hidden_states(model, random_batch()["input_ids"])
    norms = {"gpt2": 0, "gpt_neox": 0, "qwen3": 9, "gemma2": 9}.get(architecture, 5)
    assert found.taken["norm"] == norms
    assert found.taken["rotation"] == (0 if architecture == "gpt2" else 4)
    assert found.taken["activation"] >= 2
    assert found.taken["gate"] == {"gpt2": 0, "gpt_neox": 0, "qwen2_moe": 10}.get(architecture, 2)


def test_threads_keep_the_order_and_give_the_processors_back():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert list(in_threads((lambda i=i: (i, torch.get_num_threads()) for i in range(9)), 3)) == [
            (i, 1) for i in range(9)
        ]
        assert torch.get_num_threads() == 3

        def fails():
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            list(in_threads([fails, lambda: 1], 3))
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_exact_norms_do_not_depend_on_the_threads():
    model = tiny_model("qwen2")
    ids = torch.randint(2, 37, (2, 60), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[:, 0] = 0
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append(score_norms(model, ids, mask, "exact").squared)
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=0)


@pytest.fixture
def fresh_way():
    batched.way.cache_clear()
    yield
    batched.way.cache_clear()


def test_pytorchs_own_unwrapping_is_known_here(fresh_way):
    assert batched.way() == "direct"


class Renamed:
    """Functions of a PyTorch that calls them otherwise."""


class Misleading:
    """Functions of a PyTorch where the same names do something else: every cotangent is taken for the only one."""

    def is_batchedtensor(self, g):
        return False


@pytest.mark.parametrize("functions", [None, Renamed(), Misleading()])
def test_without_it_vmaps_public_rule_gives_the_same_norms(functions, fresh_way, monkeypatch):
    model, batch = tiny_model("gemma2"), random_batch()
    arguments = (model, batch["input_ids"], batch["mask"], "exact", batch["attention_mask"])
    direct, calls, rule = score_norms(*arguments), [], batched._Rule.vmap

    def watched(info, in_dims, g, function):
        calls.append(info.batch_size)
        return rule(info, in_dims, g, function)

    batched.way.cache_clear()
    monkeypatch.setattr(batched, "_C", functions)
    monkeypatch.setattr(batched._Rule, "vmap", staticmethod(watched))
    assert batched.way() == "rule"
    found = score_norms(*arguments)
    assert calls
    torch.testing.assert_close(found.squared, direct.squared, rtol=1e-12, atol=0)
    for name, norms in direct.groups.items():
        torch.testing.assert_close(found.groups[name], norms, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("way", ["direct", "rule"])
def test_cotangents_are_seen_together_wherever_vmap_puts_them(way, monkeypatch):
    monkeypatch.setattr(batched, "way", lambda: way)
    g, seen = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(2)), []

    def function(rows):
        seen.append(rows.shape)
        return rows.sum(-1), rows * 2

    for dim in range(3):
        total, double = torch.func.vmap(lambda one: batched.each(one, function), in_dims=dim)(g)
        torch.testing.assert_close(double, 2 * g.movedim(dim, 0))
        torch.testing.assert_close(total, g.movedim(dim, 0).sum(-1))
    alone = batched.each(g, function)
    torch.testing.assert_close(alone[1], 2 * g)
    assert seen == [(2, 3, 4), (3, 2, 4), (4, 2, 3), (1, 2, 3, 4)]


@pytest.mark.parametrize("length", [1, 31, 32, 33, 100])
def test_a_symmetric_product_in_blocks_is_the_whole_one(length):
    draw = torch.Generator().manual_seed(3)
    a = torch.randn(2, length, 5, generator=draw, dtype=torch.float64)
    b = torch.randn(3, 2, length, 4, generator=draw, dtype=torch.float64)
    expected = torch.einsum("rli,nrlo->nrio", a, b).square().sum((-1, -2))
    blocks = uses._lower_blocks(a @ a.mT)
    torch.testing.assert_close(uses._gram_squares(blocks, b), expected, rtol=1e-11, atol=0)
    torch.testing.assert_close(uses._product_squares(a, b), expected, rtol=1e-11, atol=0)
