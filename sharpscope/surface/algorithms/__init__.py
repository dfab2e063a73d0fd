"""What can be asked of a curvature operator: extreme eigenpairs, spectral density, trace, curvature along a direction."""

from __future__ import annotations

from sharpscope.surface.algorithms.density import Density, spectral_density
from sharpscope.surface.algorithms.lanczos import Eigenpairs, Krylov, eigenpairs, inner
from sharpscope.surface.algorithms.quadratic import quadratic_form
from sharpscope.surface.algorithms.trace import hutchpp
