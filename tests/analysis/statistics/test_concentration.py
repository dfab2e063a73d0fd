"""Shares of the largest values by hand."""

from __future__ import annotations

import numpy as np
import pytest

from sharpscope.analysis.statistics import (
    gini,
    lorenz,
    top_share,
)


def test_concentration_by_hand():
    assert gini(np.ones(5)) == pytest.approx(0)
    assert gini(np.array([0, 0, 0, 1.0])) == pytest.approx(0.75)
    assert np.isnan(gini(np.zeros(3)))
    assert top_share(np.arange(1.0, 11), 0.2) == pytest.approx(19 / 55)
    assert lorenz(np.array([1.0, 3.0]), points=3) == pytest.approx([0, 0.25, 1])
