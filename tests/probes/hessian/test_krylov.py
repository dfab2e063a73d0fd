"""Lanczos: hard spectra against exact ones, multiplicities, starts and honest residuals."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.sparse.linalg import eigsh

import sharpscope
from sharpscope.probes.hessian import eigenpairs, spectral_density
from tests.probes.hessian.spectra import generator, operator, quadratic, with_spectrum


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


def test_running_out_of_products_says_so():
    theta, loss = quadratic(with_spectrum(np.linspace(0, 1, 100)))
    found = sharpscope.curvature(loss, [theta], tolerance=1e-8, max_products=5)
    assert not found.converged and "after 5 products" in found.why
    rows = {row.quantity: row for row in found.estimates()}
    assert rows["largest"].converged is False and "after 5 products" in rows["largest"].why
    assert rows["trace"].converged is None and rows["trace"].std_error > 0
