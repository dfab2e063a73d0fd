"""Lanczos, trace and density: hard spectra against exact ones, multiplicities, coverage of intervals."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.sparse.linalg import eigsh

import sharpscope
from sharpscope.probes.lanczos import eigenpairs, orthonormal
from sharpscope.probes.spectrum import hutchpp, spectral_density, t_interval
from tests.probes.spectra import generator, operator, quadratic, with_spectrum


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


def test_running_out_of_products_says_so():
    theta, loss = quadratic(with_spectrum(np.linspace(0, 1, 100)))
    found = sharpscope.curvature(loss, [theta], tolerance=1e-8, max_products=5)
    assert not found.converged and "after 5 products" in found.why
    rows = {row.quantity: row for row in found.estimates()}
    assert rows["largest"].converged is False and "after 5 products" in rows["largest"].why
    assert rows["trace"].converged is None and rows["trace"].std_error > 0


@pytest.mark.parametrize("sketch", [0, 8, 16])
def test_trace_covers_at_the_nominal_rate(sketch):
    matrix = with_spectrum(np.r_[[30.0, 20.0, -15.0], np.random.default_rng(1).normal(size=57)])
    exact, inside = float(matrix.trace()), 0
    errors = []
    for seed in range(100):
        given = operator(matrix)
        found = hutchpp(given, probes=16, sketch=sketch, generator=generator(seed))
        low, high = t_interval(found.value, found.std_error, 16)
        inside += low <= exact <= high
        errors.append((found.value - exact) / found.std_error)
        assert given.products == 16 + sketch
    assert 88 <= inside <= 100
    assert 0.75 < np.std(errors) < 1.35 and abs(np.mean(errors)) < 0.4


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


def test_density_is_a_distribution_with_the_right_moments():
    values = np.r_[np.full(20, -1.0), np.full(70, 0.5), np.full(10, 4.0)]
    found = spectral_density(operator(with_spectrum(values)), samples=100, steps=10, generator=generator())
    np.testing.assert_allclose(found.weights.sum(1), 1)
    np.testing.assert_allclose(
        [(found.weights * found.nodes**k).sum(1).mean() for k in (1, 2, 3, 4)],
        [(values**k).mean() for k in (1, 2, 3, 4)],
        rtol=1e-6,
    )


def test_a_run_for_eigenpairs_is_a_sample_of_the_density():
    """A quadrature of m steps from the start v has Σ w·nodeᵏ = vᵀHᵏv for k < 2m, also when made longer."""
    matrix = torch.randn(40, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    matrix = matrix + matrix.T
    draws, given = torch.Generator().manual_seed(1), operator(matrix)
    space = eigenpairs(given, tolerance=0.5, max_products=20, generator=draws).krylov
    size, start = space.size, space.basis[0].clone()
    before = given.products
    found = spectral_density(given, samples=2, steps=8, generator=draws, first=space)
    assert given.products - before == (8 - size) + 8
    vector = start
    for power in range(1, 12):
        vector = matrix @ vector
        moment = (found.weights[0] * found.nodes[0] ** power).sum()
        assert moment == pytest.approx(float(start @ vector), rel=1e-8)
    np.testing.assert_allclose(found.weights.sum(1), 1)


def test_orthonormal_rows_have_the_span_of_a_qr():
    rows = torch.randn(5, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rows[3] = rows[0] + 1e-6 * rows[3]  # nearly dependent
    basis = orthonormal(rows)
    torch.testing.assert_close(basis @ basis.T, torch.eye(5, dtype=torch.float64), rtol=0, atol=1e-13)
    expected = torch.linalg.qr(rows.T).Q.T
    torch.testing.assert_close(basis.T @ basis, expected.T @ expected, rtol=0, atol=1e-8)
