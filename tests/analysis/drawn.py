"""What a figure drew: the data of its lines and bands."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.collections import PolyCollection

from tests.oracles import analysis as oracle


def line(axis, label):
    (found,) = [line for line in axis.lines if line.get_label() == label]
    return np.asarray(found.get_xdata(), float), np.asarray(found.get_ydata(), float)


def bands(axis):
    return [c for c in axis.collections if isinstance(c, PolyCollection)]


def check_band(axis, label, expected, *, index=0):
    """Line = mean over seeds, band = mean ± t-interval, at every x of `expected` (x -> values over seeds)."""
    x, y = line(axis, label)
    want = {k: oracle.mean_and_half(v) for k, v in expected.items()}
    assert x.tolist() == list(want)
    np.testing.assert_allclose(y, [mean for mean, _ in want.values()], rtol=1e-6)
    vertices = bands(axis)[index].get_paths()[0].vertices
    for place, (mean, half) in want.items():
        column = vertices[vertices[:, 0] == place, 1]
        assert column.min() == pytest.approx(mean - half, rel=1e-5, abs=1e-9)
        assert column.max() == pytest.approx(mean + half, rel=1e-5, abs=1e-9)


def runs_of(study, label):
    (setting,) = [s for s in study.settings if s.label == label]
    return list(setting.runs.values())
