"""Muon's step by hand."""

from __future__ import annotations

import pytest
import torch

from sharpscope.warm_start.pretraining import Muon, orthogonal


def test_orthogonal_keeps_singular_vectors_and_evens_out_singular_values():
    generator = torch.Generator().manual_seed(0)
    matrices = torch.randn(3, 5, 9, generator=generator, dtype=torch.float64)
    left, values, right = torch.linalg.svd(matrices, full_matrices=False)
    inside = left.mT @ orthogonal(matrices) @ right.mT  # (3, 5, 5), diagonal if the singular vectors are kept
    off = inside - torch.diag_embed(inside.diagonal(dim1=1, dim2=2))
    assert off.abs().max() < 1e-9
    flat = inside.diagonal(dim1=1, dim2=2)
    assert flat.min() > 0.6
    assert flat.max() < 1.3
    assert (values.amax(1) / values.amin(1)).min() > 2  # they were not even before


@pytest.mark.parametrize("shape", [(4, 4), (3, 6), (6, 3)])
def test_a_muon_step_by_hand(shape):
    generator = torch.Generator().manual_seed(1)
    start, first, second = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(3))
    matrix, idle = start.clone().requires_grad_(), torch.zeros(2, 2, requires_grad=True)
    optimizer = Muon([matrix, idle], lr=0.1, momentum=0.9, weight_decay=0.5)
    expected, average = start.clone(), torch.zeros(shape, dtype=torch.float64)
    for gradient in (first, second):
        matrix.grad = gradient.clone()
        optimizer.step()
        average = 0.9 * average + 0.1 * gradient
        direction = 0.1 * gradient + 0.9 * average
        wide = direction if shape[0] <= shape[1] else direction.T
        update = orthogonal(wide[None])[0]
        update = update if shape[0] <= shape[1] else update.T
        expected = expected * (1 - 0.1 * 0.5) - 0.1 * max(1.0, shape[0] / shape[1]) ** 0.5 * update
        torch.testing.assert_close(matrix.detach(), expected)
    assert not idle.any()
