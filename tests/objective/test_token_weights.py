"""Weights by value: curves, calibration, a user's own shaping, and what is said when one is off."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import get_args

import pytest
import torch
from pydantic import ValidationError

from sharpscope.config import Schedule
from sharpscope.config.token_weights import (
    ConstantWeight,
    CovarianceGaussianWeight,
    CustomWeight,
    EntropyAdvantageWeight,
    EntropyWeight,
    LinearWeight,
    MeanOneWeight,
    PepoWeight,
    PolarityWeight,
    PowerWeight,
    ReverseWeight,
    ShuffledWeight,
    SigmoidWeight,
    StareWeight,
    UniformWeight,
    drawn,
)
from sharpscope.errors import UserError
from sharpscope.objective import (
    StepTensors,
    TokenWeight,
    calibrate,
    gradient_mass,
    named_method,
    policy_loss,
    prepare,
    summarize_weights,
    token_normalizer,
    token_weights,
)
from tests.objective.data import make_case, step_of, weights_of
from tests.oracles import objective as oracle


def test_other_curves():
    assert weights_of(LinearWeight(alpha=0.2), step_of(logp=[0.0, math.log(0.5), -800.0])) == pytest.approx(
        [1.0, 0.9, 0.8]
    )
    assert weights_of(PowerWeight(gamma=0.5), step_of(logp=[0.0, math.log(0.25)])) == pytest.approx([1.0, 0.5])
    entropy = weights_of(EntropyWeight(tau=1.0, u0=-2.0), step_of(entropy=[0.3]))
    assert entropy == pytest.approx([2 * (1 / (1 + math.exp(-1.7)) - 0.25)])


@pytest.mark.parametrize(("mean_entropy", "phase"), [(1.0, 0.5), (2.0, 0.0), (3.0, -0.5), (9.0, -1.0)])
def test_polarity_weighs_what_moves_the_entropy_to_the_target(mean_entropy: float, phase: float):
    step = step_of(entropy=[mean_entropy] * 3, polarity=[0.7, -0.2, 0.0])  # A = 1: ΔH = −0.7, +0.2, 0
    shaping = PolarityWeight(alpha=0.4, target=2.0)
    assert weights_of(shaping, step) == pytest.approx([1 - 0.4 * phase, 1 + 0.4 * phase, 1.0])


def test_a_schedule_of_a_bound_needs_alpha():
    with pytest.raises(ValidationError, match="set alpha"):
        SigmoidWeight(U=Schedule(start=1.4, end=4.0))
    assert SigmoidWeight(U=Schedule(start=1.4, end=4.0), alpha=8.0).constants()["mu"] == 0.25


@pytest.mark.parametrize("inner", [LinearWeight(alpha=0.9), ReverseWeight(of=LinearWeight(alpha=0.9))])
def test_shuffled_weights_keep_the_mean_over_the_gradient(inner: TokenWeight):
    for seed in range(3):
        case = make_case(named_method("grpo"), seed)
        means = []
        for weighting in (inner, ShuffledWeight(of=inner, matched="gradient")):
            weight = token_weights(weighting, case.step, torch.Generator().manual_seed(seed))
            cells = torch.nonzero(case.mask).tolist()
            total = sum(float(case.step.gradient_mass[i, t]) for i, t in cells)
            means.append(sum(float(case.step.gradient_mass[i, t]) * float(weight[i, t]) for i, t in cells) / total)
        assert means[1] == pytest.approx(means[0], rel=1e-12)


def test_without_a_gradient_all_tokens_count_alike():
    case = make_case(named_method("grpo"), 0)
    flat, inner = replace(case.step, gradient_mass=torch.zeros_like(case.step.gradient_mass)), LinearWeight(alpha=0.9)
    constant = token_weights(ConstantWeight(of=inner, matched="gradient"), flat)[case.mask]
    assert constant.tolist() == pytest.approx([float(token_weights(inner, flat)[case.mask].mean())] * len(constant))


def test_drawn_weights_have_the_distribution_that_the_gradient_has():
    """A row of three tokens with shares 0.2, 0, 0.8, one loss token apart from it, and a row without gradient."""
    n = 20_000
    weight = torch.tensor([[1.0, 2.0, 3.0, 9.0]]).repeat(n, 1)
    mask = torch.tensor([[True, True, True, False]]).repeat(n, 1)
    mass = torch.tensor([[0.5, 0.0, 2.0, 7.0]]).repeat(n, 1)
    mass[n // 2 :] = 0.0
    key = torch.rand(mask.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    got = drawn(weight, mask, mass, key, torch)[mask].reshape(n, 3)
    share = [float((got[: n // 2] == value).double().mean()) for value in (1.0, 2.0, 3.0, 9.0)]
    assert share == pytest.approx([0.2, 0.0, 0.8, 0.0], abs=0.01)  # standard error 0.0023
    alike = [float((got[n // 2 :] == value).double().mean()) for value in (1.0, 2.0, 3.0, 9.0)]
    assert alike == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0.0], abs=0.012)


@pytest.mark.parametrize("aggregate", ["sequence_mean", "token_mean", "constant", "sequence_sum"])
def test_gradient_mass_is_the_coefficient_times_the_logit_gradient(aggregate: str):
    """Against ∂L/∂z by autograd through a softmax, for GRPO's loss at ratio 1; up to one factor for all tokens."""
    method = named_method("grpo").model_copy(update={"aggregate": aggregate})
    case = make_case(method, 4, garbage=False)
    g = torch.Generator().manual_seed(4)
    z = torch.randn(*case.mask.shape, 7, generator=g, dtype=torch.float64, requires_grad=True)
    y = torch.randint(0, 7, (*case.mask.shape, 1), generator=g)
    logp = z.log_softmax(-1).gather(-1, y)[..., 0]
    plan = replace(prepare(method, case.step), behavior_logp=logp.detach())
    loss = policy_loss(method, plan, logp, token_normalizer(method, case.mask, 9, dtype=torch.float64)).loss
    (slope,) = torch.autograd.grad(loss, z)
    wanted = slope.norm(dim=-1)[case.mask]
    p = z.detach().softmax(-1)
    norm = (p - torch.nn.functional.one_hot(y[..., 0], 7)).norm(dim=-1)
    found = gradient_mass(method, case.step.mask, case.step.advantage, norm)
    assert not found[~case.mask].any()
    torch.testing.assert_close(found[case.mask] / found.sum(), wanted / wanted.sum(), rtol=1e-10, atol=1e-15)


def test_a_schedule_anneals_a_constant():
    ramp = LinearWeight(alpha=Schedule(start=0.0, end=1.0))
    half = [weights_of(ramp, step_of(progress=p, logp=[math.log(0.5)]))[0] for p in (0.0, 0.25, 1.0)]
    assert half == pytest.approx([1.0, 0.875, 0.5])
    sharpening = SigmoidWeight(preset="paper", tau=Schedule(start=9.0, end=3.0))
    assert weights_of(sharpening, step_of(progress=1.0, logit=[5.0])) == weights_of(
        SigmoidWeight(preset="paper", tau=3.0), step_of(logit=[5.0])
    )


def test_bounds_are_known_of_every_kind():
    inner = LinearWeight()
    expected = {
        UniformWeight(): None,
        SigmoidWeight(): (1.0, 1.4),
        EntropyWeight(): (1.0, 1.4),
        inner: (0.8, 1.0),
        PowerWeight(): (0.0, 1.0),
        CovarianceGaussianWeight(): None,
        PolarityWeight(): None,
        StareWeight(): (1.0, 1.1),
        PepoWeight(): None,
        EntropyAdvantageWeight(): None,
        ReverseWeight(of=inner): (0.8, 1.0),
        ShuffledWeight(of=inner): (0.8, 1.0),
        ConstantWeight(of=inner): None,
        MeanOneWeight(of=inner): None,
    }
    assert {type(weight) for weight in expected} | {CustomWeight} == set(get_args(get_args(TokenWeight)[0]))
    assert {weight: weight.bounds for weight in expected} == expected


# -- Constants of a weighting: published, or measured on the first step

PAPER = SigmoidWeight(preset="paper")


def test_published_constants_cover_their_range_for_logits_from_9_9_to_26_5():
    assert weights_of(PAPER, step_of(logit=[-50.0, 9.88, 13.9, 26.5, 400.0])) == pytest.approx(
        [1.0, 1.0, 2 * (1 / (1 + math.exp(-13.9 / 9)) - 0.25), 1.4, 1.4], abs=2e-3
    )
    assert weights_of(PAPER, step_of(logit=[9.87]))[0] == 1.0
    assert weights_of(PAPER, step_of(logit=[9.9]))[0] > 1.0
    assert weights_of(PAPER, step_of(logit=[26.4]))[0] < 1.4


@pytest.mark.parametrize("percentiles", ["tokens", "gradient"])
@pytest.mark.parametrize(("low", "high"), [(1.0, 4.0), (0.0, 1.0), (1.0, 1.01), (1.0, 1.4)])
def test_alpha_and_mu_follow_the_range(percentiles: str, low: float, high: float):
    case = make_case(named_method("grpo-sg"), 2)
    found = calibrate(SigmoidWeight(percentiles=percentiles, L=low, U=high), case.step)
    inside = case.step.logit[case.mask].tolist()
    mass = case.step.gradient_mass[case.mask].tolist()
    if percentiles == "tokens":
        ends = torch.quantile(torch.tensor(inside, dtype=torch.float64), torch.tensor([0.1, 0.9], dtype=torch.float64))
    else:
        ends = torch.tensor([oracle.mass_percentile(inside, mass, q) for q in (0.1, 0.9)], dtype=torch.float64)
    raw = found.alpha * (torch.sigmoid((ends - found.u0) / found.tau) - found.mu)
    assert raw.tolist() == pytest.approx([low, high], abs=1e-12)
    # the same part of the sigmoid as published, from 0.75 to 0.95
    assert [low / found.alpha + found.mu, high / found.alpha + found.mu] == pytest.approx([0.75, 0.95], abs=1e-12)
    assert found.preset == "calibrated" and calibrate(found, case.step.rows(slice(0, 3))) == found
    if (low, high) == (1.0, 1.4):
        assert (found.alpha, found.mu) == (2.0, 0.25)
        assert found.tau == pytest.approx(float(ends[1] - ends[0]) / 1.846, rel=1e-3)
        assert found.u0 == pytest.approx(float(ends[0]) - 1.099 * found.tau, abs=1e-3 * found.tau)
    weight = token_weights(found, case.step)
    assert low <= float(weight[case.mask].min()) and float(weight[case.mask].max()) <= high
    mass = None if percentiles == "tokens" else case.step.gradient_mass
    summary = summarize_weights(found, weight, case.mask, mass=mass)
    assert (summary.saturation_low, summary.saturation_high) == pytest.approx((0.1, 0.1), abs=0.1)


def test_the_published_location_takes_another_range_too():
    wide = calibrate(SigmoidWeight(preset="paper", U=4.0), make_case(named_method("grpo-sg"), 2).step)
    assert (wide.tau, wide.u0, wide.alpha, wide.mu) == (9.0, 0.0, pytest.approx(15.0), pytest.approx(0.75 - 1 / 15))
    ends = step_of(logit=[9 * math.log(3), 9 * math.log(19)])  # sigmoid 0.75 and 0.95
    assert weights_of(wide, ends) == pytest.approx([1.0, 4.0])
    assert weights_of(ReverseWeight(of=wide), ends) == pytest.approx([4.0, 1.0])


def test_calibration_over_the_gradient_needs_one():
    step = step_of(logit=[1.0, 2.0])
    with pytest.raises(ValueError, match="needs gradient_mass"):
        calibrate(SigmoidWeight(percentiles="gradient"), step)
    weight = ReverseWeight(of=SigmoidWeight(percentiles="gradient"))
    assert weight.needs_gradient
    with pytest.raises(UserError, match="no token of the first step carries a gradient"):
        calibrate(weight, replace(step, gradient_mass=torch.zeros(2, 1)))
    assert not SigmoidWeight(percentiles="gradient", preset="paper").needs_gradient
    assert not ConstantWeight(of=SigmoidWeight(), matched="gradient").needs_gradient


def test_explicit_constants_override_the_preset_and_presets_fill_the_rest():
    case = make_case(named_method("grpo-sg"), 3)
    paper = calibrate(SigmoidWeight(preset="paper", tau=4.0), case.step)
    assert paper.model_dump() == {
        "kind": "sigmoid",
        "preset": "paper",
        "percentiles": "tokens",
        "alpha": 2.0,
        "tau": 4.0,
        "mu": 0.25,
        "L": 1.0,
        "U": 1.4,
        "u0": 0.0,
    }
    kept = calibrate(SigmoidWeight(tau=3.0), case.step)
    assert kept.tau == 3.0
    u10 = float(torch.quantile(case.step.logit[case.mask], 0.1))
    assert kept.u0 == pytest.approx(u10 - math.log(3) * 3.0)
    inside = calibrate(ShuffledWeight(of=ReverseWeight(of=SigmoidWeight(u0=1.0, tau=2.0))), case.step)
    assert inside.of.of == SigmoidWeight(preset="calibrated", alpha=2.0, tau=2.0, mu=0.25, L=1.0, U=1.4, u0=1.0)
    entropy = calibrate(EntropyWeight(), case.step)
    u = torch.quantile(-case.step.entropy[case.mask], torch.tensor([0.1, 0.9], dtype=torch.float64))
    assert (2 * (torch.sigmoid((u - entropy.u0) / entropy.tau) - 0.25)).tolist() == pytest.approx([1.0, 1.4])
    polarity = calibrate(PolarityWeight(), case.step)
    assert polarity.target == pytest.approx(float(case.step.entropy[case.mask].mean()))


@pytest.mark.parametrize(
    ("shaping", "step", "message"),
    [
        (SigmoidWeight(), step_of(logit=[5.0, 5.0, 5.0]), "nothing to calibrate on"),
        (SigmoidWeight(alpha=1.0), step_of(logit=[1.0, 2.0]), "out of the sigmoid's reach"),
        (PolarityWeight(), step_of(entropy=[0.0, 0.0]), "set the target"),
        (SigmoidWeight(), step_of(logp=[-1.0, -2.0]), "nothing to calibrate on"),
    ],
)
def test_calibration_says_what_is_wrong(shaping: TokenWeight, step: StepTensors, message: str):
    with pytest.raises(UserError, match=message):
        calibrate(shaping, step)


def test_an_uncalibrated_shaping_is_refused():
    with pytest.raises(ValueError, match="calibrate"):
        token_weights(SigmoidWeight(), step_of(logit=[1.0, 2.0]))
    with pytest.raises(ValueError, match="calibrate"):
        token_weights(PolarityWeight(), step_of(entropy=[1.0], polarity=[1.0]))
    with pytest.raises(ValueError, match="generator"):
        token_weights(ShuffledWeight(of=LinearWeight()), step_of(logp=[-1.0]))
