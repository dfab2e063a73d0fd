"""Observers: they see a model and a frozen batch, change nothing, and say how sure they are.

Names are imported when first used: the configuration needs `ProbesSpec` alone, and that without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sharpscope.probes.spec import ProbesSpec

if TYPE_CHECKING:
    from sharpscope.probes.attribution import attribute as attribute
    from sharpscope.probes.attribution import directional_derivative as directional_derivative
    from sharpscope.probes.attribution import failure_coefficients as failure_coefficients
    from sharpscope.probes.attribution import heldout_influence as heldout_influence
    from sharpscope.probes.attribution import logp_gradient as logp_gradient
    from sharpscope.probes.attribution import nll_coefficients as nll_coefficients
    from sharpscope.probes.estimate import Estimate as Estimate
    from sharpscope.probes.functionals import Functional as Functional
    from sharpscope.probes.grouped import m_sharpness as m_sharpness
    from sharpscope.probes.guard import guarded as guarded
    from sharpscope.probes.hessian import Curvature as Curvature
    from sharpscope.probes.hessian import adamw_preconditioner as adamw_preconditioner
    from sharpscope.probes.hessian import adamw_threshold as adamw_threshold
    from sharpscope.probes.hessian import curvature as curvature
    from sharpscope.probes.perturbation import Sharpness as Sharpness
    from sharpscope.probes.perturbation import sharpness as sharpness
    from sharpscope.probes.probe_set import Drawn as Drawn
    from sharpscope.probes.probe_set import ProbeSet as ProbeSet
    from sharpscope.probes.probe_set import build_probe_set as build_probe_set
    from sharpscope.probes.standalone import ProbeReport as ProbeReport
    from sharpscope.probes.standalone import probe_policy as probe_policy
    from sharpscope.probes.standalone import read_rows as read_rows
    from sharpscope.probes.survey import Measured as Measured
    from sharpscope.probes.survey import drawn_functional as drawn_functional
    from sharpscope.probes.survey import measure as measure
    from sharpscope.probes.survey import measured_cost as measured_cost
    from sharpscope.probes.survey import probe_functionals as probe_functionals
    from sharpscope.probes.token_gradients import ScoreNorms as ScoreNorms
    from sharpscope.probes.token_gradients import score_norms as score_norms
    from sharpscope.probes.token_update import UpdateSplit as UpdateSplit
    from sharpscope.probes.token_update import coming_update as coming_update
    from sharpscope.probes.token_update import update_attribution as update_attribution
    from sharpscope.probes.two_batches import squared_gradient_norm as squared_gradient_norm

_HOMES = {
    "attribute": "attribution",
    "directional_derivative": "attribution",
    "failure_coefficients": "attribution",
    "heldout_influence": "attribution",
    "logp_gradient": "attribution",
    "nll_coefficients": "attribution",
    "ScoreNorms": "token_gradients",
    "score_norms": "token_gradients",
    "UpdateSplit": "token_update",
    "coming_update": "token_update",
    "update_attribution": "token_update",
    "Measured": "survey",
    "measure": "survey",
    "measured_cost": "survey",
    "probe_functionals": "survey",
    "squared_gradient_norm": "two_batches",
    "drawn_functional": "survey",
    "Drawn": "probe_set",
    "ProbeReport": "standalone",
    "probe_policy": "standalone",
    "read_rows": "standalone",
    "Curvature": "hessian",
    "adamw_preconditioner": "hessian",
    "adamw_threshold": "hessian",
    "curvature": "hessian",
    "Estimate": "estimate",
    "Functional": "functionals",
    "guarded": "guard",
    "Sharpness": "perturbation",
    "m_sharpness": "grouped",
    "sharpness": "perturbation",
    "ProbeSet": "probe_set",
    "build_probe_set": "probe_set",
}

__all__ = ["ProbesSpec", *sorted(_HOMES)]  # noqa: PLE0604 - the names are strings


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'sharpscope.probes' has no attribute '{name}'")
    return getattr(import_module(f"sharpscope.probes.{_HOMES[name]}"), name)
