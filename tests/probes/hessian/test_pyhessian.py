"""PyHessian against our estimates, where it is right and where it is not."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import sharpscope
from tests.probes.hessian.spectra import net_and_dense, quadratic, with_spectrum


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
