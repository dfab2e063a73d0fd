"""`curvature` on closures: hard spectra, odd parameters, both backends, and leaving no trace behind."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.sparse.linalg import eigsh
from scipy.stats import t as student
from torch import nn

import sharpscope
from sharpscope.errors import CheckError, UserError
from sharpscope.probes import adamw_preconditioner, adamw_threshold
from sharpscope.probes.hessian import FunctionOperator, check_products, eigenpairs, hutchpp, spectral_density
from sharpscope.probes.hessian import check as hessian_check
from sharpscope.probes.surface import ClosureSurface
from tests.oracles.curvature import dense_hessian


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def operator(matrix: torch.Tensor) -> FunctionOperator:
    return FunctionOperator(lambda v: matrix @ v, len(matrix), matrix.dtype, matrix.device)


def with_spectrum(values, seed: int = 0) -> torch.Tensor:
    values = torch.tensor(values, dtype=torch.float64)
    q = torch.linalg.qr(torch.randn(len(values), len(values), generator=generator(seed), dtype=torch.float64)).Q
    return q @ torch.diag(values) @ q.T


def quadratic(matrix: torch.Tensor, at: torch.Tensor | None = None):
    theta = (torch.zeros(len(matrix), dtype=matrix.dtype) if at is None else at.clone()).requires_grad_()
    return theta, lambda: 0.5 * theta @ matrix @ theta


class Net(nn.Module):
    """Smooth, with a tied matrix, a frozen one, an unused one and a parameter that enters linearly."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.tied = nn.Linear(4, 5), nn.Linear(4, 5)
        self.tied.weight = self.first.weight
        self.frozen, self.unused = nn.Linear(5, 5), nn.Linear(3, 3)
        self.frozen.requires_grad_(False)
        self.linear = nn.Parameter(torch.ones(2))
        self.double()
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=generator(p.numel()), dtype=torch.float64))

    def forward(self, x):
        return (
            self.frozen(torch.tanh(self.first(x))) * torch.sigmoid(self.tied(x))
        ).square().mean() + self.linear.sum()


def net_and_dense():
    net, x = Net(), torch.randn(7, 4, generator=generator(), dtype=torch.float64)
    used = [p for p in net.parameters() if p.requires_grad]
    theta = torch.cat([p.detach().reshape(-1) for p in used])
    names = {id(p): name for name, p in net.named_parameters()}

    def loss(at):
        parts = at.split([p.numel() for p in used])
        return torch.func.functional_call(
            net, {names[id(p)]: v.view(p.shape) for p, v in zip(used, parts, strict=True)}, (x,)
        )

    return net, (lambda: net(x)), dense_hessian(loss, theta)


def test_tied_frozen_unused_and_linear_parameters():
    net, loss, dense = net_and_dense()
    exact = np.linalg.eigvalsh(dense.numpy())
    found = sharpscope.curvature(loss, list(net.parameters()), tolerance=1e-8, top=2, trace_probes=64)
    assert found.converged
    assert (found.largest, found.smallest) == pytest.approx((exact[-1], exact[0]), rel=1e-6)
    assert abs(found.trace - exact.sum()) <= 4 * found.trace_std_error + 1e-9
    assert found.top[1] == pytest.approx(exact[-2], rel=1e-6) and found.residuals.max() < 1e-7 * abs(exact).max()


@pytest.mark.parametrize(
    "values", [[5.0, -4.9999, 1.0, 0.5, -0.1], [3.0, -3.0000001] + [0.0] * 20, [2.0] + [0.0] * 30, [-4.0, -1.0, -0.5]]
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
    top = eigsh(operator(matrix).as_scipy(), k=4, which="LA", tol=1e-12, return_eigenvectors=False)
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
        assert found.converged and found.upper == 4
        np.testing.assert_allclose(found.values[:4], np.sort(top)[::-1], rtol=1e-8)
        assert (found.krylov is None) == (capacity == 18)
        for value, vector, residual in zip(found.values, found.vectors, found.residuals, strict=True):
            assert abs(float((matrix @ vector - value * vector).norm()) - residual) < 1e-7


BULK = np.random.default_rng(0).uniform(-1, 1, 60).tolist()


@pytest.mark.parametrize("capacity", [100, 16])
@pytest.mark.parametrize(
    ("values", "upper", "lower"),
    [
        ([5.0, 5.0, 5.0, 4.0, *BULK], 4, 1),
        ([5.0, 5.0, 5.0, 4.0] + [0.0] * 20, 4, 1),
        ([3.0, 3.0, -3.0, -3.0, *BULK], 2, 2),
        ([3.0, 3.0, -3.0, -3.0, *BULK], 0, 3),
        ([-3.0, 3.0, *BULK], 1, 1),
        ([2.0] * 30, 5, 1),
        ([-1.0] * 20 + [-2.0] * 20, 3, 2),
        ([5.0, 5.0, 5.0, 4.0], 4, 0),
    ],
)
def test_eigenvalues_are_found_with_their_multiplicities(values, upper, lower, capacity):
    for seed in range(3):
        matrix = with_spectrum(values, seed)
        found = eigenpairs(
            operator(matrix), upper=upper, lower=lower, tolerance=1e-6, capacity=capacity, generator=generator(seed)
        )
        ordered = np.sort(values)[::-1]
        np.testing.assert_allclose(found.values, np.r_[ordered[:upper], ordered[len(values) - lower :]], atol=1e-5)
        assert found.converged and found.upper == upper
        torch.testing.assert_close(
            found.vectors @ found.vectors.T, torch.eye(upper + lower).double(), atol=1e-4, rtol=0
        )
        images = found.vectors @ matrix - torch.from_numpy(found.values)[:, None] * found.vectors
        assert float(images.norm(dim=1).max()) < 2e-5
    theta, loss = quadratic(with_spectrum(values))
    if upper:
        found = sharpscope.curvature(loss, [theta], top=upper, tolerance=1e-6, trace_probes=0, density_samples=0)
        assert found.converged
        np.testing.assert_allclose(found.top, ordered[:upper], atol=1e-5)


def test_a_search_for_multiplicities_that_is_cut_short_is_not_called_converged():
    matrix = with_spectrum([5.0, 5.0, 4.0, *BULK])
    one = eigenpairs(operator(matrix), upper=1, lower=0, max_products=100, generator=generator())
    assert one.converged and one.values[0] == pytest.approx(5)
    whole = eigenpairs(operator(matrix), upper=2, lower=0, max_products=100, generator=generator())
    assert whole.converged and whole.values == pytest.approx([5, 5], abs=1e-3)
    for budget in range(whole.products - 12, whole.products):
        found = eigenpairs(operator(matrix), upper=2, lower=0, max_products=budget, generator=generator())
        assert not found.converged and found.why and found.products <= budget


def test_a_start_at_another_eigenvector_does_not_pass_for_the_largest():
    """After one product the pair (−100, e_0) has no residual; the largest eigenvalue is 30."""
    values = np.r_[[-100.0, 30.0], np.random.default_rng(0).normal(size=400)]
    matrix = torch.diag(torch.from_numpy(values))
    start = torch.zeros(402, dtype=torch.float64)
    start[0] = 1.0
    found = eigenpairs(operator(matrix), upper=1, lower=0, tolerance=0.1, start=start, generator=generator())
    assert found.converged and found.values[0] == pytest.approx(30, rel=0.1) and found.products < 12


def test_a_start_that_leans_can_settle_on_a_smaller_eigenvalue_and_a_random_one_shows_it():
    """Converged says that 0.95 is an eigenvalue, not that it is the largest: e_0 has not risen out of the noise yet."""
    values = torch.linspace(-0.1, 0.1, 400, dtype=torch.float64)
    values[0], values[1] = 1.0, 0.95
    matrix, start = torch.diag(values), torch.zeros(400, dtype=torch.float64)
    start[1] = 1.0
    leaning = eigenpairs(operator(matrix), upper=1, lower=0, tolerance=0.01, start=start, generator=generator())
    assert leaning.converged and leaning.products == 4
    assert leaning.values[0] == pytest.approx(0.95, abs=1e-4) and leaning.residuals[0] < 0.01 * leaning.values[0]
    random = eigenpairs(operator(matrix), upper=1, lower=0, tolerance=0.01, generator=generator())
    assert random.converged and random.values[0] == pytest.approx(1.0)
    density = spectral_density(operator(matrix), samples=1, steps=8, generator=generator())
    assert density.nodes.max() == pytest.approx(1.0)


def test_with_a_density_the_eigenpairs_start_at_random(monkeypatch):
    values = torch.linspace(-0.1, 0.1, 400, dtype=torch.float64)
    values[0], values[1] = 1.0, 0.95
    theta, loss = quadratic(torch.diag(values))
    start = torch.zeros(400, dtype=torch.float64)
    start[1] = 1.0
    monkeypatch.setattr(ClosureSurface, "start", lambda surface, generator: start)
    found = {
        samples: sharpscope.curvature(
            loss, [theta], smallest=False, tolerance=0.01, trace_probes=0, density_samples=samples
        )
        for samples in (0, 1)
    }
    assert found[0].converged and found[0].largest == pytest.approx(0.95, abs=1e-4)
    assert found[1].converged and found[1].largest == pytest.approx(1.0)


def test_float32_is_honest_about_what_it_cannot_reach():
    matrix = with_spectrum(np.linspace(-1, 3, 60)).float()
    theta, loss = quadratic(matrix, torch.ones(60))
    good = sharpscope.curvature(loss, [theta], tolerance=1e-4)
    assert (
        good.converged and good.largest == pytest.approx(3, rel=1e-5) and good.smallest == pytest.approx(-1, rel=1e-4)
    )
    assert not sharpscope.curvature(loss, [theta], tolerance=1e-12, max_products=60).converged


def test_running_out_of_products_says_so():
    theta, loss = quadratic(with_spectrum(np.linspace(0, 1, 100)))
    found = sharpscope.curvature(loss, [theta], tolerance=1e-8, max_products=5)
    assert not found.converged and "after 5 products" in found.why
    rows = {row.quantity: row for row in found.estimates()}
    assert rows["largest"].converged is False and "after 5 products" in rows["largest"].why
    assert rows["trace"].converged is None and rows["trace"].std_error > 0


def test_a_loss_that_is_not_finite_gives_reasons_not_numbers():
    x = torch.tensor([0.0, 1.0], dtype=torch.float64, requires_grad=True)
    with np.errstate(all="ignore"):
        found = sharpscope.curvature(lambda: x.sqrt().sum(), [x])
    assert math.isnan(found.largest) and math.isnan(found.trace) and not found.converged and "not finite" in found.why
    assert all(row.why for row in found.estimates() if math.isnan(row.value))
    y = torch.tensor([0.0, 1.0], dtype=torch.float64, requires_grad=True)
    found = sharpscope.curvature(lambda: y.pow(1.5).sum(), [y])  # finite gradient, infinite second derivative
    assert not found.converged and "product" in found.why and math.isnan(found.largest)


def test_a_zero_hessian_is_zero():
    theta = torch.ones(4, dtype=torch.float64, requires_grad=True)
    found = sharpscope.curvature(lambda: theta.sum(), [theta])
    assert (found.largest, found.smallest, found.trace) == (0, 0, 0) and found.converged


@pytest.mark.parametrize("sketch", [0, 8, 16])
def test_trace_covers_at_the_nominal_rate(sketch):
    matrix = with_spectrum(np.r_[[30.0, 20.0, -15.0], np.random.default_rng(1).normal(size=57)])
    exact, inside = float(matrix.trace()), 0
    errors = []
    for seed in range(100):
        found = hutchpp(operator(matrix), probes=16, sketch=sketch, generator=generator(seed))
        low, high = found.interval(0.95)
        inside += low <= exact <= high
        errors.append((found.value - exact) / found.std_error)
        assert found.products == 16 + sketch
    assert 88 <= inside <= 100
    assert 0.75 < np.std(errors) < 1.35 and abs(np.mean(errors)) < 0.4


def test_the_trace_of_one_call_covers_too_although_its_subspace_was_built_for_the_eigenpairs():
    """The eigenpairs' subspace, its own random start and all, is deflated; then probes at right angles to it."""
    matrix = with_spectrum(np.r_[[30.0, -15.0], np.random.default_rng(1).normal(size=58)])
    theta, loss = quadratic(matrix)
    inside, settings = 0, {"tolerance": 0.1, "max_products": 12, "trace_probes": 8, "density_samples": 0}
    for seed in range(100):
        found = sharpscope.curvature(loss, [theta], seed=seed, **settings)
        assert found.trace_probes == 8
        inside += abs(found.trace - float(matrix.trace())) <= student.ppf(0.975, 7) * found.trace_std_error
    assert 88 <= inside <= 100


@pytest.mark.parametrize("probes", [2, 3, 4])
def test_the_interval_of_the_trace_covers_with_few_probes_too(probes):
    """Over random symmetric matrices; ± 1.96 standard errors would cover 70, 81 and 85 %."""
    inside, normal, runs = 0, 0, 400
    for seed in range(runs):
        matrix = torch.randn(40, 40, generator=generator(seed), dtype=torch.float64)
        matrix = matrix + matrix.T
        found = hutchpp(operator(matrix), probes=probes, sketch=0, generator=generator(10_000 + seed))
        low, high = found.interval()
        inside += low <= float(matrix.trace()) <= high
        normal += abs(found.value - float(matrix.trace())) <= 1.96 * found.std_error
    # 95 % ± 3.3 binomial standard errors of 1.1 %.
    assert 0.914 * runs <= inside <= 0.986 * runs
    assert normal < 0.9 * runs


def test_curvature_states_the_interval_of_its_trace():
    theta, loss = quadratic(with_spectrum(np.random.default_rng(3).normal(size=60)))
    settings = {"tolerance": 0.5, "max_products": 4, "density_samples": 0}
    found = sharpscope.curvature(loss, [theta], trace_probes=3, **settings)
    low, high = found.trace_interval()
    assert (low + high) / 2 == pytest.approx(found.trace)
    assert (high - low) / 2 == pytest.approx(student.ppf(0.975, 2) * found.trace_std_error)
    (row,) = [row for row in found.estimates() if row.quantity == "trace"]
    assert row.samples == 3 and row.std_error == found.trace_std_error
    assert all(map(math.isnan, sharpscope.curvature(loss, [theta], trace_probes=0, **settings).trace_interval()))


def test_krylov_deflation_beats_plain_hutchinson_at_equal_products():
    matrix = with_spectrum(np.r_[[100.0, 50.0, 30.0, 20.0], np.full(200, 0.1)])

    def spread(probes, sketch):
        found = [
            hutchpp(operator(matrix), probes=probes, sketch=sketch, generator=generator(s)).value for s in range(30)
        ]
        return np.std(found)

    assert spread(8, 8) < 0.1 * spread(16, 0)


def test_trace_of_the_whole_space_is_exact_and_one_probe_is_refused():
    matrix = with_spectrum([1.0, 2.0, 3.0])
    found = hutchpp(operator(matrix), probes=2, sketch=5, generator=generator())
    assert found.value == pytest.approx(6) and found.std_error == 0
    with pytest.raises(ValueError, match="at least 2"):
        hutchpp(operator(matrix), probes=1, generator=generator())


def test_density_is_a_distribution_with_the_right_moments_and_curve():
    values = np.r_[np.full(20, -1.0), np.full(70, 0.5), np.full(10, 4.0)]
    found = spectral_density(operator(with_spectrum(values)), samples=100, steps=10, generator=generator())
    np.testing.assert_allclose(found.weights.sum(1), 1)
    np.testing.assert_allclose(found.moments(4)[0], [(values**k).mean() for k in (1, 2, 3, 4)], rtol=1e-6)
    grid, curve = found.curve(width=0.1)
    step = grid[1] - grid[0]
    assert curve.sum() * step == pytest.approx(1, abs=1e-3)
    assert curve[(grid > 3.5)].sum() * step == pytest.approx(0.1, abs=1e-3)


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
    assert any("torch.eig" in note for note in first.notes) and first.density is not None
    assert net.training and all(p.grad is g and bool((g == 7).all()) for p, g in zip(parameters, kept, strict=True))
    assert torch.equal(torch.get_rng_state(), state)


def test_pyhessian_stopping_early_is_not_called_converged():
    theta, loss = quadratic(with_spectrum(np.r_[[1.0, -0.99], np.linspace(0.9, 0.95, 40)]))
    found = sharpscope.curvature(loss, [theta], backend="pyhessian")
    assert not found.converged and "PyHessian" in found.why


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
    with pytest.raises(UserError, match="one floating-point number"):
        sharpscope.curvature(lambda: x * 2, [x])
    with pytest.raises(UserError, match="not deterministic"):
        sharpscope.curvature(lambda: (x * torch.rand(3)).sum(), [x])
    with pytest.raises(UserError, match="not a floating-point leaf"):
        sharpscope.curvature(lambda: x.sum(), [x * 2])
    with pytest.raises(UserError, match="none requires grad"):
        sharpscope.curvature(lambda: x.sum(), [torch.ones(3)])
    with pytest.raises(UserError, match="backend, 'lanzcos'"):
        sharpscope.curvature(lambda: x.sum(), [x], backend="lanzcos")
    with pytest.raises(UserError, match="preconditioner, 2 tensors"):
        sharpscope.curvature(lambda: x.sum(), [x], preconditioner=[x, x])
    with pytest.raises(UserError, match="must be positive"):
        sharpscope.curvature(lambda: x.square().sum(), [x], preconditioner=[torch.zeros(3)])


@pytest.mark.parametrize(("when", "lasting"), [(3, False), (4, False), (3, True), (7, True)])
def test_a_closure_that_changes_after_some_calls_is_refused(when, lasting):
    """On every third or fourth call, or for good, also while the probe runs."""
    theta, calls = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True), 0

    def loss():
        nonlocal calls
        calls += 1
        changed = calls >= when if lasting else calls % when == 0
        return theta.square().sum() * (1.001 if changed else 1.0)

    settings = {"trace_probes": 0, "density_samples": 0, "check": "off"}
    for call in (
        lambda: sharpscope.curvature(loss, [theta], **settings),
        lambda: sharpscope.sharpness(loss, [theta], 0.1, "average", check="off"),
    ):
        calls = 0
        with pytest.raises(UserError, match="not deterministic"):
            call()


def test_seeds_are_independent_of_what_else_is_computed():
    theta, loss = quadratic(with_spectrum(np.random.default_rng(2).normal(size=50)))
    one = sharpscope.curvature(loss, [theta], seed=3)
    again = sharpscope.curvature(loss, [theta], seed=3, density_samples=0)
    other = sharpscope.curvature(loss, [theta], seed=4)
    assert one.trace == again.trace and one.largest == again.largest and again.density is None
    assert one.trace != other.trace


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
    with pytest.raises(UserError, match=r"finite difference of gradients differ by .*without second derivatives"):
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

    with pytest.raises(UserError, match="a detached part of the loss"):
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


def test_a_closure_is_checked_as_often_as_asked(monkeypatch):
    x = torch.tensor([0.5, -1.0], dtype=torch.float64, requires_grad=True)
    other = torch.tensor([2.0, 1.0], dtype=torch.float64, requires_grad=True)
    asked = []
    inner = hessian_check._difference_error
    monkeypatch.setattr(hessian_check, "_difference_error", lambda *given: asked.append(1) or inner(*given))

    def loss():
        return (x.sin() * other.cos()).sum()

    for call, each in (
        (lambda p, check: sharpscope.curvature(loss, p, check=check), 2),
        (lambda p, check: sharpscope.sharpness(loss, p, 0.1, check=check), 1),
    ):
        asked.clear()
        first, again = call([x], "first").checked, call([x], "first").checked
        assert first == again < 0.01 and len(asked) == each
        assert call([x, other], "first").checked < 0.01 and len(asked) == 2 * each
        assert call([x, other], "always").checked < 0.01 and len(asked) == 3 * each
        assert call([x], "off").checked is None and len(asked) == 3 * each


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
    surface = ClosureSurface(lambda: nn.functional.cross_entropy(net(x.to(net[0].weight)), y), list(net.parameters()))
    error = check_products(surface)
    assert error < 0.01 or math.isnan(error)
    net.double()
    assert check_products(surface) < 1e-6
    undecided = torch.tensor([1.0], dtype=torch.float64, requires_grad=True)
    found = sharpscope.curvature(lambda: (undecided - 1).clamp(min=0).pow(1.5).sum(), [undecided])
    assert math.isnan(found.checked) and any("not checked" in note for note in found.notes)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("mode", ["graph", "stream"])
def test_products_agree_with_curvlinops_on_the_same_language_model(dtype, bound, mode):
    curvlinops = pytest.importorskip(
        "curvlinops", reason="curvlinops-for-pytorch is not installed (pip install --no-deps)"
    )
    from sharpscope.probes.hessian.causal_lm import lm_surface
    from sharpscope.probes.objectives import Objective, token_batch
    from tests.models import tiny_model

    # curvlinops differentiates SiLU's backward kernel in forward mode, which PyTorch cannot; this GELU is composed.
    model = tiny_model("qwen2", vocab=23, dtype=dtype, hidden_act="gelu_new")
    ids = torch.randint(2, 23, (4, 9), generator=generator())
    scored = torch.ones_like(ids)
    scored[:, 0] = 0

    class Logits(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x):
            return self.model(input_ids=x, use_cache=False).logits[:, :-1].reshape(-1, 23)

    parameters = [p for p in model.parameters() if p.requires_grad]
    data = [(ids, ids[:, 1:].reshape(-1))]
    loss = nn.CrossEntropyLoss(reduction="sum")
    tokens = token_batch(ids, torch.ones_like(ids), scored)
    with lm_surface(model, Objective("nll", tokens), mode=mode, head_mb=0.001) as surface:
        vector = torch.randn(sum(p.numel() for p in parameters), generator=generator(), dtype=dtype)
        for ours, theirs in (
            (surface.hessian(), curvlinops.HessianLinearOperator),
            (surface.gauss_newton(), curvlinops.GGNLinearOperator),
        ):
            expected = theirs(Logits(), loss, parameters, data) @ vector / 32
            assert float((ours @ vector - expected).norm() / expected.norm()) < bound
