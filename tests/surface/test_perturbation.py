"""Sharpness by perturbation against closed forms, and its limits: zero weights, zero gradients, tiny steps."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import sharpscope
from sharpscope.errors import UserError
from sharpscope.surface import Objective, lm_surface, problems
from sharpscope.surface.language_model import token_batch
from sharpscope.surface.perturbation import average_sharpness, cross_fitted, find_radius
from sharpscope.surface.surface import Surface, moved
from tests.models import sloped, small_model, with_spectrum


def quadratic(values, gradient):
    """A quadratic of this spectrum and gradient, away from zero weights: θ, the loss, H, g."""
    matrix, slope = with_spectrum(values), torch.tensor(gradient, dtype=torch.float64)
    theta, loss = sloped(
        matrix, slope, torch.linspace(-1, 2, len(values), dtype=torch.float64) + 0.05
    )
    return theta, loss, matrix, slope


SPECTRA = {
    "convex": [4.0, 2.0, 1.0, 0.5, 0.1, 0.0],
    "indefinite": [3.0, 1.0, -0.5, -2.0, 0.0, 0.2],
    "concave": [-1.0, -2.0, -0.5, -3.0, -0.2, -1.5],
}
GRADIENT = [0.3, -0.2, 0.5, 0.1, 0.05, -0.4]


@pytest.mark.parametrize("name", SPECTRA)
@pytest.mark.parametrize("rho", [0.1, 5.0])
def test_one_step_is_its_closed_form(name, rho):
    theta, loss, matrix, slope = quadratic(SPECTRA[name], GRADIENT)
    step = rho * slope / slope.norm()
    one = sharpscope.sharpness(loss, [theta], rho, "sam")
    assert one.value == pytest.approx(float(slope @ step + 0.5 * step @ matrix @ step), rel=1e-9)
    assert one.first_order == pytest.approx(rho * float(slope.norm()))
    assert one.gradient_norm == pytest.approx(float(slope.norm()))
    assert one.loss == pytest.approx(2) and not one.why


def two_layers(scale: float = 1.0):
    generator = torch.Generator().manual_seed(0)
    first = (torch.randn(5, 4, generator=generator, dtype=torch.float64) * scale).requires_grad_()
    second = (torch.randn(3, 5, generator=generator, dtype=torch.float64) / scale).requires_grad_()
    x, y = (torch.randn(6, size, generator=generator, dtype=torch.float64) for size in (4, 3))
    return [first, second], lambda: (x @ first.T @ second.T - y).square().mean()


def test_asam_is_invariant_under_rescaling_consecutive_layers_and_sam_is_not():
    def value(scale, kind):
        parameters, loss = two_layers(scale)
        return sharpscope.sharpness(loss, parameters, 0.1, kind).value

    assert value(7.0, "asam") == pytest.approx(value(1.0, "asam"), rel=1e-6)
    assert value(7.0, "sam") != pytest.approx(value(1.0, "sam"), rel=0.1)


def test_asam_follows_its_closed_form_and_exactly_zero_weights_are_the_limit_of_small_ones():
    theta, loss, matrix, slope = quadratic(SPECTRA["indefinite"], GRADIENT)
    scale = theta.detach().abs()
    step = 0.7 * scale**2 * slope / (scale * slope).norm()
    found = sharpscope.sharpness(loss, [theta], 0.7, "asam")
    assert found.value == pytest.approx(float(slope @ step + 0.5 * step @ matrix @ step), rel=1e-9)

    def value(small):
        parameters, loss = two_layers()
        with torch.no_grad():
            parameters[0][2], parameters[1][:, 1] = small, -small
        return sharpscope.sharpness(loss, parameters, 0.2, "asam").value

    assert value(0.0) == pytest.approx(value(1e-9), rel=1e-6)


def test_bfloat16_weights_are_perturbed_in_float32_and_come_back_bitwise():
    weight = (
        torch.randn(1000, generator=torch.Generator().manual_seed(0))
        .to(torch.bfloat16)
        .requires_grad_()
    )
    before, pointer = weight.detach().clone(), weight.data_ptr()
    reference = weight.detach().float().requires_grad_()
    found = sharpscope.sharpness(lambda: weight.float().pow(4).mean(), [weight], 1e-3, "sam")
    exact = sharpscope.sharpness(lambda: reference.pow(4).mean(), [reference], 1e-3, "sam")
    assert found.value == exact.value and found.value > 0
    assert (
        torch.equal(weight, before)
        and weight.dtype == torch.bfloat16
        and weight.data_ptr() == pointer
    )


def test_a_step_below_resolution_is_an_error_and_a_difference_within_rounding_is_not_believed():
    theta = torch.full((100,), 1.0, requires_grad=True)
    with pytest.raises(UserError, match=r"below the resolution of torch.float32"):
        sharpscope.sharpness(lambda: theta.square().sum(), [theta], 1e-8)
    small = torch.full((4,), 1e-4, requires_grad=True)
    found = sharpscope.sharpness(lambda: 1000 + small.square().sum(), [small], 1e-4)
    assert "within rounding" in found.why


def test_losses_that_are_not_finite_come_back_as_reasons():
    theta = torch.tensor([0.5], dtype=torch.float64, requires_grad=True)
    # the step leaves the domain
    found = sharpscope.sharpness(lambda: -torch.log(1 - theta).sum(), [theta], 0.6)
    assert math.isnan(found.value) and "not finite" in found.why
    found = sharpscope.sharpness(lambda: torch.log(theta - 1).sum(), [theta], 0.1)
    assert math.isnan(found.value) and "loss is nan" in found.why
    assert all(row.why for row in found.estimates() if math.isnan(row.value))


def test_mistakes_are_named():
    theta = torch.ones(2, requires_grad=True)
    with pytest.raises(UserError, match="did you mean 'asam'"):
        sharpscope.sharpness(lambda: theta.sum(), [theta], 0.1, "assam")
    with pytest.raises(UserError, match="rho"):
        sharpscope.sharpness(lambda: theta.sum(), [theta], math.nan)


def test_a_gradient_of_zero_has_no_step():
    theta, loss, _, _ = quadratic([4.0, 1.0, -2.0], [0.0] * 3)
    one = sharpscope.sharpness(loss, [theta], 0.5, "sam")
    assert (
        one.value == 0 and "gradient is zero" in one.why and one.estimates()[0].converged is False
    )


def language_surface(name):
    """A surface of a float64 model over nine rows of which pairs share a prompt."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(1, 13, (9, 8), generator=generator)  # 0 pads: its embedding has no gradient
    ids[1::2, :3] = ids[:-1:2, :3]
    scored = torch.zeros(9, 8)
    scored[:, 3:] = (torch.rand(9, 5, generator=generator) < 0.7).float()
    scored[:, 3] = 1
    reward = torch.rand(9, generator=generator).double()
    batch = token_batch(ids, torch.ones(9, 8), scored, reward=reward)
    return lm_surface(small_model(), Objective(name, batch), check="off")


@pytest.mark.parametrize("name", ["nll", "expected_failure"])
def test_values_by_prompt_have_the_estimate_as_mean_and_the_jackknifes_standard_error(name):
    """Leaving out one prompt after the other, with the perturbation held fixed, by the objective over the other rows."""
    with language_surface(name) as surface:
        loss, gradient, base = surface.gradient_by_prompt()
        assert float(base.mean()) == pytest.approx(loss, rel=1e-12)
        assert torch.allclose(base, surface.by_prompt())
        at = {"at": (loss, gradient), "base": base}
        sam, asam = (
            sharpscope.sharpness(surface, None, 0.1, kind, **at) for kind in ("sam", "asam")
        )
        for one in (sam, asam):
            assert len(one.by_prompt) == 5
            assert float(one.by_prompt.mean()) == pytest.approx(one.value, rel=1e-9, abs=1e-15)
        prompts, others = torch.tensor(surface.objective.batch.prompts), []
        for left_out in range(5):
            part = surface.over(surface.objective.rows((prompts != left_out).nonzero()[:, 0]))
            with moved(surface.parameters, gradient * (0.1 / gradient.norm())):
                above = part.value()
            others.append(above - part.value())
        row, error = sam.estimates()[0], np.std(others) * math.sqrt(4)
        # Equal for means; for ratios (prompts with unequal weights) the two agree to second order.
        assert row.prompt_std_error == pytest.approx(error, rel=0.25) and row.prompts == 5
        assert row.prompt_values == tuple(sam.by_prompt.tolist())


class Failure:
    """An expected failure of one parameter, L(θ) = 1 − c·exp(−s·θ) at θ = 0."""

    def __init__(self, correct: float, slope: float) -> None:
        self.correct, self.slope, self.losses = correct, slope, 0
        self.parameters = (torch.zeros(1, dtype=torch.float64, requires_grad=True),)

    def value(self):
        self.losses += 1
        return 1 - self.correct * math.exp(-self.slope * self.parameters[0].item())

    def gradient(self):
        return 1 - self.correct, torch.tensor([self.correct * self.slope], dtype=torch.float64)

    def ceiling(self, loss):
        return 1 - loss

    def by_prompt(self):
        return None


@pytest.mark.parametrize(
    ("correct", "slope", "rho"), [(0.25, 3.0, 0.1), (0.8, 3.0, 0.1), (0.25, 3.0, 2.0)]
)
def test_ceiling_and_saturation_by_hand(correct, slope, rho):
    """The rise is c·(1 − e^(−sρ)), the ceiling c: the saturation does not depend on the accuracy."""
    found = sharpscope.sharpness(Failure(correct, slope), None, rho, "sam")
    assert found.value == pytest.approx(correct * (1 - math.exp(-slope * rho)))
    assert found.ceiling == pytest.approx(correct) and found.saturation == pytest.approx(
        1 - math.exp(-slope * rho)
    )
    row = found.estimates()[0]
    assert (row.ceiling, row.saturation) == (found.ceiling, found.saturation)
    saturated = problems([row])
    assert bool(saturated) == (rho == 2.0) and all("saturated" in line for line in saturated)


@pytest.mark.parametrize("correct", [0.01, 0.9])
@pytest.mark.parametrize("slope", [1e-3, 1.0, 1e4])
def test_the_radius_is_found_where_the_saturation_is_moderate(correct, slope):
    surface = Failure(correct, slope)
    found = find_radius(surface)
    assert 0.05 <= found.saturation <= 0.3 and found.saturation == pytest.approx(
        1 - math.exp(-slope * found.rho)
    )
    assert found.evaluations == surface.losses <= 4 and found.estimate().value == found.rho


def test_the_search_for_a_radius_brackets_a_loss_that_its_slope_misjudges():
    surface = Failure(0.5, 1.0)
    # a far too long first step
    surface.gradient = lambda: (
        0.5,
        torch.tensor([1e-6], dtype=torch.float64),
    )
    found = find_radius(surface)
    assert 0.05 <= found.saturation <= 0.3 and found.evaluations <= 16


@pytest.mark.parametrize(
    ("correct", "says"), [(0.0, "no completion is correct"), (0.5, "no radius with a saturation")]
)
def test_no_radius_is_said(correct, says):
    surface = Failure(correct, 1.0)
    if correct:
        # from nothing to everything
        surface.value = lambda: 0.5 + 0.5 * (abs(surface.parameters[0].item()) > 0.01)
    found = find_radius(surface)
    assert math.isnan(found.rho) and says in found.why and "set probes.rho" in found.why
    assert any(says in line for line in problems([found.estimate()]))


@pytest.mark.parametrize("name", ["nll", "expected_failure"])
def test_a_cross_fitted_rise_is_along_the_gradient_of_the_other_half(name):
    with language_surface(name) as surface:
        _, _, base = surface.gradient_by_prompt()
        found = cross_fitted(surface, 0.1, 3, base)
        order = torch.randperm(5, generator=torch.Generator().manual_seed(3))
        halves, prompts = (order[:2], order[2:]), torch.tensor(surface.objective.batch.prompts)
        rises = []
        for mine, other in (halves, halves[::-1]):
            index = [torch.isin(prompts, half).nonzero()[:, 0] for half in (mine, other)]
            here, there = (surface.over(surface.objective.rows(rows)) for rows in index)
            gradient = there.gradient()[1]
            start = here.value()
            with moved(surface.parameters, 0.1 * gradient / gradient.norm()):
                rises.append(here.value() - start)
        assert found.value == pytest.approx((2 * rises[0] + 3 * rises[1]) / 5, rel=1e-9)
        assert len(found.prompt_values) == found.prompts == 5
        assert found.quantity == "sam_cross_fitted"
        assert np.mean(found.prompt_values) == pytest.approx(found.value, rel=1e-9)


class OnePrompt(Surface):
    """A closure's loss as that of one prompt."""

    def by_prompt(self):
        return torch.tensor([self.value()], dtype=torch.float64)

    def average(self, **options):
        return average_sharpness(self, 0, self.by_prompt(), **options)


def test_average_sharpness_is_half_a_trace_and_layerwise_it_does_not_see_rescaling():
    theta, loss, matrix, _ = quadratic(SPECTRA["indefinite"], GRADIENT)
    found = OnePrompt(loss, [theta]).average(reach=0.3, samples=4000)
    assert found.rho == 0.3 and found.std_error < 0.01
    size = 0.3 * float(theta.detach().norm())
    assert abs(found.value - size**2 / 2 * float(matrix.trace()) / 6) < 3 * found.std_error
    values = []
    for scale in (1.0, 7.0):
        parameters, scaled = two_layers(scale)
        values.append(OnePrompt(scaled, parameters).average(reach=0.01).value)
    assert values[0] == pytest.approx(values[1], rel=1e-6)


def test_average_sharpness_within_rounding_is_said_so():
    theta = torch.ones(4, requires_grad=True)
    found = OnePrompt(lambda: 1000 + theta.square().sum(), [theta]).average(reach=0.001)
    assert "within rounding of the loss 1e+03" in found.why
    assert not OnePrompt(lambda: theta.square().sum(), [theta]).average().why


def test_average_sharpness_has_an_error_over_prompts():
    with language_surface("nll") as surface:
        base = surface.by_prompt()
        found = average_sharpness(surface, 0, base)
        assert found.prompts == 5 and found.samples == 8 and 0 < found.std_error < math.inf
        assert np.mean(found.prompt_values) == pytest.approx(found.value, rel=1e-9)
