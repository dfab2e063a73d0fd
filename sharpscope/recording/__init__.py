"""What a training records: the values of a step, rows of the traces, observers, health rules and the run folder.

The training loop and the recorders in `sharpscope.integrations` share it. The modules `environment` and `run_folder` are
imported as such.
"""

from sharpscope.recording.health import (
    StepHealth,
    check_finite,
    check_method,
    kept_rows,
    refusal,
    rotation_event,
    temperature_gap,
)
from sharpscope.recording.norms import clip_factor, gradient_norm, total_norm, update_norm
from sharpscope.recording.observers import Observations, Observers, StepObserver, critical_rows
from sharpscope.recording.probe_sets import Drawer, check_probe_set, run_probe_set, solution_losses
from sharpscope.recording.rows import (
    evaluation_row,
    gradient_weight_columns,
    pass_at_k,
    plain_norm,
    prompt_pass_at_k,
    rollout_columns,
    standard_error,
    steps_row,
    token_columns,
    update_columns,
    weight_columns,
)
from sharpscope.recording.step import (
    PendingUpdate,
    RolloutBatch,
    StepResult,
    StepTokens,
    UpdateResult,
    UpdateRotation,
    UpdateSummary,
    UpdateTokens,
    loss_mask,
    step_tensors,
)
from sharpscope.recording.surface import SurfaceProbes
from sharpscope.rules import Event, judge

__all__ = [
    "Drawer",
    "Event",
    "Observations",
    "Observers",
    "PendingUpdate",
    "RolloutBatch",
    "StepHealth",
    "StepObserver",
    "StepResult",
    "StepTokens",
    "SurfaceProbes",
    "UpdateResult",
    "UpdateRotation",
    "UpdateSummary",
    "UpdateTokens",
    "check_finite",
    "check_method",
    "check_probe_set",
    "clip_factor",
    "critical_rows",
    "evaluation_row",
    "gradient_norm",
    "gradient_weight_columns",
    "judge",
    "kept_rows",
    "loss_mask",
    "pass_at_k",
    "plain_norm",
    "prompt_pass_at_k",
    "refusal",
    "rollout_columns",
    "rotation_event",
    "run_probe_set",
    "solution_losses",
    "standard_error",
    "step_tensors",
    "steps_row",
    "temperature_gap",
    "token_columns",
    "total_norm",
    "update_columns",
    "update_norm",
    "weight_columns",
]
