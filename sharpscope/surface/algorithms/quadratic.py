"""The quadratic form of an operator along a direction."""

from __future__ import annotations

import math

from torch import Tensor

from sharpscope.policy.directions import length
from sharpscope.surface.algorithms.lanczos import inner
from sharpscope.surface.operators import Operator


def quadratic_form(operator: Operator, direction: Tensor) -> float:
    """The curvature vᵀAv/vᵀv along a direction v (P,), between the extreme eigenvalues; NaN along the zero vector."""
    size = length(direction)
    if not (0 < size < math.inf):
        return math.nan
    unit = direction / size
    return float(inner((operator @ unit)[None], unit))
