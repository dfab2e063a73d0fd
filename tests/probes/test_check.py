"""The self-check of products and gradients refuses what is wrong and passes what is right."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import sharpscope
from sharpscope.errors import CheckError, UserError
from sharpscope.probes.surface import Surface, check_products
from tests.probes.spectra import with_spectrum


class OpaqueCube(torch.autograd.Function):
    """x³ whose backward pass leaves the graph: its second derivative comes out as 0, or as a part of the truth."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, cotangent):
        (x,) = ctx.saved_tensors
        return cotangent * torch.from_numpy(3 * x.detach().numpy() ** 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "loss", [lambda x: OpaqueCube.apply(x).sum(), lambda x: OpaqueCube.apply(x).square().sum() + x.square().sum()]
)
def test_a_function_without_second_derivatives_is_refused(dtype, loss):
    x = torch.tensor([0.5, 1.0, 2.0], dtype=dtype, requires_grad=True)
    with pytest.raises(UserError, match=r"finite difference of gradients differ by .*no second derivative"):
        sharpscope.curvature(lambda: loss(x), [x])
    unchecked = sharpscope.curvature(lambda: loss(x), [x], check="off")
    assert unchecked.converged and unchecked.checked is None
    truth = sharpscope.curvature(lambda: (x**3).sum(), [x])
    assert truth.checked < 0.01 and truth.largest == pytest.approx(12)


def test_a_ratio_against_its_own_detached_value_is_refused():
    """exp(ℓ − ℓ.detach()): autograd's Hessian is not the derivative of its gradient, whose anchor moves along."""
    x = torch.tensor([0.5, -1.0], dtype=torch.float64, requires_grad=True)

    def loss():
        score = x.square().sum().sin()
        return (score - score.detach()).exp()

    with pytest.raises(UserError, match="detached"):
        sharpscope.curvature(loss, [x])


class WrongGradient(torch.autograd.Function):
    """x² with half of its gradient."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    def backward(ctx, cotangent):
        return cotangent * ctx.saved_tensors[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "loss", [lambda x: WrongGradient.apply(x).sum(), lambda x: (x.exp() - x.exp().detach() + x.detach() ** 2).sum()]
)
def test_a_wrong_gradient_is_refused(dtype, loss):
    x = torch.tensor([0.5, 1.0, 2.0], dtype=dtype, requires_grad=True)
    for call in (
        lambda **k: sharpscope.curvature(lambda: loss(x), [x], **k),
        lambda **k: sharpscope.sharpness(lambda: loss(x), [x], 0.1, **k),
    ):
        with pytest.raises(CheckError, match=r"gradient and the finite difference of losses differ by \d+%") as caught:
            call()
        assert caught.value.probe == "gradient" and caught.value.error > caught.value.tolerance
        assert call(check="off").checked is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_loss_whose_changes_drown_in_rounding_is_not_refused(dtype):
    x = torch.tensor([0.5, -0.5], dtype=dtype, requires_grad=True)
    for offset in (0.0, 1.0, 1e4, 1e8, 1e20):
        found = sharpscope.sharpness(lambda offset=offset: offset + 1e-3 * x.sin().sum(), [x], 0.1)
        assert math.isnan(found.checked) or found.checked < 0.01
        assert offset > 1 or found.checked < 0.01


@pytest.mark.parametrize("start", [0.0, 1e-3, 1e3])
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_smooth_losses_of_any_scale_pass_the_check(dtype, size, start):
    matrix = with_spectrum([4.0, 1.0, -0.5, 0.0]).to(dtype) * size
    theta = torch.full((4,), start, dtype=dtype, requires_grad=True)
    found = sharpscope.curvature(lambda: 0.5 * theta @ matrix @ theta + size * theta.sin().sum(), [theta])
    assert found.checked < 0.01


def test_a_loss_with_many_kinks_is_not_refused():
    """In float32 most steps cross kinks of a ReLU network, and the finite differences are then off by 10 to 100 %."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    x, y = torch.randn(200, 10), torch.randint(0, 4, (200,))
    surface = Surface(lambda: nn.functional.cross_entropy(net(x.to(net[0].weight)), y), list(net.parameters()))
    error = check_products(surface, surface.hessian())
    assert error < 0.01 or math.isnan(error)
    net.double()
    assert check_products(surface, surface.hessian()) < 1e-6
    undecided = torch.tensor([1.0], dtype=torch.float64, requires_grad=True)
    found = sharpscope.curvature(lambda: (undecided - 1).clamp(min=0).pow(1.5).sum(), [undecided])
    assert math.isnan(found.checked)
