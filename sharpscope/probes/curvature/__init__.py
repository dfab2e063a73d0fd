"""Curvature of a loss surface: extreme eigenvalues, trace, spectral density, with the error of each."""

from sharpscope.probes.curvature.adamw import adamw_preconditioner, adamw_threshold
from sharpscope.probes.curvature.api import curvature, curvature_of
from sharpscope.probes.curvature.density import Density, spectral_density
from sharpscope.probes.curvature.krylov import Eigenpairs, NotFinite, eigenpairs
from sharpscope.probes.curvature.operators import FunctionOperator, Operator, Scaled
from sharpscope.probes.curvature.result import Curvature, CurvatureSettings
from sharpscope.probes.curvature.trace import Trace, hutchpp

__all__ = [
    "Curvature",
    "CurvatureSettings",
    "Density",
    "Eigenpairs",
    "FunctionOperator",
    "NotFinite",
    "Operator",
    "Scaled",
    "Trace",
    "adamw_preconditioner",
    "adamw_threshold",
    "curvature",
    "curvature_of",
    "eigenpairs",
    "hutchpp",
    "spectral_density",
]
