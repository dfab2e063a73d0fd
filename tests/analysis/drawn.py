"""What a figure drew: the data of its lines and bands."""

from __future__ import annotations

import io

import numpy as np
from matplotlib.collections import PolyCollection
from matplotlib.colors import same_color
from rich.console import Console


def line(axis, label):
    (drawn,) = [line for line in axis.lines if line.get_label() == label and len(line.get_xdata())]
    return np.asarray(drawn.get_xdata(), float), np.asarray(drawn.get_ydata(), float)


def bands(axis, color=None):
    every = [c for c in axis.collections if isinstance(c, PolyCollection)]
    return [c for c in every if color is None or same_color(c.get_facecolor()[0][:3], color)]


def printed(renderable, width=140):
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(renderable)
    return console.export_text()
