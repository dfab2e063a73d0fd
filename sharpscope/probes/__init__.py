"""Probes: they take a model and a fixed batch, change nothing, and return each estimate with its error."""

from __future__ import annotations

from sharpscope.config.probes import ProbesSpec
from sharpscope.probes.attribution import (
    attribute,
    directional_derivative,
    failure_coefficients,
    heldout_influence,
    logp_gradient,
    nll_coefficients,
)
from sharpscope.probes.estimate import Estimate, columns, frame, problems
from sharpscope.probes.functionals import Functional
from sharpscope.probes.gradient_norm import squared_gradient_norm
from sharpscope.probes.grouped import m_sharpness
from sharpscope.probes.guard import guarded
from sharpscope.probes.hessian import Curvature, adamw_preconditioner, adamw_threshold, curvature
from sharpscope.probes.perturbation import Sharpness, sharpness
from sharpscope.probes.probe_set import Drawn, ProbeSet, build_probe_set
from sharpscope.probes.runner import (
    Measured,
    ProbeBatch,
    drawn_functional,
    measure,
    measured_cost,
    probe_functionals,
    probe_set_batches,
    run,
)
from sharpscope.probes.standalone import ProbeReport, probe_policy, read_rows, token_norms
from sharpscope.probes.token_gradients import ScoreNorms, score_norms
from sharpscope.probes.token_update import UpdateSplit, coming_update, update_attribution

__all__ = [
    "Curvature",
    "Drawn",
    "Estimate",
    "Functional",
    "Measured",
    "ProbeBatch",
    "ProbeReport",
    "ProbeSet",
    "ProbesSpec",
    "ScoreNorms",
    "Sharpness",
    "UpdateSplit",
    "adamw_preconditioner",
    "adamw_threshold",
    "attribute",
    "build_probe_set",
    "columns",
    "coming_update",
    "curvature",
    "directional_derivative",
    "drawn_functional",
    "failure_coefficients",
    "frame",
    "guarded",
    "heldout_influence",
    "logp_gradient",
    "m_sharpness",
    "measure",
    "measured_cost",
    "nll_coefficients",
    "probe_functionals",
    "probe_policy",
    "probe_set_batches",
    "problems",
    "read_rows",
    "run",
    "score_norms",
    "sharpness",
    "squared_gradient_norm",
    "token_norms",
    "update_attribution",
]
