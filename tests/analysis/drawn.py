"""What a figure drew: the data of its lines and bands."""

from __future__ import annotations

import io

import numpy as np
import pytest
from matplotlib.collections import PolyCollection
from matplotlib.colors import same_color
from rich.console import Console


def line(axis, label):
    (drawn,) = [line for line in axis.lines if line.get_label() == label and len(line.get_xdata())]
    return np.asarray(drawn.get_xdata(), float), np.asarray(drawn.get_ydata(), float)


def bands(axis, color=None):
    every = [c for c in axis.collections if isinstance(c, PolyCollection)]
    return [c for c in every if color is None or same_color(c.get_facecolor()[0][:3], color)]


def thin(axis):
    """y of the thin lines of single seeds."""
    return [np.asarray(line.get_ydata(), float) for line in axis.lines if line.get_linewidth() == 0.5]


def check_band(axis, label, expected):
    """Line = median over seeds, band = 10 to 90 % quantile, at every x of `expected` (x -> values over seeds)."""
    x, y = line(axis, label)
    assert x.tolist() == list(expected)
    np.testing.assert_allclose(y, [_quantile(v, 0.5) for v in expected.values()], rtol=1e-6)
    (drawn,) = [line for line in axis.lines if line.get_label() == label and len(line.get_xdata())]
    (band,) = bands(axis, drawn.get_color())
    vertices = band.get_paths()[0].vertices
    for at, values in expected.items():
        column = vertices[np.isclose(vertices[:, 0], at), 1]
        assert column.min() == pytest.approx(_quantile(values, 0.1), rel=1e-5, abs=1e-9)
        assert column.max() == pytest.approx(_quantile(values, 0.9), rel=1e-5, abs=1e-9)


def _quantile(values, share):
    """Linear interpolation between the sorted values."""
    data, at = sorted(values), share * (len(values) - 1)
    low = int(at)
    return data[low] if low + 1 == len(data) else data[low] + (at - low) * (data[low + 1] - data[low])


def runs_of(study, label):
    (setting,) = [s for s in study.settings if s.label == label]
    return list(setting.runs.values())


def printed(renderable, width=140):
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(renderable)
    return console.export_text()
