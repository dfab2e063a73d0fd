"""Advantages, normalisers, ratios, clip flags, selections and summaries by value."""

from __future__ import annotations

import pytest
import torch

from sharpscope.config.method import (
    CispoClip,
    KlCovPenalty,
    PpoClip,
)
from sharpscope.objective import (
    gradient_killed,
    k3,
    named_method,
    policy_loss,
    prepare,
    token_normalizer,
)
from sharpscope.objective.loss import clipped_objective
from tests.objective.data import LIMIT, as_batch, make_case, tokens_step
from tests.oracles import objective as oracle

RATIO = torch.tensor([[0.5, 0.5, 0.79, 1.0, 1.21, 1.5, 1.5, 1.5]])


ADVANTAGE = torch.tensor([[1.0, -1.0, -1.0, 1.0, 1.0, 1.0, -1.0, 0.0]])


def test_ppo_flags_are_where_the_gradient_is_gone():
    ratio = RATIO.clone().requires_grad_()
    objective, flags = clipped_objective(PpoClip(), ratio, ADVANTAGE, torch.zeros_like(RATIO))
    assert flags.tolist() == [[0, -1, -1, 0, 1, 1, 0, 0]]
    gradient = torch.autograd.grad(objective.sum(), ratio)[0]
    assert torch.equal((gradient == 0) & (ADVANTAGE != 0), flags != 0)
    assert objective.tolist() == [pytest.approx([0.5, -0.8, -0.8, 1.0, 1.2, 1.2, -1.5, 0.0])]
    assert torch.equal(gradient_killed(PpoClip(), RATIO, ADVANTAGE), flags)


def test_cispo_bounds_the_coefficient_and_keeps_the_gradient():
    logp = torch.full_like(RATIO, -2.0).requires_grad_()
    objective, flags = clipped_objective(CispoClip(low=0.3, high=0.2), RATIO, ADVANTAGE, logp)
    assert flags.tolist() == [[-1, -1, 0, 0, 1, 1, 1, 0]]
    gradient = torch.autograd.grad(objective.sum(), logp)[0]
    torch.testing.assert_close(gradient, RATIO.clamp(0.7, 1.2) * ADVANTAGE)


def test_loss_output_reports_ratio_flags_and_kl():
    case = make_case(named_method("grpo"), 1)
    method = named_method("grpo").model_copy(update={"kl": named_method("grpo").kl.model_copy(update={"coef": 0.1})})
    plan = prepare(method, case.step)
    normalizer = token_normalizer(method, case.mask, LIMIT, dtype=torch.float64)
    out = policy_loss(method, plan, case.now, normalizer, reference_logp=case.reference)
    batch = as_batch(case)
    for i, t in batch.tokens():
        ratio, a = oracle.ratio(batch, i, t).value, plan.advantage[i, t]
        assert float(out.ratio[i, t]) == pytest.approx(ratio, rel=1e-12)
        assert int(out.clipped[i, t]) == (1 if ratio > 1.2 and a > 0 else -1 if ratio < 0.8 and a < 0 else 0)
        assert float(out.kl[i, t]) == pytest.approx(oracle.k3(batch, i, t).value, abs=1e-12)
    assert out.clipped.dtype == torch.int8
    assert {-1, 0, 1} == set(out.clipped.flatten().tolist())
    outside = ~case.mask
    assert out.ratio[outside].unique().tolist() == [1.0]
    assert not out.kl[outside].any()
    assert not out.clipped[outside].any()
    beside = 0.1 * float((out.kl * normalizer).sum())
    assert float(out.loss) == pytest.approx(float(out.surrogate) + beside, abs=1e-12)


def test_k3_is_zero_between_equal_policies_and_keeps_small_differences():
    logp = torch.tensor([-1.0, -1.0], dtype=torch.float64)
    assert k3(logp, logp).tolist() == [0.0, 0.0]
    assert float(k3(logp, logp + 1e-7)[0]) == pytest.approx(5e-15, rel=1e-2)


def test_missing_log_probabilities_and_wrong_shapes_are_refused():
    case = make_case(named_method("grpo"), 0)
    normalizer = token_normalizer(named_method("grpo"), case.mask, LIMIT)
    for name, update, message in (
        ("grpo", {"kl": named_method("grpo").kl.model_copy(update={"coef": 0.1})}, "reference_logp"),
        ("ppo-ewma", {}, "proximal_logp"),
    ):
        method = named_method(name).model_copy(update=update)
        with pytest.raises(ValueError, match=message):
            policy_loss(method, prepare(method, case.step), case.now, normalizer)
    method = named_method("grpo")
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
    most = method.model_copy(update={"penalty": KlCovPenalty(share=0.75, coef=0.5)})
    assert prepare(most, step).penalty.flatten().tolist() == [0.5] * 4
