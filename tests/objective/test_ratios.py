"""Ratios of sequences, their power means, and gradients."""

from __future__ import annotations

import math
from decimal import Decimal, localcontext

import pytest
import torch

from sharpscope.config.method import (
    HolderRatio,
)
from sharpscope.config.token_weights import SigmoidWeight
from sharpscope.objective import (
    named_method,
    policy_loss,
    prepare,
    token_normalizer,
)
from sharpscope.objective.loss import importance_ratio
from tests.objective.data import LIMIT, make_case


def test_holder_mean_keeps_its_precision_in_float32():
    x = torch.tensor([[0.3, -0.2, 0.05]])
    mask = torch.ones_like(x, dtype=torch.bool)
    for p in (1e-6, -1e-6, 1e-3, 1.0, -3.0):
        exact = (
            math.log(sum(math.exp(p * v) for v in x[0].double().tolist()) / 3) / p
            if abs(p) > 1e-4
            else float(x.double().mean())
        )
        assert float(importance_ratio(HolderRatio(p=p), x, mask)[0, 0].log()) == pytest.approx(exact, abs=3e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("p", [-50.0, -2.0, -1e-3, -1e-9, 1e-9, 1e-3, 1.0, 2.0, 50.0])
def test_power_mean_and_its_gradient_against_fifty_digits(p: float, dtype: torch.dtype):
    """Rows of 7, 1 and 0 tokens; p·x reaches ±3,000, far beyond where exp overflows."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(4, 7, generator=g, dtype=dtype) * torch.tensor([[0.2], [30.0], [60.0], [1.0]], dtype=dtype)
    x = x.clamp(-60, 60)
    mask = torch.tensor([[True] * 7, [True] * 7, [False] * 3 + [True] + [False] * 3, [False] * 7])
    x = torch.where(mask, x, torch.nan).requires_grad_()
    got = importance_ratio(HolderRatio(p=p), x, mask)
    (slope,) = torch.autograd.grad(got[:, 0].log().sum(), x)
    wanted, wanted_slope = torch.ones(4, dtype=torch.float64), torch.zeros(4, 7, dtype=torch.float64)
    with localcontext() as context:
        context.prec = 50
        power = Decimal(p)
        for i in range(3):
            places = mask[i].nonzero()[:, 0].tolist()
            terms = {t: (power * Decimal(x[i, t].item())).exp() for t in places}
            mean = sum(terms.values()) / len(terms)
            wanted[i] = float((mean.ln() / power).exp())
            for t in places:
                wanted_slope[i, t] = float(terms[t] / sum(terms.values()))
    tight = dtype == torch.float64
    torch.testing.assert_close(
        got.double(), wanted[:, None].expand_as(got), rtol=1e-12 if tight else 2e-5, atol=0, check_dtype=False
    )
    torch.testing.assert_close(slope.double(), wanted_slope, rtol=1e-9 if tight else 1e-6, atol=1e-12)


def test_a_row_without_tokens_costs_nothing_and_breaks_nothing():
    for name in ("grpo", "gspo", "holder", "grpo-sg"):
        case = make_case(named_method(name), 0)
        mask = case.mask.clone()
        mask[4] = False
        step = type(case.step)(**(vars(case.step) | {"mask": mask}))
        weight = SigmoidWeight(preset="paper") if name == "grpo-sg" else named_method(name).weight
        method = named_method(name).model_copy(update={"weight": weight})
        logp = case.now.clone().requires_grad_()
        out = policy_loss(
            method, prepare(method, step), logp, token_normalizer(method, mask, LIMIT, dtype=torch.float64)
        )
        out.loss.backward()
        assert bool(torch.isfinite(out.loss))
        assert not logp.grad[4].any()
        assert bool(torch.isfinite(logp.grad).all())
