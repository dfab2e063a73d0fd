"""Normalizers by value."""

from __future__ import annotations

import pytest
import torch

from sharpscope.objective import (
    Method,
    token_normalizer,
)


def test_normalizers_by_value():
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]])
    expected = {"sequence_mean": [1 / 6, 1 / 6, 1 / 3], "token_mean": [1 / 3] * 3, "constant": [1 / 15] * 3}
    for aggregate, values in expected.items():
        got = token_normalizer(Method(name="x", aggregate=aggregate), mask, 5)
        assert got[mask.bool()].tolist() == pytest.approx(values)
        assert not got[~mask.bool()].any()
        assert got.dtype == torch.float32
