"""Constants of a weighting: published, or measured on the first step."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from pydantic import ValidationError

from sharpscope.config.token_weights import (
    ConstantWeight,
    EntropyWeight,
    LinearWeight,
    PolarityWeight,
    ReverseWeight,
    ShuffledWeight,
    SigmoidWeight,
)
from sharpscope.errors import UserError
from sharpscope.objective import (
    StepTensors,
    TokenWeight,
    calibrate,
    named_method,
    summarize_weights,
    token_weights,
)
from tests.objective.data import make_case, step_of, weights_of
from tests.oracles import objective as oracle

PAPER = SigmoidWeight(preset="paper")


def test_published_constants_cover_their_range_for_logits_from_9_9_to_26_5():
    assert weights_of(PAPER, step_of(logit=[-50.0, 9.88, 13.9, 26.5, 400.0])) == pytest.approx(
        [1.0, 1.0, 2 * (1 / (1 + math.exp(-13.9 / 9)) - 0.25), 1.4, 1.4], abs=2e-3
    )
    assert weights_of(PAPER, step_of(logit=[9.87]))[0] == 1.0
    assert weights_of(PAPER, step_of(logit=[9.9]))[0] > 1.0
    assert weights_of(PAPER, step_of(logit=[26.4]))[0] < 1.4


def test_calibration_puts_the_percentiles_on_the_bounds():
    case = make_case(named_method("grpo-sg"), 1)
    u = case.step.logit[case.mask]
    u10, u90 = (torch.quantile(u, q) for q in (0.1, 0.9))
    found = calibrate(SigmoidWeight(), case.step)
    assert found.preset == "calibrated"
    assert found.tau == pytest.approx(float(u90 - u10) / 1.846, rel=1e-3)
    assert found.u0 == pytest.approx(float(u10) - 1.099 * found.tau, rel=1e-3)
    assert (found.alpha, found.mu, found.L, found.U) == (2.0, 0.25, 1.0, 1.4)
    ends = StepTensors.from_columns(logit=torch.stack([u10, u90]))
    assert token_weights(found, ends).flatten().tolist() == pytest.approx([1.0, 1.4], abs=1e-12)
    assert calibrate(found, case.step) is not None
    assert calibrate(found, case.step.rows(slice(0, 3))) == found
    summary = summarize_weights(found, token_weights(found, case.step), case.mask)
    assert summary.saturation_low == pytest.approx(0.1, abs=0.05)
    assert summary.saturation_high == pytest.approx(0.1, abs=0.05)
    assert summary.warning is None


def test_calibration_with_other_bounds_still_lands_on_them():
    case = make_case(named_method("grpo-sg"), 2)
    found = calibrate(SigmoidWeight(preset="calibrated", L=0.5, U=1.2, alpha=1.8, input="logp"), case.step)
    u = torch.quantile(case.step.logp[case.mask], torch.tensor([0.1, 0.9], dtype=torch.float64))
    raw = 1.8 * (torch.sigmoid((u - found.u0) / found.tau) - 0.25)
    assert raw.tolist() == pytest.approx([0.5, 1.2], abs=1e-12)


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
    if (low, high) == (1.0, 1.4):
        assert (found.alpha, found.mu) == (2.0, 0.25)
    weight = token_weights(found, case.step)[case.mask]
    assert float(weight.min()) >= low
    assert float(weight.max()) <= high


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
        "input": "logit",
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


def test_only_unfilled_constants_need_a_calibration():
    method = named_method("grpo-sg")
    assert method.weight.needs_calibration
    assert named_method("papo").weight.needs_calibration
    assert named_method("grpo-sg-mean-one").weight.needs_calibration
    assert not named_method("ar").weight.needs_calibration
    filled = calibrate(method.weight, make_case(method).step)
    assert not method.model_copy(update={"weight": filled}).weight.needs_calibration


def test_a_preset_is_replaced_inside_controls_and_only_where_it_stands():
    assert ReverseWeight(of=SigmoidWeight()).with_preset("auto", "paper") == ReverseWeight(of=PAPER)
    assert SigmoidWeight(preset="calibrated").with_preset("auto", "paper").preset == "calibrated"
    assert LinearWeight().with_preset("auto", "paper") == LinearWeight()
    with pytest.raises(ValidationError, match="preset"):
        SigmoidWeight().with_preset("auto", "published")


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
