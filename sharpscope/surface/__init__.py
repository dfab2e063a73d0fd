"""The loss surface around a model: `curvature` and `sharpness` of any loss, `critical_sharpness` along an update.

Probes measure a model on fixed batches and leave it unchanged; each estimate has its error. `run` makes the probes of a `ProbesSpec`.
"""

from __future__ import annotations

from sharpscope.surface.critical import (
    CriticalSharpness,
    critical_sharpness,
    update_direction,
    update_slope,
)
from sharpscope.surface.curvature_values import Curvature
from sharpscope.surface.estimate import Estimate, columns, labeled, problems, prompt_columns
from sharpscope.surface.language_model import Objective, lm_surface, rollout_batch
from sharpscope.surface.perturbation import Radius, Sharpness, find_radius, sharpness
from sharpscope.surface.runner import (
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
from sharpscope.surface.spectrum import curvature
