"""Probes measure a model on fixed batches and leave it unchanged; each estimate has its error.

Score norms and attributions of tokens: `score_norms`, `attribute`. The loss surface: `curvature` and `sharpness` of any
loss, `critical_sharpness` along an update, `run` for the probes of a `ProbesSpec`.
"""

from __future__ import annotations

from sharpscope.config.run import ProbesSpec
from sharpscope.probes.attribution import attribute, coming_step, failure_coefficients, logp_gradient
from sharpscope.probes.critical import CriticalSharpness, critical_sharpness, update_direction, update_slope
from sharpscope.probes.directions import NOISE_BOUND, Rotation, noise_rotation, rotation
from sharpscope.probes.estimate import Estimate, columns, labeled, problems, prompt_columns
from sharpscope.probes.guard import guarded
from sharpscope.probes.hessian import Curvature, curvature
from sharpscope.probes.language_model import Objective, lm_surface, rollout_batch
from sharpscope.probes.perturbation import Radius, Sharpness, find_radius, sharpness
from sharpscope.probes.runner import (
    Drawn,
    Measured,
    ProbeBatch,
    ProbeItem,
    ProbeSet,
    build_probe_set,
    choose_radius,
    limited_surface,
    probe_set_batches,
    read_rows,
    rollout_objective,
    run,
    text_batches,
)
from sharpscope.probes.token_gradients import ScoreNorms, score_norms
