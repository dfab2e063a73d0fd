"""Trace and spectral density: coverage of their intervals, and moments."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sharpscope.probes.hessian import hutchpp, spectral_density
from tests.probes.hessian.spectra import generator, operator, with_spectrum


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
