"""Advantages, normalisers, ratios, clip flags, selections and summaries by value."""

from __future__ import annotations

import math
from dataclasses import replace
from decimal import Decimal, localcontext

import numpy as np
import pytest
import torch

from sharpscope.config.method import (
    AdvantageTokens,
    ClipCovTokens,
    HighEntropyTokens,
    HolderRatio,
    KlCovPenalty,
    ProbabilityTokens,
)
from sharpscope.config.token_weights import SigmoidWeight, percentile
from sharpscope.objective import (
    Method,
    StepTensors,
    named_method,
    policy_loss,
    prepare,
    summarize_weights,
    token_normalizer,
)
from sharpscope.objective.loss import importance_ratio
from tests.objective.data import LIMIT, as_batch, make_case, tokens_step
from tests.oracles import objective as oracle


def test_loss_output_reports_ratio_flags_and_kl():
    case = make_case(named_method("grpo"), 1)
    method = named_method("grpo").model_copy(update={"kl": named_method("grpo").kl.model_copy(update={"coef": 0.1})})
    plan = prepare(method, case.step)
    normalizer = token_normalizer(method, case.mask, LIMIT, dtype=torch.float64)
    out = policy_loss(method, plan, case.now, normalizer, reference_logp=case.reference)
    batch = as_batch(case)
    for i, t in batch.tokens():
        ratio, a = oracle.ratio(batch, i, t).item(), plan.advantage[i, t]
        assert float(out.ratio[i, t]) == pytest.approx(ratio, rel=1e-12)
        assert int(out.clipped[i, t]) == (1 if ratio > 1.2 and a > 0 else -1 if ratio < 0.8 and a < 0 else 0)
        assert float(out.kl[i, t]) == pytest.approx(oracle.k3(batch, i, t).item(), abs=1e-12)
    assert out.clipped.dtype == torch.int8
    assert {-1, 0, 1} == set(out.clipped.flatten().tolist())
    outside = ~case.mask
    assert out.ratio[outside].unique().tolist() == [1.0]
    assert not out.kl[outside].any()
    assert not out.clipped[outside].any()
    beside = 0.1 * float((out.kl * normalizer).sum())
    assert float(out.divergence) == pytest.approx(beside, abs=1e-12)


@pytest.mark.parametrize("name", ["grpo", "gspo", "holder", "gmpo"])
def test_a_row_without_tokens_has_no_gradient_and_breaks_nothing(name: str):
    method, case = named_method(name), make_case(named_method(name), 0)
    mask = case.mask.clone()
    mask[4] = False
    logp = case.now.clone().requires_grad_()
    normalizer = token_normalizer(method, mask, LIMIT, dtype=torch.float64)
    policy_loss(method, prepare(method, replace(case.step, mask=mask)), logp, normalizer).loss.backward()
    assert bool(torch.isfinite(logp.grad).all()) and not logp.grad[4].any() and logp.grad.abs().max() > 1e-3


def test_missing_log_probabilities_and_wrong_shapes_are_refused():
    case = make_case(named_method("grpo"), 0)
    normalizer = token_normalizer(named_method("grpo"), case.mask, LIMIT)
    method = named_method("grpo")
    given = method.model_copy(update={"kl": method.kl.model_copy(update={"coef": 0.1})})
    with pytest.raises(ValueError, match="reference_logp"):
        policy_loss(given, prepare(given, case.step), case.now, normalizer)
    with pytest.raises(ValueError, match="must agree"):
        policy_loss(method, prepare(method, case.step), case.now[:, :-1], normalizer)
    with pytest.raises(ValueError, match="must be"):
        type(case.step)(**(vars(case.step) | {"group": case.step.group[:-1]}))
    with pytest.raises(ValueError, match="progress"):
        type(case.step)(**(vars(case.step) | {"progress": 1.5}))


def test_a_ratio_beyond_the_range_of_float32_does_not_poison_the_gradient():
    """A token that became certain since it was drawn: positive ones are clipped, so the gradient must be 0, not NaN."""
    case = make_case(named_method("grpo"), 0, dtype=torch.float32)
    step = type(case.step)(**(vars(case.step) | {"behavior_logp": torch.full_like(case.now, -100.0)}))
    method = named_method("grpo")
    logp = torch.zeros_like(case.now).requires_grad_()
    plan = prepare(method, step)
    out = policy_loss(method, plan, logp, token_normalizer(method, case.mask, LIMIT))
    out.loss.backward()
    positive = case.mask & (plan.advantage > 0)
    assert not logp.grad[positive].any()
    assert bool((out.clipped[positive] == 1).all())


def test_kl_cov_penalises_the_largest_covariances_and_all_that_tie():
    step = tokens_step([0.0] * 4, [0.0, 0.0, -4.0, -4.0], [1.0, -1.0, 1.0, -1.0])
    method = named_method("kl-cov")
    plan = prepare(method, step)
    assert plan.penalty.flatten().tolist() == [1.0, 0.0, 0.0, 1.0]
    assert "less than one token" in plan.warnings[0]
    most = method.model_copy(update={"penalty": KlCovPenalty(share=0.75)})
    assert prepare(most, step).penalty.flatten().tolist() == [1.0] * 4


# -- Ratios of sequences, their power means, and gradients


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


# -- Selections of tokens and passes by value


def kept(method: Method, step: StepTensors, seed: int = 0) -> list[bool]:
    return prepare(method, step, torch.Generator().manual_seed(seed)).keep.flatten().tolist()


def test_high_entropy_keeps_the_share_and_ties():
    step = tokens_step([0.1, 0.5, 0.9, 0.5, 0.2], [-1.0] * 5, [1.0] * 5)
    method = named_method("high-entropy")
    for share, expected in ((0.2, "00100"), (0.4, "01110"), (0.6, "01110"), (0.61, "01111"), (1.0, "11111")):
        chosen = method.model_copy(update={"tokens": HighEntropyTokens(share=share)})
        assert kept(chosen, step) == [c == "1" for c in expected], share


def test_probability_and_advantage_split_the_tokens_in_two():
    step = tokens_step([0.0] * 5, [math.log(p) for p in (0.1, 0.49, 0.5, 0.9, 0.2)], [1.0, -1.0, 1.0, -1.0, 0.0])
    method = named_method("grpo")
    for tokens, expected in (
        (ProbabilityTokens(), "11001"),
        (ProbabilityTokens(side="high"), "00110"),
        (AdvantageTokens(), "10100"),
    ):
        chosen = method.model_copy(update={"tokens": tokens})
        assert kept(chosen, step) == [c == "1" for c in expected], tokens


def test_clip_cov_draws_the_share_inside_the_band_and_says_when_that_is_less_than_one_token():
    # c = (ln π + 2)·(A − 0) = ±2: tokens 0 and 3 have +2, the others −2
    step = tokens_step([0.0] * 4, [0.0, 0.0, -4.0, -4.0], [1.0, -1.0, 1.0, -1.0])
    method = named_method("clip-cov")
    dropped = {tuple(kept(method, step, seed)).index(False) for seed in range(20)}
    assert dropped == {0, 3}
    assert sum(kept(method, step)) == 3
    assert "less than one token" in prepare(method, step, torch.Generator()).warnings[0]
    half = method.model_copy(update={"tokens": ClipCovTokens(share=0.75)})
    assert kept(half, step) == [False, True, True, False]  # three wanted, two in the band
    assert prepare(half, step, torch.Generator()).warnings == ()
    outside = method.model_copy(update={"tokens": ClipCovTokens(low=2.0, high=5.0)})
    assert all(kept(outside, step))
    with pytest.raises(ValueError, match="generator"):
        prepare(method, step)


# -- Summaries of weights by value


def test_weight_summary_by_value():
    weight = torch.tensor([[1.0, 1.0, 1.2, 1.4, 9.0]])
    mask = torch.tensor([[1, 1, 1, 1, 0]])
    got = summarize_weights(SigmoidWeight(), weight, mask)
    assert (got.saturation_low, got.saturation_high, got.mean) == (0.5, 0.25, pytest.approx(1.15))
    massed = summarize_weights(SigmoidWeight(), weight, mask, mass=torch.tensor([[1.0, 0.0, 1.0, 2.0, 9.0]]))
    assert (massed.saturation_low, massed.saturation_high, massed.mean) == (0.25, 0.5, pytest.approx(1.25))
    assert summarize_weights(named_method("cov-grpo").weight, weight, mask).saturation_low is None
    assert math.isnan(summarize_weights(SigmoidWeight(), weight, torch.zeros_like(mask)).mean)


@pytest.mark.parametrize("seed", range(5))
def test_weighted_percentiles_against_brute_force(seed: int):
    """The smallest value with at least q % of the mass at or below it; with equal masses, of the sorted values."""
    g = torch.Generator().manual_seed(seed)
    value = torch.randint(0, 12, (4, 9), generator=g).double()  # ties
    mass = torch.rand(4, 9, generator=g, dtype=torch.float64) * (torch.rand(4, 9, generator=g) < 0.7)
    mask = torch.rand(4, 9, generator=g) < 0.8
    value[~mask] = torch.nan
    inside, masses = value[mask].tolist(), mass[mask].tolist()
    for q in (0.5, 10, 37, 50, 90, 100):
        assert percentile(value, mask, q, mass) == oracle.mass_percentile(inside, masses, q / 100)
        repeated = np.percentile(inside, q, method="inverted_cdf")
        assert percentile(value, mask, q, torch.full_like(mass, 0.25)) == repeated
