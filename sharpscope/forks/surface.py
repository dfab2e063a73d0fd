"""Sharpness at an arm's weights, on the fixed completions of the training prompts."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from sharpscope.forks.outcomes import FixedRollouts, Reading
from sharpscope.policy import TokenStats
from sharpscope.probes import Objective, critical_sharpness, limited_surface, rollout_batch, sharpness

if TYPE_CHECKING:
    from sharpscope.forks.start import ArmUpdate, Start


def sharpness_readings(
    origin: Start, fixed: FixedRollouts, present: TokenStats, update: ArmUpdate | None
) -> dict[str, Reading]:
    """SAM sharpness and gradient norm of the expected failure, and critical sharpness of the correct completions' nll.

    The expected failure is importance-weighted from the starting policy's completions. The critical sharpness is that along
    the arm's own change of the weights, in 1 / learning rate of its first step; it is not defined before the update.

    Args:
        origin: the state.
        fixed: completions of the starting policy on training prompts.
        present: their statistics under the present policy.
        update: of the arm; None at the starting weights.
    """
    config, spec, model = origin.config, origin.spec, origin.policy.model
    _, share = fixed.weights(present.logp)
    rows = rollout_batch(replace(fixed.rollouts, behavior_logp=fixed.start.logp), reward=fixed.success.double())
    objective = Objective("expected_failure", rows, config.rollout.temperature, stale=True)
    with limited_surface(model, objective, config.probes) as surface:
        at = surface.gradient()
        found = sharpness(surface, None, spec.rho, "sam", at=at)
    readings = {
        "sam_sharpness": Reading(found.value, effective_share=share),
        "gradient_norm": Reading(float(at[1].double().norm()), effective_share=share),
    }
    if update is not None:
        readings["critical_sharpness"] = Reading(_critical(origin, fixed, update))
    return readings


def _critical(origin: Start, fixed: FixedRollouts, update: ArmUpdate) -> float:
    """Critical sharpness of the nll of the correct completions along an arm's change of the weights; NaN if undefined."""
    correct = (fixed.success == 1).nonzero()[:, 0]
    if not len(correct):
        return math.nan
    rows, lr = fixed.rollouts.rows(correct), origin.lr
    mask = rows.completion_mask.bool()
    tokens = int(mask.sum())

    def loss() -> torch.Tensor:
        return -origin.scorer.statistics(rows).logp.double()[mask].sum() / tokens

    parameters = origin.snapshot.parameters
    direction = [part.to(p.device) / -lr for part, p in zip(update.displacement, parameters, strict=True)]
    return critical_sharpness(loss, parameters, direction, guess=lr).value
