"""Curvature of closures: hard spectra, odd parameters, coverage of the trace, both backends, and the check of products."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.sparse.linalg import eigsh
from scipy.stats import t as student
from torch import nn

import sharpscope
from sharpscope import memory
from sharpscope.errors import CheckError, UserError
from sharpscope.policy.directions import length
from sharpscope.surface import lm_surface
from sharpscope.surface.algorithms import Krylov, eigenpairs, hutchpp, inner
from sharpscope.surface.operators import Operator
from sharpscope.surface.surface import Surface, check_derivatives
from tests.models import (
    OpaqueCube,
    all_scored,
    generator,
    net_and_dense,
    operator,
    quadratic,
    tiny_model,
    with_spectrum,
)


def test_tied_frozen_unused_and_linear_parameters():
    net, loss, dense = net_and_dense()
    exact = np.linalg.eigvalsh(dense.numpy())
    found = sharpscope.curvature(
        loss, list(net.parameters()), tolerance=1e-8, top=2, trace_probes=64
    )
    assert found.converged
    assert (found.largest, found.smallest) == pytest.approx((exact[-1], exact[0]), rel=1e-6)
    assert abs(found.trace - exact.sum()) <= 4 * found.trace_std_error + 1e-9
    low, high = found.trace_interval()
    assert high - low == pytest.approx(2 * student.ppf(0.975, 63) * found.trace_std_error)
    assert (
        found.top[1] == pytest.approx(exact[-2], rel=1e-6)
        and found.residuals.max() < 1e-7 * abs(exact).max()
    )


def test_float32_says_what_it_cannot_reach():
    theta, loss = quadratic(with_spectrum(np.linspace(-1, 3, 60)).float(), torch.ones(60))
    good = sharpscope.curvature(loss, [theta], tolerance=1e-4)
    assert good.converged and (good.largest, good.smallest) == pytest.approx((3, -1), rel=1e-4)
    assert not sharpscope.curvature(loss, [theta], tolerance=1e-12, max_products=60).converged


def test_a_loss_that_is_not_finite_gives_reasons_not_numbers():
    x = torch.tensor([0.0, 1.0], dtype=torch.float64, requires_grad=True)
    with np.errstate(all="ignore"):
        found = sharpscope.curvature(lambda: x.sqrt().sum(), [x])
    assert (
        math.isnan(found.largest)
        and math.isnan(found.trace)
        and not found.converged
        and "not finite" in found.why
    )
    assert all(row.why for row in found.estimates() if math.isnan(row.value))
    y = torch.tensor([0.0, 1.0], dtype=torch.float64, requires_grad=True)
    # finite gradient, infinite second derivative
    found = sharpscope.curvature(lambda: y.pow(1.5).sum(), [y])
    assert not found.converged and "product" in found.why and math.isnan(found.largest)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_everything_is_as_before_also_when_the_closure_raises(error):
    weight = torch.randn(6, generator=generator()).to(torch.bfloat16).requires_grad_()
    weight.grad = torch.ones_like(weight)
    data, grad, bits, state = (
        weight.data_ptr(),
        weight.grad,
        weight.detach().clone(),
        torch.get_rng_state(),
    )
    calls = 0

    def loss():
        nonlocal calls
        calls += 1
        torch.rand(1)
        assert weight.dtype == torch.float32 and weight.grad is None
        if calls == 3:
            raise error("stop")
        return weight.square().sum()

    for call in (sharpscope.curvature, lambda f, p: sharpscope.sharpness(f, p, 0.1)):
        calls = 0
        with pytest.raises(error):
            call(loss, [weight])
        assert (
            weight.data_ptr() == data
            and weight.dtype == torch.bfloat16
            and torch.equal(weight, bits)
        )
        assert weight.grad is grad and torch.equal(torch.get_rng_state(), state)


def test_mistakes_are_named():
    x = torch.ones(3, requires_grad=True)
    for words, loss, parameters, options in (
        ("one floating-point number", lambda: x * 2, [x], {}),
        ("not deterministic", lambda: (x * torch.rand(3)).sum(), [x], {}),
        ("not a floating-point leaf", lambda: x.sum(), [x * 2], {}),
        ("none requires grad", lambda: x.sum(), [torch.ones(3)], {}),
        ("backend, 'lanzcos'", lambda: x.sum(), [x], {"backend": "lanzcos"}),
    ):
        with pytest.raises(UserError, match=words):
            sharpscope.curvature(loss, parameters, **options)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_products_agree_with_curvlinops_on_the_same_language_model(dtype, bound):
    curvlinops = pytest.importorskip(
        "curvlinops", reason="curvlinops-for-pytorch is not installed (pip install --no-deps)"
    )
    # curvlinops differentiates SiLU's backward kernel in forward mode, which PyTorch cannot; this GELU is composed.
    model = tiny_model("qwen2", vocab=23, dtype=dtype, hidden_act="gelu_new")
    ids = torch.randint(2, 23, (4, 9), generator=generator())

    class Logits(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x):
            return self.model(input_ids=x, use_cache=False).logits[:, :-1].reshape(-1, 23)

    parameters = [p for p in model.parameters() if p.requires_grad]
    data = [(ids, ids[:, 1:].reshape(-1))]
    loss = nn.CrossEntropyLoss(reduction="sum")
    with lm_surface(model, all_scored(ids)) as surface:
        vector = torch.randn(sum(p.numel() for p in parameters), generator=generator(), dtype=dtype)
        expected = curvlinops.HessianLinearOperator(Logits(), loss, parameters, data) @ vector / 32
        assert float((surface.hessian() @ vector - expected).norm() / expected.norm()) < bound


def test_pyhessian_agrees_where_it_is_right_and_its_traps_are_fenced():
    net, loss, dense = net_and_dense()
    exact = np.linalg.eigvalsh(dense.numpy())
    parameters = list(net.parameters())
    net.train()
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 7.0)
    state = torch.get_rng_state()
    kept = [p.grad for p in parameters]
    options = {"backend": "pyhessian", "tolerance": 1e-5, "max_products": 2000, "trace_probes": 2}
    first = sharpscope.curvature(loss, parameters, **options)
    second = sharpscope.curvature(loss, parameters, **options)
    assert first.largest == second.largest  # its own second call on the same model doubles
    assert (first.largest, first.smallest) == pytest.approx((exact[-1], exact[0]), rel=1e-3)
    assert abs(first.trace - exact.sum()) < 5 * first.trace_std_error
    assert net.training and all(
        p.grad is g and bool((g == 7).all()) for p, g in zip(parameters, kept, strict=True)
    )
    assert torch.equal(torch.get_rng_state(), state)


def test_pyhessian_stopping_early_is_not_called_converged():
    theta, loss = quadratic(with_spectrum(np.r_[[1.0, -0.99], np.linspace(0.9, 0.95, 40)]))
    found = sharpscope.curvature(loss, [theta], backend="pyhessian")
    assert not found.converged and "PyHessian" in found.why


def test_vectors_that_do_not_fit_into_memory_are_said_before_any_product(monkeypatch):
    theta, loss = quadratic(with_spectrum([1.0, 2.0, 3.0]))
    monkeypatch.setattr(memory, "free_memory", lambda device: 3 * 3 * 8)
    with pytest.raises(UserError, match="memory: curvature of"):
        sharpscope.curvature(loss, [theta])


@pytest.mark.parametrize(
    "values",
    [
        [5.0, -4.9999, 1.0, 0.5, -0.1],
        [3.0, -3.0000001] + [0.0] * 20,
        [2.0] + [0.0] * 30,
        [-4.0, -1.0, -0.5],
    ],
)
def test_nearly_equal_signs_and_singular_matrices(values):
    theta, loss = quadratic(with_spectrum(values))
    found = sharpscope.curvature(loss, [theta], tolerance=1e-9)
    assert found.converged, found.why
    assert (found.largest, found.smallest) == pytest.approx((max(values), min(values)), abs=1e-6)
    assert found.gradient_norm == 0  # a critical point is no obstacle
    assert abs(found.trace - sum(values)) <= 5 * found.trace_std_error + 1e-9


def test_lanczos_agrees_with_scipys_on_the_same_operator_also_across_restarts():
    matrix = with_spectrum(np.random.default_rng(0).normal(size=80) ** 3)
    top = eigsh(matrix.numpy(), k=4, which="LA", tol=1e-12, return_eigenvectors=False)
    for capacity in (100, 18):
        found = eigenpairs(
            operator(matrix),
            upper=4,
            lower=2,
            tolerance=1e-9,
            max_products=2000,
            capacity=capacity,
            generator=generator(),
        )
        assert not found.why and found.upper == 4
        np.testing.assert_allclose(found.values[:4], np.sort(top)[::-1], rtol=1e-8)
        assert (found.krylov is None) == (capacity == 18)
        for value, vector in zip(found.values, found.vectors, strict=True):
            assert float((matrix @ vector - value * vector).norm()) < 1e-6


def test_running_out_of_products_says_so():
    theta, loss = quadratic(with_spectrum(np.linspace(0, 1, 100)))
    found = sharpscope.curvature(loss, [theta], tolerance=1e-8, max_products=5)
    assert not found.converged and "after 5 products" in found.why
    rows = {row.quantity: row for row in found.estimates()}
    assert rows["largest"].converged is False and "after 5 products" in rows["largest"].why
    assert rows["trace"].converged is None and rows["trace"].std_error > 0


def trace(given, probes, sketch, seed=0):
    """The trace by `probes` random vectors beside a Krylov subspace of `sketch` dimensions."""
    draws = generator(seed)
    space = Krylov(given, sketch, draws)
    for _ in range(space.capacity):
        space.extend()
    return hutchpp(given, space, probes, draws)


@pytest.mark.parametrize("sketch", [0, 8, 16])
def test_trace_covers_at_the_nominal_rate(sketch):
    matrix = with_spectrum(np.r_[[30.0, 20.0, -15.0], np.random.default_rng(1).normal(size=57)])
    exact, inside = float(matrix.trace()), 0
    errors = []
    for seed in range(100):
        given = operator(matrix)
        value, error = trace(given, 16, sketch, seed)
        inside += abs(value - exact) <= student.ppf(0.975, 15) * error
        errors.append((value - exact) / error)
        assert given.products == 16 + sketch
    assert 88 <= inside <= 100
    assert 0.75 < np.std(errors) < 1.35 and abs(np.mean(errors)) < 0.4


def test_trace_of_the_whole_space_is_exact():
    assert trace(operator(with_spectrum([1.0, 2.0, 3.0])), 2, 5) == (pytest.approx(6), 0)


def test_float32_vectors_of_a_real_model_have_the_lengths_and_products_of_float64():
    size = 2**24  # here a float32 sum is 1e-3 too small
    v = torch.randn(size, generator=torch.Generator().manual_seed(0))
    exact = float(v.double() @ v.double())
    assert abs(length(v) ** 2 / exact - 1) < 1e-6
    assert abs(float(inner(v[None], v)) / exact - 1) < 1e-6
    squares = v.square()
    operator = Operator([v], lambda x: x * squares)
    found, _ = trace(operator, 2, 0, seed=1)
    assert abs(found / exact - 1) < 1e-6  # random signs give the trace of a diagonal matrix exactly


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "loss",
    [
        lambda x: OpaqueCube.apply(x).sum(),
        lambda x: OpaqueCube.apply(x).square().sum() + x.square().sum(),
    ],
)
def test_a_function_without_second_derivatives_is_refused(dtype, loss):
    x = torch.tensor([0.5, 1.0, 2.0], dtype=dtype, requires_grad=True)
    with pytest.raises(
        UserError, match=r"finite difference of gradients differ by .*no second derivative"
    ):
        sharpscope.curvature(lambda: loss(x), [x])
    unchecked = sharpscope.curvature(lambda: loss(x), [x], check="off")
    assert unchecked.converged and unchecked.checked is None
    truth = sharpscope.curvature(lambda: (x**3).sum(), [x])
    assert truth.checked < 0.01 and truth.largest == pytest.approx(12)


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
    "loss",
    [
        lambda x: WrongGradient.apply(x).sum(),
        lambda x: (x.exp() - x.exp().detach() + x.detach() ** 2).sum(),
    ],
)
def test_a_wrong_gradient_is_refused(dtype, loss):
    x = torch.tensor([0.5, 1.0, 2.0], dtype=dtype, requires_grad=True)
    for call in (
        lambda **k: sharpscope.curvature(lambda: loss(x), [x], **k),
        lambda **k: sharpscope.sharpness(lambda: loss(x), [x], 0.1, **k),
    ):
        with pytest.raises(
            CheckError, match=r"gradient and the finite difference of losses differ by \d+%"
        ) as caught:
            call()
        assert caught.value.probe == "gradient" and caught.value.error > caught.value.tolerance
        assert call(check="off").checked is None


@pytest.mark.parametrize("start", [0.0, 1e-3, 1e3])
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_smooth_losses_of_any_scale_pass_the_check(dtype, size, start):
    matrix = with_spectrum([4.0, 1.0, -0.5, 0.0]).to(dtype) * size
    theta = torch.full((4,), start, dtype=dtype, requires_grad=True)
    found = sharpscope.curvature(
        lambda: 0.5 * theta @ matrix @ theta + size * theta.sin().sum(), [theta]
    )
    assert found.checked < 0.01


def test_a_loss_with_many_kinks_is_not_refused():
    """In float32 most steps cross kinks of a ReLU network, and the finite differences are then off by 10 to 100 %."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)
    )
    x, y = torch.randn(200, 10), torch.randint(0, 4, (200,))
    surface = Surface(
        lambda: nn.functional.cross_entropy(net(x.to(net[0].weight)), y), list(net.parameters())
    )
    error = check_derivatives(surface, surface.hessian())
    assert error < 0.01 or math.isnan(error)
    net.double()
    assert check_derivatives(surface, surface.hessian()) < 1e-6
    undecided = torch.tensor([1.0], dtype=torch.float64, requires_grad=True)
    found = sharpscope.curvature(lambda: (undecided - 1).clamp(min=0).pow(1.5).sum(), [undecided])
    assert math.isnan(found.checked)
