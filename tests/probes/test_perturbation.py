"""Sharpness by perturbation against closed forms, and its limits: zero weights, zero gradients, tiny steps."""

from __future__ import annotations

import math
from unittest import mock

import numpy as np
import pytest
import torch

import sharpscope
from sharpscope.errors import UserError
from sharpscope.probes import m_sharpness
from sharpscope.probes.hessian.api import sub_generator
from sharpscope.probes.perturbation import filter_normalized, loss_slices, m_sharpness_of, sharpness_grid, sharpness_of
from sharpscope.probes.surface import ClosureSurface, working_precision
from tests.oracles.curvature import trust_region_max


def quadratic(values, gradient, dtype=torch.float64):
    """L(θ) = 3 + gᵀθ + ½ θᵀHθ at θ = 0 shifted away from zero weights: θ = θ₀ + moves."""
    size = len(values)
    q = torch.linalg.qr(torch.randn(size, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)).Q
    matrix = (q @ torch.diag(torch.tensor(values, dtype=torch.float64)) @ q.T).to(dtype)
    slope = torch.tensor(gradient, dtype=dtype)
    start = torch.linspace(-1, 2, size, dtype=dtype) + 0.05
    theta = start.clone().requires_grad_()

    def loss():
        move = theta - start
        return 3 + slope @ move + 0.5 * move @ matrix @ move

    return theta, loss, matrix, slope


SPECTRA = {
    "convex": [4.0, 2.0, 1.0, 0.5, 0.1, 0.0],
    "indefinite": [3.0, 1.0, -0.5, -2.0, 0.0, 0.2],
    "concave": [-1.0, -2.0, -0.5, -3.0, -0.2, -1.5],
}
GRADIENT = [0.3, -0.2, 0.5, 0.1, 0.05, -0.4]


@pytest.mark.parametrize("name", SPECTRA)
@pytest.mark.parametrize("rho", [0.1, 1.0, 5.0])
def test_worst_is_the_trust_region_maximum_and_one_step_its_own_closed_form(name, rho):
    theta, loss, matrix, slope = quadratic(SPECTRA[name], GRADIENT)
    exact = trust_region_max(matrix.numpy(), slope.numpy(), rho)
    worst = sharpscope.sharpness(loss, [theta], rho, "worst", steps=500, tolerance=1e-6)
    assert worst.converged, worst.why
    assert worst.value == pytest.approx(exact, rel=1e-6)
    step = rho * slope / slope.norm()
    one = sharpscope.sharpness(loss, [theta], rho, "sam")
    assert one.value == pytest.approx(float(slope @ step + 0.5 * step @ matrix @ step), rel=1e-9)
    assert one.first_order == pytest.approx(rho * float(slope.norm())) and one.gradient_norm == pytest.approx(
        float(slope.norm())
    )
    assert one.ratio == pytest.approx(one.value / one.first_order) and one.loss == pytest.approx(3)
    assert worst.value >= one.value - 1e-9
    assert one.converged is None and one.samples == 1


def test_adaptive_worst_is_the_trust_region_maximum_in_the_scaled_coordinates():
    theta, loss, matrix, slope = quadratic(SPECTRA["indefinite"], GRADIENT)
    scale = theta.detach().abs()
    exact = trust_region_max((scale[:, None] * matrix * scale).numpy(), (scale * slope).numpy(), 0.7)
    found = sharpscope.sharpness(loss, [theta], 0.7, "worst", steps=500, tolerance=1e-6, adaptive=True)
    assert found.value == pytest.approx(exact, rel=1e-6) and found.quantity == "adaptive_worst"
    assert found.first_order == pytest.approx(0.7 * float((scale * slope).norm()))
    one = sharpscope.sharpness(loss, [theta], 0.7, "asam")
    step = 0.7 * scale**2 * slope / (scale * slope).norm()
    assert one.value == pytest.approx(float(slope @ step + 0.5 * step @ matrix @ step), rel=1e-9)


def test_worst_at_a_critical_point_finds_the_sharpest_direction():
    theta, loss, _, _ = quadratic([4.0, 1.0, -2.0, 0.5, 0.0, -1.0], [0.0] * 6)
    found = sharpscope.sharpness(loss, [theta], 0.5, "worst", steps=500, tolerance=1e-5)
    assert found.converged and found.value == pytest.approx(0.5 * 4 * 0.25, rel=1e-6)
    assert found.first_order == 0 and math.isnan(found.ratio)
    one = sharpscope.sharpness(loss, [theta], 0.5, "sam")
    assert one.value == 0 and one.converged is False and "gradient is zero" in one.why


def test_running_out_of_steps_says_so():
    theta, loss, _, _ = quadratic([1.0, 0.999, 0.998, 0.997, 0.5, 0.1], GRADIENT)
    found = sharpscope.sharpness(loss, [theta], 100.0, "worst", steps=2, tolerance=1e-9)
    assert found.converged is False and "after 2 steps" in found.why and found.samples == 3


@pytest.mark.parametrize("adaptive", [False, True])
def test_average_is_half_rho_squared_trace_over_size_within_its_error(adaptive):
    theta, loss, matrix, _ = quadratic(SPECTRA["indefinite"], GRADIENT)
    scale = theta.detach().abs() if adaptive else torch.ones(6, dtype=torch.float64)
    exact = 0.3**2 / (2 * 6) * float((matrix.diagonal() * scale**2).sum())
    inside = 0
    for seed in range(40):
        found = sharpscope.sharpness(loss, [theta], 0.3, "average", samples=32, seed=seed, adaptive=adaptive)
        inside += abs(found.value - exact) <= 2.04 * found.std_error  # Student's t, 31 degrees of freedom, 95 %
        assert found.samples == 32 and found.std_error > 0
    assert inside >= 34


def two_layers(scale: float = 1.0):
    generator = torch.Generator().manual_seed(0)
    first = (torch.randn(5, 4, generator=generator, dtype=torch.float64) * scale).requires_grad_()
    second = (torch.randn(3, 5, generator=generator, dtype=torch.float64) / scale).requires_grad_()
    x, y = (
        torch.randn(6, 4, generator=generator, dtype=torch.float64),
        torch.randn(6, 3, generator=generator, dtype=torch.float64),
    )
    return [first, second], lambda: (x @ first.T @ second.T - y).square().mean()


@pytest.mark.parametrize("kind", ["asam", "worst", "average"])
def test_adaptive_sharpness_is_invariant_under_rescaling_consecutive_layers_and_plain_is_not(kind):
    def value(scale, kind, **rest):
        parameters, loss = two_layers(scale)
        return sharpscope.sharpness(loss, parameters, 0.1, kind, **rest).value

    assert value(7.0, kind, adaptive=True) == pytest.approx(value(1.0, kind, adaptive=True), rel=1e-6)
    plain = "sam" if kind == "asam" else kind
    assert value(7.0, plain) != pytest.approx(value(1.0, plain), rel=0.1)


@pytest.mark.parametrize("kind", ["asam", "worst", "average"])
def test_exactly_zero_weights_are_the_limit_of_small_ones(kind):
    def value(small):
        parameters, loss = two_layers()
        with torch.no_grad():
            parameters[0][2], parameters[1][:, 1] = small, -small
        found = sharpscope.sharpness(loss, parameters, 0.2, kind, adaptive=True)
        assert math.isfinite(found.value)
        return found.value

    assert value(0.0) == pytest.approx(value(1e-9), rel=1e-6)
    zeros = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    nothing = sharpscope.sharpness(lambda: (zeros - 1).square().sum(), [zeros], 0.2, kind, adaptive=True)
    assert nothing.value == 0 and nothing.first_order == 0


def test_m_sharpness_is_the_mean_of_the_groups_own_worst_directions():
    theta = torch.tensor([1.0, -2.0], dtype=torch.float64, requires_grad=True)
    slopes = [torch.tensor(v, dtype=torch.float64) for v in ([1.0, 0.0], [-1.0, 0.0], [0.0, 3.0])]
    losses = [lambda s=s: s @ theta + 10 for s in slopes]
    found = m_sharpness(losses, [theta], 0.5)
    assert found.value == pytest.approx(np.mean([0.5, 0.5, 1.5])) and found.first_order == pytest.approx(found.value)
    assert found.std_error == pytest.approx(np.std([0.5, 0.5, 1.5], ddof=1) / math.sqrt(3))
    together = sharpscope.sharpness(lambda: sum(loss() for loss in losses) / 3, [theta], 0.5)
    assert together.value < found.value  # the groups' directions cancel
    assert found.estimates(1)[0].quantity == "m1_sam"
    with pytest.raises(UserError, match="at least 2"):
        m_sharpness(losses[:1], [theta], 0.5)


@pytest.mark.parametrize(
    ("prompts", "error"),
    [
        (None, math.sqrt(17 / 3) / 2),  # of 1, 2, 6, 5, each for itself
        ([7, 3, 9, 4], math.sqrt(17 / 3) / 2),
        ([0, 0, 1, 1], math.sqrt(8) / math.sqrt(2)),  # of the prompts' means 1.5 and 5.5
        ([0, 0, 0, 1], math.sqrt(2 * 2 * 1.5**2) / 4),  # what they add to the sum, less their share of it: −1.5 and 1.5
        ([0, 0, 0, 0], math.nan),
    ],
)
def test_groups_of_one_prompt_are_not_independent(prompts, error):
    theta = torch.tensor([0.0, 0.0], dtype=torch.float64, requires_grad=True)
    slopes = [torch.tensor([size, 0.0], dtype=torch.float64) for size in (1.0, 2.0, 6.0, 5.0)]
    surfaces = [ClosureSurface(lambda s=s: s @ theta + 10, [theta]) for s in slopes]
    found = m_sharpness_of(surfaces, 1.0, prompts=prompts)
    assert found.value == pytest.approx(3.5) and len(found.groups) == 4
    assert found.std_error == pytest.approx(error, nan_ok=True)
    if prompts is not None and len(set(prompts)) == 4:
        assert found.std_error == m_sharpness_of(surfaces, 1.0).std_error


def test_bfloat16_weights_are_perturbed_in_float32_and_come_back_bitwise():
    weight = torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16).requires_grad_()
    before, pointer = weight.detach().clone(), weight.data_ptr()
    reference = weight.detach().float().requires_grad_()
    found = sharpscope.sharpness(lambda: weight.float().pow(4).mean(), [weight], 1e-3, "sam")
    exact = sharpscope.sharpness(lambda: reference.pow(4).mean(), [reference], 1e-3, "sam")
    assert found.value == exact.value and found.value > 0
    assert torch.equal(weight, before) and weight.dtype == torch.bfloat16 and weight.data_ptr() == pointer


def test_a_step_below_resolution_is_an_error_and_a_difference_within_rounding_is_not_believed():
    theta = torch.full((100,), 1.0, requires_grad=True)
    with pytest.raises(UserError, match=r"below the resolution of torch.float32"):
        sharpscope.sharpness(lambda: theta.square().sum(), [theta], 1e-8)
    small = torch.full((4,), 1e-4, requires_grad=True)
    found = sharpscope.sharpness(lambda: 1000 + small.square().sum(), [small], 1e-4)
    assert found.converged is False and "within rounding" in found.why


def test_losses_that_are_not_finite_come_back_as_reasons():
    theta = torch.tensor([0.5], dtype=torch.float64, requires_grad=True)
    found = sharpscope.sharpness(lambda: -torch.log(1 - theta).sum(), [theta], 0.6)  # the step leaves the domain
    assert math.isnan(found.value) and found.converged is False and "not finite" in found.why
    found = sharpscope.sharpness(lambda: torch.log(theta - 1).sum(), [theta], 0.1)
    assert math.isnan(found.value) and "loss is nan" in found.why
    assert all(row.why for row in found.estimates() if math.isnan(row.value))


def test_mistakes_are_named():
    theta = torch.ones(2, requires_grad=True)
    with pytest.raises(UserError, match="did you mean 'average'"):
        sharpscope.sharpness(lambda: theta.sum(), [theta], 0.1, "avarage")
    for rho in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(UserError, match="rho"):
            sharpscope.sharpness(lambda: theta.sum(), [theta], rho)
    with pytest.raises(UserError, match="steps"):
        sharpscope.sharpness(lambda: theta.sum(), [theta], 0.1, "worst", steps=0)
    with pytest.raises(UserError, match="not deterministic"):
        sharpscope.sharpness(lambda: (theta * torch.rand(2)).sum(), [theta], 0.1)


def test_a_grid_takes_one_gradient_for_all_and_agrees_with_single_calls():
    theta, loss, _, _ = quadratic(SPECTRA["convex"], GRADIENT)
    surface = ClosureSurface(loss, [theta])
    grid = sharpness_grid(surface, [0.1, 0.5], steps=50, samples=8)
    assert [(p.quantity, p.rho) for p in grid] == [
        (k, r) for k in ("sam", "asam", "average", "worst") for r in (0.1, 0.5)
    ]
    for point in grid:
        kind = point.kind
        single = sharpscope.sharpness(loss, [theta], point.rho, kind, steps=50, samples=8)
        assert (single.value, single.first_order) == (point.value, point.first_order)
    rows = [row for point in grid for row in point.estimates()]
    assert len(rows) == 24 and {row.quantity for row in rows} >= {"sam", "sam_first_order", "sam_ratio", "worst"}


SLICED = ("gradient", "eigenvector")


def test_slices_follow_the_loss_along_named_directions():
    theta, loss, matrix, slope = quadratic(SPECTRA["convex"], GRADIENT)
    vectors = torch.linalg.eigh(matrix).eigenvectors
    rows = loss_slices(ClosureSurface(loss, [theta]), [-0.5, 0.0, 0.5], top=vectors[:, -1], random=1)
    by = {name: {row.rho: row.value for row in rows if row.quantity == f"slice_{name}"} for name in SLICED}
    assert len(rows) == 6 and {*by["gradient"]} == {*by["eigenvector"]} == {-0.5, 0.0, 0.5}  # a vector has no filters
    unit = slope / slope.norm()
    assert by["gradient"][0.5] == pytest.approx(3 + 0.5 * float(slope.norm()) + 0.125 * float(unit @ matrix @ unit))
    top = vectors[:, -1]
    assert by["eigenvector"][-0.5] == pytest.approx(3 - 0.5 * float(slope @ top) + 0.125 * 4.0)
    with pytest.raises(UserError, match="distances"):
        loss_slices(ClosureSurface(loss, [theta]), [0.0])


def test_filter_normalised_directions_have_the_rows_norms_and_leave_biases():
    matrix, bias = torch.randn(5, 7, generator=torch.Generator().manual_seed(0)), torch.ones(3)
    matrix[2] = 0
    direction = filter_normalized([matrix, bias], sub_generator(0, "slice_0"))
    rows, still = direction[:35].view(5, 7), direction[35:]
    torch.testing.assert_close(rows.norm(dim=1), matrix.norm(dim=1))
    assert bool((still == 0).all())


def test_working_precision_leaves_the_original_storage_alone():
    half, double = torch.ones(3, dtype=torch.float16), torch.ones(3, dtype=torch.float64)
    pointers = half.data_ptr(), double.data_ptr()
    with pytest.raises(KeyboardInterrupt), working_precision([half, double]):
        assert half.dtype == torch.float32 and double.dtype == torch.float64
        half.add_(1)
        raise KeyboardInterrupt
    assert (half.data_ptr(), double.data_ptr()) == pointers and half.dtype == torch.float16 and bool((half == 1).all())


def language_surface(name="nll", rows=9):
    """A surface of a float64 model over rows of which pairs share a prompt, and the losses of each prompt by loops."""
    from sharpscope.probes.hessian.causal_lm import lm_surface
    from sharpscope.probes.objectives import Objective, token_batch
    from tests.probes.small_lm import small_model

    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(1, 13, (rows, 8), generator=generator)  # 0 pads: its embedding has no gradient
    ids[1::2, :3] = ids[:-1:2, :3] if rows % 2 else ids[::2, :3]
    scored = torch.zeros(rows, 8)
    scored[:, 3:] = (torch.rand(rows, 5, generator=generator) < 0.7).float()
    scored[:, 3] = 1
    reward, advantage = torch.rand(rows, generator=generator).double(), torch.randn(rows, generator=generator).double()
    batch = token_batch(ids, torch.ones(rows, 8), scored, reward=reward, advantage=advantage)
    return lm_surface(small_model(), Objective(name, batch), check="off")


@pytest.mark.parametrize("name", ["nll", "surrogate", "expected_failure"])
def test_values_by_prompt_have_the_estimate_as_mean_and_the_jackknifes_standard_error(name):
    """Leaving out one prompt after the other, with the perturbation held fixed, by the objective over the other rows."""
    from sharpscope.probes.surface import moved

    with language_surface(name) as surface:
        loss, gradient, base = surface.gradient_by_prompt()
        assert float(base.mean()) == pytest.approx(loss, rel=1e-12)
        assert torch.allclose(base, surface.by_prompt())
        found = sharpness_grid(
            surface, [0.1], [("sam", False), ("asam", True), ("average", False)], at=(loss, gradient), base=base
        )
        prompts = surface.objective.batch.prompts
        count = max(prompts) + 1
        assert count == 5 and all(len(one.by_prompt) == count for one in found)
        sam = found[0]
        others = []
        for left_out in range(count):
            keep = torch.tensor([row for row, prompt in enumerate(prompts) if prompt != left_out])
            part = surface.over(surface.objective.rows(keep))
            with moved(surface.parameters, gradient * (0.1 / gradient.norm())):
                above = part.value()
            others.append(above - part.value())
        for one in found:
            assert float(one.by_prompt.mean()) == pytest.approx(one.value, rel=1e-9, abs=1e-15)
        jackknife = torch.tensor(others)
        error = float(((jackknife - jackknife.mean()).square().sum() * (count - 1) / count).sqrt())
        row = sam.estimates()[0]
        # Equal for means; for ratios (prompts with unequal weights) the two agree to second order.
        assert row.prompt_std_error == pytest.approx(error, rel=0.25) and row.prompts == count
        assert row.prompt_values == tuple(sam.by_prompt.tolist())


def test_the_gradient_norms_values_are_projections_of_each_prompts_gradient(monkeypatch):
    from sharpscope.probes.perturbation import gradient_norm

    with language_surface("expected_failure", rows=8) as surface:
        loss, gradient, base = surface.gradient_by_prompt()
        found = gradient_norm(surface, (loss, gradient), base, 1e-3)
        prompts = torch.tensor(surface.objective.batch.prompts)
        parts = [
            surface.over(surface.objective.rows((prompts == i).nonzero()[:, 0])).gradient()[1] for i in range(len(base))
        ]
        expected = [float(part @ gradient / gradient.norm()) for part in parts]
        np.testing.assert_allclose(found.prompt_values, expected, rtol=1e-4, atol=1e-7)
        assert found.value == pytest.approx(float(gradient.norm()))
        sam = sharpness_grid(surface, [1e-3], [("sam", False)], at=(loss, gradient), base=base)[0].by_prompt
        monkeypatch.setattr(surface, "by_prompt", counted := mock.Mock(wraps=surface.by_prompt))
        shared = gradient_norm(surface, (loss, gradient), base, 1e-3, sam)
        np.testing.assert_allclose(shared.prompt_values, expected, rtol=1e-4, atol=1e-7)
        assert counted.call_count == 1


def test_average_sharpness_takes_each_pair_on_its_own_part_of_the_prompts():
    """Against a loop over the prompts' losses; each part's rise is unbiased over its ±ε, so their sum is."""
    from sharpscope.probes.surface import moved

    with language_surface("nll", rows=12) as surface:
        loss, gradient, base = surface.gradient_by_prompt()
        objective, count, samples, rho = surface.objective, len(base), 3, 0.5
        prompts, weight = torch.tensor(objective.batch.prompts), objective.prompt_weight
        alone = [surface.over(objective.rows((prompts == i).nonzero()[:, 0])) for i in range(count)]
        parts = [torch.arange(first, count, samples) for first in range(samples)]
        assert torch.allclose(sum(surface.by_prompt(part) for part in parts), base)
        at = {"at": (loss, gradient), "base": base, "samples": samples}
        found = sharpness_of(surface, rho, "average", seed=3, **at)
        generator, size = sub_generator(3, "average"), sum(p.numel() for p in surface.parameters)
        rises = []  # each part's rise of the loss
        for part in parts:
            step = torch.randn(size, generator=generator, dtype=torch.float64) * rho / math.sqrt(size)
            total = 0.0
            for sign in (1, -1):
                with moved(surface.parameters, sign * step):
                    total += sum(float(weight[i]) * alone[i].value() for i in part.tolist()) / 2
            rises.append(total - sum(float(weight[i]) * alone[i].value() for i in part.tolist()))
        assert (
            found.value == pytest.approx(sum(rises), rel=1e-9) == pytest.approx(float(found.by_prompt.mean()), rel=1e-9)
        )
        off = [rise - float(weight[part].sum()) * sum(rises) for rise, part in zip(rises, parts, strict=True)]
        assert found.std_error == pytest.approx(math.sqrt(samples / (samples - 1) * sum(o**2 for o in off)), rel=1e-9)
        assert found.samples == samples


def check_coverage(values: dict[str, list[tuple[float, float]]], drawn: int, pool: int) -> None:
    """Estimates of redraws with their standard errors: 95 % intervals cover between 90 and 99 %, within the error of 200 draws."""
    from scipy import stats

    for name, pairs in values.items():
        assert len(pairs) == 200, name
        value, error = np.array(pairs).T
        error = error * math.sqrt(1 - drawn / pool)  # the pool is finite
        covered = np.abs(value - value.mean()) <= stats.t.ppf(0.975, drawn - 1) * error
        assert 0.90 <= covered.mean() <= 0.99, (name, covered.mean())
        ratio = np.sqrt((error**2).mean()) / value.std(ddof=1)
        assert 0.7 < ratio < 1.4, (name, ratio)


def redraws(measure, drawn=24):
    """Values by quantity of the rows that `measure` gives for 200 draws of prompts, and the number of prompts drawn from."""
    generator = torch.Generator().manual_seed(1)
    values: dict[str, list[tuple[float, float]]] = {}
    with language_surface("nll", rows=400) as surface:
        pool = len(surface.objective.prompt_weight)
        prompts = torch.tensor(surface.objective.batch.prompts)
        update = surface.gradient()[1].sign().split([p.numel() for p in surface.parameters])  # as AdamW's first
        direction = [part.view_as(p) for part, p in zip(update, surface.parameters, strict=True)]
        for _ in range(200):
            chosen = torch.randperm(pool, generator=generator)[:drawn]
            part = surface.over(surface.objective.rows(torch.isin(prompts, chosen).nonzero()[:, 0]))
            for row in measure(part, direction):
                assert row.prompts == drawn
                values.setdefault(row.quantity, []).append((row.value, row.prompt_std_error))
    return values, pool


def test_standard_errors_over_prompts_cover_the_mean_over_redraws():
    """200 draws of 24 of 200 prompts on one policy."""
    from sharpscope.probes import critical_sharpness

    def measure(part, direction):
        loss, gradient, base = part.gradient_by_prompt()
        kinds = [("sam", False), ("asam", True)]
        rows = [one.estimates()[0] for one in sharpness_grid(part, [0.02], kinds, at=(loss, gradient), base=base)]
        found = critical_sharpness(part.by_prompt, part.parameters, direction, guess=0.05)
        assert found.converged, found.why
        return rows + found.estimates()[:2]

    values, pool = redraws(measure)
    assert set(values) == {"sam", "asam", "critical_sharpness", "critical_lr"}
    check_coverage(values, 24, pool)


@pytest.mark.slow
def test_standard_errors_over_prompts_cover_for_the_expensive_measures_too():
    def measure(part, direction):
        loss, gradient, base = part.gradient_by_prompt()
        at, kinds = (loss, gradient), [("average", False), ("worst", False)]
        rows = [one.estimates()[0] for one in sharpness_grid(part, [0.02], kinds, samples=2, at=at, base=base)]
        return rows + loss_slices(part, [0.3], random=1, at=at, base=base)[:1]

    values, pool = redraws(measure)
    assert set(values) == {"average", "worst", "slice_gradient"}
    check_coverage(values, 24, pool)


class PromptQuadratics:
    """L_i(θ) = 2 + ½θᵀH_iθ of k prompts at θ = 0, whose mean is L."""

    def __init__(self, hessians: torch.Tensor) -> None:
        self.hessians = hessians  # (k, P, P)
        self.parameters = (torch.zeros(len(hessians[0]), dtype=torch.float64, requires_grad=True),)

    def start(self) -> None:
        """None: Lanczos starts at random."""

    def by_prompt(self) -> torch.Tensor:
        theta = self.parameters[0].detach()
        return 2 + 0.5 * torch.einsum("p,kpq,q->k", theta, self.hessians, theta)


def prompt_quadratics(count, size=8, seed=0):
    """Hessians of prompts around a mean with eigenvalues from −1 to 5."""
    generator = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))[0]
    center = basis @ torch.diag(torch.linspace(-1, 5, size, dtype=torch.float64)) @ basis.T
    noise = torch.randn(count, size, size, generator=generator, dtype=torch.float64)
    return center + 0.5 * (noise + noise.transpose(1, 2))


def dense(matrix: torch.Tensor):
    from sharpscope.probes.hessian import FunctionOperator

    return FunctionOperator(lambda vector: matrix @ vector, len(matrix), matrix.dtype, matrix.device)


def quadratic_curvature(hessians, preconditioner=None, trace_probes=2):
    from sharpscope.probes.hessian import CurvatureSettings, curvature_of

    surface = PromptQuadratics(hessians)
    settings = CurvatureSettings(top=2, tolerance=1e-6, trace_probes=trace_probes, density_samples=0)
    at = (2.0, torch.zeros(len(hessians[0]), dtype=torch.float64))
    given = None if preconditioner is None else [preconditioner]
    return curvature_of(
        surface,
        settings,
        preconditioner=given,
        operator=dense(hessians.mean(0)),
        at=at,
        base=surface.by_prompt(),
        check=False,
    )


def test_values_by_prompt_of_eigenvalues_are_quadratic_forms():
    hessians = prompt_quadratics(6)
    diagonal = torch.linspace(0.5, 4, 8, dtype=torch.float64)
    for found, scale in (
        (quadratic_curvature(hessians), torch.ones(8)),
        (quadratic_curvature(hessians, diagonal, 0), diagonal.rsqrt()),
    ):
        scaled = hessians * scale[:, None] * scale
        vectors = torch.linalg.eigh(scaled.mean(0)).eigenvectors[:, [-1, -2, 0]].T
        rows = [row for row in found.estimates() if row.quantity in ("largest", "eigenvalue_2", "smallest")]
        for row, vector in zip(rows, vectors, strict=True):
            exact = torch.einsum("p,kpq,q->k", vector, scaled, vector)
            np.testing.assert_allclose(row.prompt_values, exact, rtol=1e-4, atol=1e-4)
            assert row.prompt_std_error == pytest.approx(float(exact.std()) / math.sqrt(6), rel=1e-4)
    trace = next(row for row in quadratic_curvature(hessians).estimates() if row.quantity == "trace")
    exact = torch.einsum("kpp->k", hessians)  # Lanczos has spanned the whole space
    np.testing.assert_allclose(trace.prompt_values, exact, rtol=1e-4, atol=1e-3)


def test_the_traces_values_by_prompt_use_its_own_subspace_and_probes():
    from sharpscope.probes.hessian.spectrum import hutchpp

    hessians = prompt_quadratics(5)

    def forms(vector, size):
        return torch.einsum("p,kpq,q->k", vector, hessians, vector)

    for sketch in (0, 3):
        generator = torch.Generator().manual_seed(4)
        found = hutchpp(dense(hessians.mean(0)), probes=3, sketch=sketch, generator=generator, forms=forms)
        assert float(found.by_prompt.mean()) == pytest.approx(found.value, rel=1e-9)
        assert float(found.by_prompt.std()) > 0


def test_an_eigenvalue_whose_prompts_do_not_agree_with_it_has_no_standard_error():
    hessians = prompt_quadratics(6)
    from sharpscope.probes.hessian import CurvatureSettings, curvature_of

    surface = PromptQuadratics(hessians)
    at = (2.0, torch.zeros(8, dtype=torch.float64))
    other = dense(2 * hessians.mean(0))  # of another loss
    found = curvature_of(
        surface,
        CurvatureSettings(trace_probes=0, density_samples=0),
        operator=other,
        at=at,
        base=surface.by_prompt(),
        check=False,
    )
    assert found.by_prompt == (None, None) and all(math.isnan(row.prompt_std_error) for row in found.estimates())


def test_standard_errors_of_eigenvalues_cover_over_redraws():
    pool, generator = prompt_quadratics(200, seed=1), torch.Generator().manual_seed(2)
    values: dict[str, list[tuple[float, float]]] = {}
    for _ in range(200):
        chosen = pool[torch.randperm(200, generator=generator)[:24]]
        for row in quadratic_curvature(chosen).estimates()[1:]:
            values.setdefault(row.quantity, []).append((row.value, row.prompt_std_error))
    assert set(values) == {"largest", "eigenvalue_2", "smallest", "trace"}
    check_coverage(values, 24, 200)
