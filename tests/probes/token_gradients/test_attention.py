"""Attention's derivatives against autograd in float64: every mask, soft caps, attention sinks."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad

from sharpscope.probes.token_gradients import attention
from sharpscope.probes.token_gradients.attention import (
    Call,
    _pushed,
    look,
    pull_back,
    pull_back_at,
    pull_back_cut,
)
from sharpscope.probes.token_gradients.tangents import carried, carry

B, HEADS, KEY_HEADS, L, D, BEFORE = 2, 4, 2, 11, 6, 3


def masks():
    """Name -> mask or None; what is None or hidden by all of them is a later key."""
    draw = torch.Generator().manual_seed(5)
    causal = torch.ones(L, BEFORE + L, dtype=torch.bool).tril(BEFORE)
    rows = (
        causal & (torch.rand(B, 1, L, BEFORE + L, generator=draw) < 0.7)
        | torch.eye(L, BEFORE + L).roll(BEFORE, 1).bool()
    )
    heads = torch.randn(B, HEADS, L, BEFORE + L, generator=draw, dtype=torch.float64)
    shared = torch.zeros(1, 1, L, BEFORE + L, dtype=torch.float64)
    return {
        "causal": None,
        "shared": shared.masked_fill(~causal, torch.finfo(torch.float64).min),
        "rows": rows,
        "heads": heads.masked_fill(~causal, -torch.inf),
    }


def case(mask, cap, sinks):
    draw = torch.Generator().manual_seed(1)

    def some(*shape):
        return torch.randn(*shape, generator=draw, dtype=torch.float64, requires_grad=True)

    keys = BEFORE + L
    sink = some(B, L, HEADS) if sinks else None
    call = Call(some(B, HEADS, L, D), some(B, KEY_HEADS, keys, D), some(B, KEY_HEADS, keys, D), sink, mask, 0.4, cap)
    return call, torch.randn(3, B, HEADS, L, D, generator=draw, dtype=torch.float64)


def plain(call):
    """The same by ordinary operations."""
    scores = call.q @ call.k.repeat_interleave(HEADS // KEY_HEADS, 1).mT * call.scale
    if call.cap is not None:
        scores = call.cap * torch.tanh(scores / call.cap)
    keys = call.k.shape[2]
    mask = torch.ones(L, keys, dtype=torch.bool).tril(keys - L) if call.mask is None else call.mask
    scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    if call.sinks is not None:
        scores = torch.cat([scores, call.sinks.mT[..., None]], -1)
    P = torch.softmax(scores, -1)[..., :keys]
    return P @ call.v.repeat_interleave(HEADS // KEY_HEADS, 1)


CASES = pytest.mark.parametrize(
    ("mask", "cap", "sinks"),
    [
        ("causal", None, False),
        ("causal", 3.0, True),
        ("shared", None, True),
        ("rows", 3.0, False),
        ("rows", None, True),
        ("heads", 3.0, True),
        ("heads", None, False),
    ],
)


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


@CASES
def test_value_and_pull(mask, cap, sinks):
    """All cotangents at once; keys and values are the queries' own alone, as where no beginning is read before."""
    call, g = case(masks()[mask], cap, sinks)
    mask = None if call.mask is None else call.mask[..., BEFORE:]
    call = call._replace(k=call.k[:, :, BEFORE:], v=call.v[:, :, BEFORE:], mask=mask)
    out = plain(call)
    with torch.no_grad():
        scene = look(call, 4)
        close(scene.out.view(scene.shape), out)
        found = pull_back(scene, g)
    assert len(found) == len(call.inputs)
    for i in range(3):
        for one, expected in zip(found, torch.autograd.grad(out, call.inputs, g[i], retain_graph=True), strict=True):
            close(one[i], expected)


@CASES
def test_pull_of_single_positions(mask, cap, sinks):
    call, g = case(masks()[mask], cap, sinks)
    mask = None if call.mask is None else call.mask[..., BEFORE:]
    call = call._replace(k=call.k[:, :, BEFORE:], v=call.v[:, :, BEFORE:], mask=mask)
    where = torch.tensor([[0, 3], [10, 4], [5, 5]])
    out = plain(call)
    with torch.no_grad():
        found = pull_back_at(look(call, 4), torch.stack([g[i, torch.arange(B), :, where[i]] for i in range(3)]), where)
    for i in range(3):
        alone = torch.zeros_like(g[i])
        for row in range(B):
            alone[row, :, where[i, row]] = g[i, row, :, where[i, row]]
        for one, expected in zip(found, torch.autograd.grad(out, call.inputs, alone, retain_graph=True), strict=True):
            close(one[i], expected)


@CASES
def test_cut_pull_leaves_out_other_positions_keys_and_values(mask, cap, sinks):
    """Position by position, with all keys and values constant but the position's own."""
    call, g = case(masks()[mask], cap, sinks)
    with torch.no_grad():
        found = pull_back_cut(look(call, 4), g[0])
    expected = [torch.zeros_like(x) for x in call.inputs]
    for t in range(L):
        k, v = call.k.detach().clone(), call.v.detach().clone()
        k[:, :, BEFORE + t], v[:, :, BEFORE + t] = call.k[:, :, BEFORE + t], call.v[:, :, BEFORE + t]
        own = (plain(call._replace(k=k, v=v))[:, :, t] * g[0, :, :, t]).sum()
        for total, part in zip(expected, torch.autograd.grad(own, call.inputs), strict=True):
            total += part
    for one, total in zip(found, expected, strict=True):
        close(one, total)


@pytest.mark.parametrize("at_once", [1, B])
@CASES
def test_forward_mode(mask, cap, sinks, at_once, monkeypatch):
    call, _ = case(masks()[mask], cap, sinks)
    monkeypatch.setitem(attention.SCORE_BYTES, "cpu", at_once * HEADS * L * (BEFORE + L) * 8)
    draw = torch.Generator().manual_seed(2)
    tangents = [tuple(torch.randn(x.shape, generator=draw, dtype=x.dtype) for x in call.inputs) for _ in range(2)]
    names = ("q", "k", "v", "sinks")[: len(tangents[0])]

    def of(*inputs):
        return plain(call._replace(**dict(zip(names, inputs, strict=True))))

    expected = [torch.func.jvp(of, call.inputs, moved)[1] for moved in tangents]
    sizes, own = [], attention.look
    monkeypatch.setattr(attention, "look", lambda some, size: (sizes.append(len(some.q)), own(some, size))[1])
    with torch.no_grad(), forward_ad.dual_level():
        duals = [forward_ad.make_dual(x.detach(), t) for x, t in zip(call.inputs, tangents[0], strict=True)]
        out = _pushed(call._replace(**dict(zip(names, duals, strict=True))))
        close(forward_ad.unpack_dual(out).tangent, expected[0])
    assert sizes == [at_once] * (B // at_once)
    several = [
        carry(x.detach(), list(moved)) for x, moved in zip(call.inputs, zip(*tangents, strict=True), strict=True)
    ]
    found = _pushed(call._replace(**dict(zip(names, several, strict=True))))
    close(found, plain(call).detach())
    for one, right in zip(carried(found), expected, strict=True):
        close(one, right)
