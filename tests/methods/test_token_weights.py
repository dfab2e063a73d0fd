"""Weights by value: curves, calibration, a user's own shaping, and what is said when one is off."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from sharpscope import weight_bounds
from sharpscope.errors import UserError
from sharpscope.methods import Method, TokenWeight, named_method
from sharpscope.methods.loss import gradient_mass, policy_loss, token_normalizer
from sharpscope.methods.plan import (
    StepTensors,
    calibrate,
    prepare,
    summarize_weights,
    token_weights,
)
from sharpscope.methods.token_weights import (
    ConstantWeight,
    CustomWeight,
    EntropyWeight,
    LinearWeight,
    PolarityWeight,
    PowerWeight,
    ReverseWeight,
    ShuffledWeight,
    SigmoidWeight,
    drawn,
)
from sharpscope.settings import Schedule
from tests.methods.data import make_case, step_of, weights_of
from tests.oracles import objective as oracle


def test_other_curves():
    assert weights_of(
        LinearWeight(alpha=0.2), step_of(logp=[0.0, math.log(0.5), -800.0])
    ) == pytest.approx([1.0, 0.9, 0.8])
    assert weights_of(PowerWeight(gamma=0.5), step_of(logp=[0.0, math.log(0.25)])) == pytest.approx(
        [1.0, 0.5]
    )
    entropy = weights_of(EntropyWeight(tau=1.0, u0=-2.0), step_of(entropy=[0.3]))
    assert entropy == pytest.approx([2 * (1 / (1 + math.exp(-1.7)) - 0.25)])


@pytest.mark.parametrize(
    "inner", [LinearWeight(alpha=0.9), ReverseWeight(of=LinearWeight(alpha=0.9))]
)
def test_shuffled_weights_keep_the_mean_over_the_gradient(inner: TokenWeight):
    for seed in range(3):
        case = make_case(named_method("grpo"), seed)
        means = []
        for weighting in (inner, ShuffledWeight(of=inner, matched="gradient")):
            weight = token_weights(weighting, case.step, torch.Generator().manual_seed(seed))
            cells = torch.nonzero(case.mask).tolist()
            total = sum(float(case.step.gradient_mass[i, t]) for i, t in cells)
            means.append(
                sum(float(case.step.gradient_mass[i, t]) * float(weight[i, t]) for i, t in cells)
                / total
            )
        assert means[1] == pytest.approx(means[0], rel=1e-12)


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
    loss = policy_loss(
        method, plan, logp, token_normalizer(method, case.mask, 9, dtype=torch.float64)
    ).loss
    (slope,) = torch.autograd.grad(loss, z)
    wanted = slope.norm(dim=-1)[case.mask]
    p = z.detach().softmax(-1)
    norm = (p - torch.nn.functional.one_hot(y[..., 0], 7)).norm(dim=-1)
    found = gradient_mass(method, case.step.mask, case.step.advantage, norm)
    assert not found[~case.mask].any()
    torch.testing.assert_close(
        found[case.mask] / found.sum(), wanted / wanted.sum(), rtol=1e-10, atol=1e-15
    )


def test_a_schedule_anneals_a_constant():
    ramp = LinearWeight(alpha=Schedule(start=0.0, end=1.0))
    half = [
        weights_of(ramp, step_of(progress=p, logp=[math.log(0.5)]))[0] for p in (0.0, 0.25, 1.0)
    ]
    assert half == pytest.approx([1.0, 0.875, 0.5])
    assert named_method("grpo").at(0.5) is named_method("grpo")
    assert Method(name="x", weight=ShuffledWeight(of=ramp)).at(0.5).weight.of.alpha == 0.5
    with pytest.raises(ValidationError):
        Method(name="x", weight=LinearWeight(alpha=Schedule(start=0.0, end=1.5)))


# -- Constants of a weighting: published, or measured on the first step


@pytest.mark.parametrize("percentiles", ["tokens", "gradient"])
@pytest.mark.parametrize(("low", "high"), [(1.0, 4.0), (0.0, 1.0), (1.0, 1.01), (1.0, 1.4)])
def test_alpha_and_mu_follow_the_range(percentiles: str, low: float, high: float):
    case = make_case(named_method("grpo-sg"), 2)
    found = calibrate(SigmoidWeight(percentiles=percentiles, L=low, U=high), case.step)
    inside = case.step.logit[case.mask].tolist()
    mass = case.step.gradient_mass[case.mask].tolist()
    if percentiles == "tokens":
        ends = torch.quantile(
            torch.tensor(inside, dtype=torch.float64), torch.tensor([0.1, 0.9], dtype=torch.float64)
        )
    else:
        ends = torch.tensor(
            [oracle.mass_percentile(inside, mass, q) for q in (0.1, 0.9)], dtype=torch.float64
        )
    raw = found.alpha * (torch.sigmoid((ends - found.u0) / found.tau) - found.mu)
    assert raw.tolist() == pytest.approx([low, high], abs=1e-12)
    # the same part of the sigmoid as published, from 0.75 to 0.95
    assert [low / found.alpha + found.mu, high / found.alpha + found.mu] == pytest.approx(
        [0.75, 0.95], abs=1e-12
    )
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


def test_calibration_over_the_gradient_needs_one():
    step = step_of(logit=[1.0, 2.0])
    with pytest.raises(ValueError, match="needs gradient_mass"):
        calibrate(SigmoidWeight(percentiles="gradient"), step)
    weight = ReverseWeight(of=SigmoidWeight(percentiles="gradient"))
    assert weight.needs_gradient
    with pytest.raises(UserError, match="no token of the first step counts"):
        calibrate(weight, replace(step, gradient_mass=torch.zeros(2, 1)))
    assert not SigmoidWeight(percentiles="gradient", preset="paper").needs_gradient
    assert not ConstantWeight(of=SigmoidWeight(), matched="gradient").needs_gradient


def test_explicit_constants_override_the_preset_and_presets_fill_the_rest():
    case = make_case(named_method("grpo-sg"), 3)
    paper = calibrate(SigmoidWeight(preset="paper", tau=4.0), case.step)
    constants = {"alpha": 2.0, "tau": 4.0, "mu": 0.25, "L": 1.0, "U": 1.4, "u0": 0.0}
    assert paper == SigmoidWeight(preset="paper", **constants)
    kept = calibrate(SigmoidWeight(tau=3.0), case.step)
    assert kept.tau == 3.0
    u10 = float(torch.quantile(case.step.logit[case.mask], 0.1))
    assert kept.u0 == pytest.approx(u10 - math.log(3) * 3.0)
    inside = calibrate(
        ShuffledWeight(of=ReverseWeight(of=SigmoidWeight(u0=1.0, tau=2.0))), case.step
    )
    assert inside.of.of == SigmoidWeight(
        preset="calibrated", alpha=2.0, tau=2.0, mu=0.25, L=1.0, U=1.4, u0=1.0
    )
    entropy = calibrate(EntropyWeight(), case.step)
    u = torch.quantile(-case.step.entropy[case.mask], torch.tensor([0.1, 0.9], dtype=torch.float64))
    assert (2 * (torch.sigmoid((u - entropy.u0) / entropy.tau) - 0.25)).tolist() == pytest.approx(
        [1.0, 1.4]
    )
    polarity = calibrate(PolarityWeight(), case.step)
    assert polarity.target == pytest.approx(float(case.step.entropy[case.mask].mean()))


@pytest.mark.parametrize(
    ("shaping", "step", "message"),
    [
        (SigmoidWeight(), step_of(logit=[5.0, 5.0, 5.0]), "nothing to calibrate on"),
        (SigmoidWeight(alpha=1.0), step_of(logit=[1.0, 2.0]), "out of the sigmoid's reach"),
        (PolarityWeight(), step_of(entropy=[0.0, 0.0]), "set the target"),
    ],
)
def test_calibration_says_what_is_wrong(shaping: TokenWeight, step: StepTensors, message: str):
    with pytest.raises(UserError, match=message):
        calibrate(shaping, step)


def test_what_is_missing_is_refused():
    for weight, step, what in (
        (SigmoidWeight(), step_of(logit=[1.0, 2.0]), "calibrate"),
        (ShuffledWeight(of=LinearWeight()), step_of(logp=[-1.0]), "generator"),
    ):
        with pytest.raises(ValueError, match=what):
            token_weights(weight, step)


@weight_bounds(0.5, 1.0)
def gentle(step: StepTensors, power: float = 0.5) -> torch.Tensor:
    """0.5 + π^power/2."""
    return 0.5 + (power * step.logp).exp() / 2


def test_a_function_works_and_keeps_what_it_declares():
    weight = CustomWeight(function=f"{__name__}:gentle", arguments={"power": 1.0})
    assert weights_of(weight, step_of(logp=[0.0, math.log(0.5)])) == pytest.approx([1.0, 0.75])
    assert weight.bounds == (0.5, 1.0)
    assert weights_of(ReverseWeight(of=weight), step_of(logp=[0.0])) == pytest.approx([0.5])
    with pytest.raises(UserError, match="0 <= low < high"):
        weight_bounds(2.0, 1.0)
    logp = torch.tensor([[-1.0]], dtype=torch.float64, requires_grad=True)
    step = step_of(logp=[-1.0])
    assert not token_weights(weight, type(step)(**(vars(step) | {"logp": logp}))).requires_grad


BAD = {
    "shape": (
        lambda step: step.logp[:, 0],
        r"of shape \(2,\) and type torch.float64; it must be a float tensor \(N, T\) = \(2, 1\)",
    ),
    "sign": (lambda step: step.logp, "negative weights"),
    "nan": (lambda step: step.logp * torch.nan, "not finite"),
    "integer": (
        lambda step: torch.ones(2, 1, dtype=torch.long),
        "torch.int64; it must be a float tensor",
    ),
    "type": (lambda step: 1.0, "returned float of shape"),
    "bounds": (
        lambda step: step.logp * 0 + 7.0,
        r"declares weights in \[0.0, 1.0\] but returned \[7, 7\]",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_a_function_that_is_wrong_is_named_with_the_reason(
    what: str, monkeypatch: pytest.MonkeyPatch
):
    function, message = BAD[what]
    function = weight_bounds(0.0, 1.0)(function) if what == "bounds" else function
    monkeypatch.setattr(sys.modules[__name__], "bad", function, raising=False)
    with pytest.raises(UserError, match=message) as error:
        token_weights(CustomWeight(function=f"{__name__}:bad"), step_of(logp=[-1.0, -2.0]))
    assert "\n" not in str(error.value) and f"{__name__}:bad" in str(error.value)


def test_a_function_that_raises_is_named_with_file_and_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The last line of the user's own file, also where torch raises deeper."""
    (tmp_path / "raising.py").write_text(
        "def low(step):\n    return step.nothing\n\n\ndef deep(step):\n"
        "    x = step.logp\n    return x.reshape(\n        7, 7)\n"
    )
    (tmp_path / "broken.py").write_text("x = 1\ny = x / 0\n")
    monkeypatch.chdir(tmp_path)
    for name, line, what in (("low", 2, "AttributeError"), ("deep", 7, "RuntimeError")):
        with pytest.raises(UserError) as error:
            token_weights(CustomWeight(function=f"raising.py:{name}"), step_of(logp=[-1.0, -2.0]))
        assert f"raising:{name}" in str(error.value) and "\n" not in str(error.value)
        assert f"raising.py, line {line})" in str(error.value) and what in str(error.value)
    with pytest.raises(UserError, match=r"ZeroDivisionError: .*broken\.py, line 2\)"):
        named_method("broken:f")
