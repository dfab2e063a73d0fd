"""Curvature of a loss surface: extreme eigenvalues, trace, spectral density, with the error of each."""

from sharpscope.probes.hessian.api import adamw_preconditioner, adamw_threshold, curvature, curvature_of
from sharpscope.probes.hessian.check import check_products
from sharpscope.probes.hessian.krylov import Eigenpairs, NotFiniteError, eigenpairs
from sharpscope.probes.hessian.operators import FunctionOperator, Operator, Scaled
from sharpscope.probes.hessian.result import Curvature, CurvatureSettings
from sharpscope.probes.hessian.spectrum import Density, Trace, hutchpp, spectral_density, t_interval

__all__ = [
    "Curvature",
    "CurvatureSettings",
    "Density",
    "Eigenpairs",
    "FunctionOperator",
    "NotFiniteError",
    "Operator",
    "Scaled",
    "Trace",
    "adamw_preconditioner",
    "adamw_threshold",
    "check_products",
    "curvature",
    "curvature_of",
    "eigenpairs",
    "hutchpp",
    "spectral_density",
    "t_interval",
]
