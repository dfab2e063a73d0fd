"""Curvature as symmetric linear operators on flat vectors (P,): what `algorithms` work on."""

from __future__ import annotations

from sharpscope.surface.operators.base import Operator, common_dtype, flatten, unflatten
from sharpscope.surface.operators.hessian import FiniteDifference, graph_product
from sharpscope.surface.operators.jacobian import (
    Jacobian,
    empirical_fisher_product,
    fisher_product,
    gauss_newton_product,
)
from sharpscope.surface.operators.preconditioned import Preconditioned, adam_scale, threshold
