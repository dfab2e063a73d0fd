"""Lanczos and the trace: hard spectra against exact ones, coverage of intervals."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.sparse.linalg import eigsh
from scipy.stats import t as student

import sharpscope
from sharpscope.probes.lanczos import Krylov, eigenpairs, hutchpp, inner
from sharpscope.probes.surface import Operator, length
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


def test_krylov_deflation_beats_plain_hutchinson_at_equal_products():
    matrix = with_spectrum(np.r_[[100.0, 50.0, 30.0, 20.0], np.full(200, 0.1)])

    def spread(probes, sketch):
        return np.std([trace(operator(matrix), probes, sketch, seed)[0] for seed in range(30)])

    assert spread(8, 8) < 0.1 * spread(16, 0)


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
