"""Token statistics against their definitions, and the laws that hold for every distribution."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import sharpscope.policy.token_stats as module
from sharpscope.errors import UserError
from sharpscope.policy import make_policy
from sharpscope.policy.head import Head, check_head, output_head
from sharpscope.policy.token_stats import (
    STAT_NAMES,
    Moments,
    flat_curvature,
    flat_logp,
    flat_proxy,
    logit_stats,
)
from tests.loops import some
from tests.models import tiny_model
from tests.oracles.token_gradients import token_statistics
from tests.policy.conftest import token_stats, word_tokenizer


def stats_of_logits(
    z: torch.Tensor, y: torch.Tensor, temperature: float = 1.0
) -> dict[str, torch.Tensor]:
    out = {name: torch.full((len(z),), torch.nan, dtype=z.dtype) for name in STAT_NAMES}
    logit_stats(z.clone(), y, temperature, out)
    return out


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.5])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6)])
@pytest.mark.parametrize(
    "head_kind",
    [{}, {"bias": True}, {"soft_cap": 3.0}, {"scale": 0.25, "bias": True, "soft_cap": 1.5}],
)
def test_every_statistic_of_every_token_equals_its_definition(
    head_kind, dtype, tolerance, temperature, monkeypatch
):
    # chunks of five tokens
    monkeypatch.setattr(module, "LOGIT_BYTES", {"cpu": 23 * dtype.itemsize * 5, "cuda": 1})
    monkeypatch.setattr(module, "CACHE_BYTES", {"cpu": 23 * dtype.itemsize * 2, "cuda": 1})
    g = torch.Generator().manual_seed(1)
    hidden = 2 * torch.randn(3, 5, 6, generator=g, dtype=dtype)
    weight = torch.randn(23, 6, generator=g, dtype=dtype)
    bias = torch.randn(23, generator=g, dtype=dtype) if head_kind.get("bias") else None
    head = Head(weight, bias, head_kind.get("soft_cap"), head_kind.get("scale", 1.0))
    targets = torch.randint(0, 23, (3, 5), generator=g)
    mask = torch.rand(3, 5, generator=g) < 0.7
    garbage = torch.where(mask[..., None], hidden, torch.nan)
    stats = token_stats(garbage, head, targets, temperature, mask=mask)

    z = hidden.double() @ weight.double().T + (0 if bias is None else bias.double())
    z = z * head.scale
    if head.soft_cap:
        z = head.soft_cap * torch.tanh(z / head.soft_cap)
    for n in range(3):
        for t in range(5):
            expected = token_statistics(z[n, t], int(targets[n, t]), temperature)
            expected["hidden_norm"] = float(hidden[n, t].double().norm())
            for name in STAT_NAMES:
                value = float(getattr(stats, name)[n, t])
                wanted = expected[name] if mask[n, t] else 0.0
                assert value == pytest.approx(wanted, rel=20 * tolerance, abs=20 * tolerance), name
    assert stats.logp.dtype == dtype


def test_a_confident_token_keeps_its_relative_precision_in_single_precision():
    # 1 − π from 1e-2 down to 1e-12: in float32, 1 − exp(ln π) or 1 − 2π + Σp² would be 0 or noise below 1e-7.
    z = torch.zeros(5, 11)
    z[:, 4] = torch.tensor([5.0, 10.0, 15.0, 20.0, 28.0])
    for row, out in enumerate(zip(*stats_of_logits(z, torch.full((5,), 4)).values(), strict=True)):
        expected, found = (
            token_statistics(z[row], 4, 1.0),
            dict(zip(STAT_NAMES, map(float, out), strict=True)),
        )
        for name in ("logp", "entropy", "logit_grad_norm", "polarity"):
            assert found[name] == pytest.approx(expected[name], rel=3e-6), name
    z = torch.tensor([[0.0, 20.0, -60.0, 1.0]])  # an improbable token beside a near certain one
    expected, out = token_statistics(z[0], 2, 1.0), stats_of_logits(z, torch.tensor([2]))
    for name in ("logp", "entropy", "collision", "logit_grad_norm", "polarity"):
        assert float(out[name][0]) == pytest.approx(expected[name], rel=1e-5, abs=2e-7), name


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([1.0, 0.6, 2.0]))
def test_gradient_norm_and_polarity_by_differentiation(seed, temperature):
    g = torch.Generator().manual_seed(seed)
    V = int(torch.randint(2, 30, (), generator=g))
    z = (3 * torch.randn(V, generator=g, dtype=torch.float64)).requires_grad_()
    y = int(torch.randint(0, V, (), generator=g))
    out = stats_of_logits(z.detach()[None], torch.tensor([y]), temperature)

    scaled = z / temperature
    (gradient,) = torch.autograd.grad(torch.log_softmax(scaled, 0)[y], scaled)
    assert float(out["logit_grad_norm"]) == pytest.approx(float(gradient.norm()), rel=1e-9)

    def entropy(s: torch.Tensor) -> torch.Tensor:
        logp = torch.log_softmax(s, 0)
        return -(logp.exp() * logp).sum()

    # A policy-gradient step s += η·A·∇ log p_y with A = 1: dH/dη = −polarity.
    s = scaled.detach().requires_grad_()
    (slope,) = torch.autograd.grad(entropy(s), s)
    assert float(out["polarity"]) == pytest.approx(-float(slope @ gradient), rel=1e-8, abs=1e-12)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_filtered_policy_by_its_definition(temperature, monkeypatch):
    """Tokens below min_p·max p have probability 0, the others are renormalized; whatever the size of a chunk."""
    monkeypatch.setattr(module, "LOGIT_BYTES", {"cpu": 23 * 8 * 4, "cuda": 23 * 8 * 4})
    g = torch.Generator().manual_seed(2)
    hidden, weight = (
        2 * torch.randn(11, 6, generator=g, dtype=torch.float64),
        torch.randn(23, 6, generator=g, dtype=torch.float64),
    )
    targets = torch.randint(0, 23, (11,), generator=g)
    targets[:3] = (hidden @ weight.T)[:3].argmax(1)
    monkeypatch.setattr(module, "PROXY_MIN_P", 0.05)
    found = flat_proxy(hidden, Head(weight, None), targets, temperature)
    for row, y in some(enumerate(targets.tolist())):
        p = torch.softmax(hidden[row] @ weight.T / temperature, 0).tolist()
        kept = sum(value for value in p if value >= 0.05 * max(p))
        wanted = math.log(p[y] / kept) if p[y] >= 0.05 * max(p) else -math.inf
        assert float(found[row]) == (
            wanted if wanted == -math.inf else pytest.approx(wanted, abs=1e-12)
        )
    assert torch.isinf(found).any() and torch.isfinite(found).sum() >= 3


@pytest.mark.parametrize("warm", [True, False])
@pytest.mark.parametrize("top", [23, 4])
def test_curvature_by_autograd_and_a_step_of_adam_itself(top, warm, monkeypatch):
    """g from autograd, G from torch's AdamW on a copy with the same state, the quadratic form with a dense F."""
    monkeypatch.setattr(module, "LOGIT_BYTES", {"cpu": 23 * 8 * 4, "cuda": 23 * 8 * 4})
    g = torch.Generator().manual_seed(5)
    hidden, start = (
        torch.randn(*shape, generator=g, dtype=torch.float64) for shape in ((9, 6), (23, 6))
    )
    targets, advantage = (
        torch.randint(0, 23, (9,), generator=g),
        torch.randn(9, generator=g, dtype=torch.float64),
    )
    temperature, lr = 0.8, 0.3
    weight = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.AdamW([weight], lr=1e-3, weight_decay=0.0, betas=(0.9, 0.99), eps=1e-6)
    for _ in range(3 * warm):
        weight.grad = torch.randn(23, 6, generator=g, dtype=torch.float64)
        optimizer.step()
    state, moments = optimizer.state.get(weight), None
    if warm:
        moments = Moments(
            state["exp_avg"], state["exp_avg_sq"], int(state["step"]), (0.9, 0.99), 1e-6
        )
    head = Head(weight.detach().clone(), None)
    monkeypatch.setattr(module, "CURVATURE_TOP", top)
    found = flat_curvature(
        hidden, head, targets, temperature, advantage=advantage, lr=lr, moments=moments
    )
    for row, y in some(enumerate(targets.tolist())):
        copied = torch.nn.Parameter(weight.detach().clone())
        z = copied @ hidden[row] / temperature
        (advantage[row] * z.log_softmax(0)[y]).backward()
        p = z.detach().softmax(0)
        rest = [v for v in p.argsort(descending=True).tolist() if v != y][: top - 1]
        chosen = torch.zeros(23, dtype=torch.bool)
        chosen[[y, *rest]] = True
        gradient = copied.grad * chosen[:, None]
        G = gradient
        if warm:
            other = torch.optim.AdamW(
                [copied], lr=1.0, weight_decay=0.0, betas=(0.9, 0.99), eps=1e-6
            )
            other.state[copied] = {name: value.clone() for name, value in state.items()}
            before, copied.grad = copied.detach().clone(), -gradient  # it minimizes
            other.step()
            G = (copied.detach() - before) * chosen[:, None]
        u = G @ hidden[row] / temperature
        v = (torch.arange(23) == y).double() - p
        F = torch.diag(p * chosen) - torch.outer(p * chosen, p * chosen)
        vu = (v * u).sum()
        m_h = lr * (gradient * G).sum() + lr**2 / 2 * advantage[row] * (vu**2 - u @ F @ u)
        torch.testing.assert_close(
            found[row], torch.stack([m_h, lr**2 / 2 * vu**2]), rtol=1e-9, atol=1e-12
        )


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize(
    "kind",
    [
        {},
        {"bias": True},
        {"soft_cap": 2.0, "bias": True},
        {"scale": 0.3},
        {"soft_cap": 1.5, "scale": 2.0},
    ],
)
def test_chunked_backward_pass_equals_the_one_that_keeps_all_logits(kind, temperature, monkeypatch):
    g = torch.Generator().manual_seed(3)
    shapes = ((11, 5), (29, 5), (29,))
    leaves = [
        torch.randn(shape, generator=g, dtype=torch.float64).requires_grad_() for shape in shapes
    ]
    hidden, weight, bias = leaves if kind.get("bias") else (*leaves[:2], None)
    head = Head(weight, bias, kind.get("soft_cap"), kind.get("scale", 1.0))
    targets = torch.randint(0, 29, (11,), generator=g)
    monkeypatch.setattr(module, "LOGIT_BYTES", {"cpu": 29 * 8 * 3, "cuda": 1})
    found = {}
    for keep in (True, False):
        logp, stats = flat_logp(hidden, head, targets, temperature, stats=True, keep_logits=keep)
        wanted = [leaf for leaf in (hidden, weight, bias) if leaf is not None]
        found[keep] = (
            logp,
            torch.autograd.grad((logp * torch.arange(1.0, 12.0)).sum(), wanted),
            stats,
        )
    assert torch.allclose(found[True][0], found[False][0], atol=1e-12)
    for kept, chunked in zip(found[True][1], found[False][1], strict=True):
        assert torch.allclose(kept, chunked, atol=1e-11)
    for name in STAT_NAMES:
        assert torch.allclose(found[True][2][name], found[False][2][name], atol=1e-12), name


def test_a_head_that_is_something_else_is_refused():
    model = tiny_model()
    model.lm_head.register_forward_hook(lambda module, inputs, out: out * 2)
    with pytest.raises(UserError, match="not a linear function"):
        check_head(model, output_head(model))
    model.lm_head = nn.Sequential(nn.Linear(16, 37))
    with pytest.raises(UserError, match="its output layer is Sequential"):
        make_policy(model, word_tokenizer(), "x")
