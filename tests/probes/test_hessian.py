"""`curvature` on closures: hard spectra, odd parameters, both backends, and leaving no trace behind."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.stats import t as student
from torch import nn

import sharpscope
from sharpscope import memory
from sharpscope.errors import UserError
from sharpscope.probes import adamw_preconditioner, adamw_threshold, lm_surface
from tests.probes.spectra import generator, net_and_dense, quadratic, with_spectrum


def test_tied_frozen_unused_and_linear_parameters():
    net, loss, dense = net_and_dense()
    exact = np.linalg.eigvalsh(dense.numpy())
    found = sharpscope.curvature(loss, list(net.parameters()), tolerance=1e-8, top=2, trace_probes=64)
    assert found.converged
    assert (found.largest, found.smallest) == pytest.approx((exact[-1], exact[0]), rel=1e-6)
    assert abs(found.trace - exact.sum()) <= 4 * found.trace_std_error + 1e-9
    assert found.top[1] == pytest.approx(exact[-2], rel=1e-6) and found.residuals.max() < 1e-7 * abs(exact).max()


def test_float32_says_what_it_cannot_reach():
    theta, loss = quadratic(with_spectrum(np.linspace(-1, 3, 60)).float(), torch.ones(60))
    good = sharpscope.curvature(loss, [theta], tolerance=1e-4)
    assert good.converged and (good.largest, good.smallest) == pytest.approx((3, -1), rel=1e-4)
    assert not sharpscope.curvature(loss, [theta], tolerance=1e-12, max_products=60).converged


def test_one_estimate_does_not_depend_on_the_others():
    theta, loss = quadratic(with_spectrum(np.random.default_rng(2).normal(size=50)))
    one, alone, other = (
        sharpscope.curvature(loss, [theta], seed=s, trace_probes=p) for s, p in ((3, 16), (3, 0), (4, 16))
    )
    assert one.largest == alone.largest and math.isnan(alone.trace) and one.trace != other.trace


def test_a_loss_that_is_not_finite_gives_reasons_not_numbers():
    x = torch.tensor([0.0, 1.0], dtype=torch.float64, requires_grad=True)
    with np.errstate(all="ignore"):
        found = sharpscope.curvature(lambda: x.sqrt().sum(), [x])
    assert math.isnan(found.largest) and math.isnan(found.trace) and not found.converged and "not finite" in found.why
    assert all(row.why for row in found.estimates() if math.isnan(row.value))
    y = torch.tensor([0.0, 1.0], dtype=torch.float64, requires_grad=True)
    found = sharpscope.curvature(lambda: y.pow(1.5).sum(), [y])  # finite gradient, infinite second derivative
    assert not found.converged and "product" in found.why and math.isnan(found.largest)


def test_the_trace_of_one_call_covers_too_although_its_subspace_was_built_for_the_eigenpairs():
    """The eigenpairs' subspace, its own random start and all, is deflated; then probes at right angles to it."""
    matrix = with_spectrum(np.r_[[30.0, -15.0], np.random.default_rng(1).normal(size=58)])
    theta, loss = quadratic(matrix)
    inside, settings = 0, {"tolerance": 0.1, "max_products": 12, "trace_probes": 8}
    for seed in range(100):
        found = sharpscope.curvature(loss, [theta], seed=seed, **settings)
        assert found.trace_probes == 8
        low, high = found.trace_interval()
        assert high - low == pytest.approx(2 * student.ppf(0.975, 7) * found.trace_std_error)
        inside += low <= float(matrix.trace()) <= high
    assert 88 <= inside <= 100


def test_preconditioned_eigenvalue_is_that_of_the_scaled_matrix_and_adamw_gives_its_diagonal():
    matrix = with_spectrum([5.0, 3.0, -1.0, 0.2])
    theta, loss = quadratic(matrix, torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64))
    optimizer = torch.optim.AdamW([theta], lr=0.01, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.0)
    with pytest.raises(UserError, match="take a step"):
        adamw_preconditioner(optimizer, [theta])
    second, first = torch.zeros(4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    for _ in range(3):
        before = theta.detach().clone()
        theta.grad = torch.autograd.grad(loss(), theta)[0]
        first, second = 0.8 * first + 0.2 * theta.grad, 0.95 * second + 0.05 * theta.grad**2
        optimizer.step()
    (diagonal,) = adamw_preconditioner(optimizer, [theta])
    torch.testing.assert_close(diagonal, (1 - 0.8**3) * ((second / (1 - 0.95**3)).sqrt() + 1e-3))
    torch.testing.assert_close(theta.detach() - before, -0.01 * first / diagonal)  # the update is −lr·D⁻¹m
    found = sharpscope.curvature(loss, [theta], preconditioner=[diagonal], tolerance=1e-9)
    root = diagonal.rsqrt()
    exact = torch.linalg.eigvalsh(root[:, None] * matrix * root)
    assert (found.largest, found.smallest) == pytest.approx((float(exact[-1]), float(exact[0])), rel=1e-7)
    assert adamw_threshold(0.1, 0.9) == pytest.approx(380)


def test_gradient_descent_with_momentum_like_adamw_diverges_just_above_the_threshold():
    """The threshold on a quadratic: exponential-average momentum m ← βm + (1−β)g, θ ← θ − lr·m."""
    lr, beta = 0.1, 0.9
    for factor, grows in ((0.99, False), (1.01, True)):
        curvature, theta, momentum = factor * adamw_threshold(lr, beta), 1.0, 0.0
        for _ in range(3000):
            momentum = beta * momentum + (1 - beta) * curvature * theta
            theta -= lr * momentum
        assert (abs(theta) > 1) == grows


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_everything_is_as_before_also_when_the_closure_raises(error):
    weight = torch.randn(6, generator=generator()).to(torch.bfloat16).requires_grad_()
    weight.grad = torch.ones_like(weight)
    data, grad, bits, state = weight.data_ptr(), weight.grad, weight.detach().clone(), torch.get_rng_state()
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
        assert weight.data_ptr() == data and weight.dtype == torch.bfloat16 and torch.equal(weight, bits)
        assert weight.grad is grad and torch.equal(torch.get_rng_state(), state)


def test_mistakes_are_named():
    x = torch.ones(3, requires_grad=True)
    for words, loss, parameters, options in (
        ("one floating-point number", lambda: x * 2, [x], {}),
        ("not deterministic", lambda: (x * torch.rand(3)).sum(), [x], {}),
        ("not a floating-point leaf", lambda: x.sum(), [x * 2], {}),
        ("none requires grad", lambda: x.sum(), [torch.ones(3)], {}),
        ("backend, 'lanzcos'", lambda: x.sum(), [x], {"backend": "lanzcos"}),
        ("must be positive", lambda: x.sum(), [x], {"preconditioner": [torch.zeros(3)]}),
    ):
        with pytest.raises(UserError, match=words):
            sharpscope.curvature(loss, parameters, **options)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_products_agree_with_curvlinops_on_the_same_language_model(dtype, bound):
    curvlinops = pytest.importorskip(
        "curvlinops", reason="curvlinops-for-pytorch is not installed (pip install --no-deps)"
    )
    from tests.models import tiny_model
    from tests.probes.small_lm import all_scored

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
    assert net.training and all(p.grad is g and bool((g == 7).all()) for p, g in zip(parameters, kept, strict=True))
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
