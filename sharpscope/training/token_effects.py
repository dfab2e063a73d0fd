"""Effects of a step's tokens before it is made, for weights that depend on them (`EffectWeight`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from sharpscope.methods import Method
from sharpscope.methods.first_update import first_update
from sharpscope.methods.method import Kl
from sharpscope.methods.plan import StepTensors, prepare
from sharpscope.methods.token_weights import EffectWeight, UniformWeight
from sharpscope.policy import Rollouts
from sharpscope.tokens.optimizer_steps import ComingStep
from sharpscope.tokens.outcomes import Outcome
from sharpscope.tokens.update_effects import effects

if TYPE_CHECKING:
    from sharpscope.training.learner import Learner


def unweighted_coefficients(
    method: Method,
    step: StepTensors,
    max_completion_length: int,
) -> Tensor:
    """∂L/∂log π_t (N, T) of one update of all rows at ratio 1, with all weights 1 and without KL term and penalty."""
    changes = {
        "weight": UniformWeight(),
        "kl": Kl(),
        "penalty": None,
        "tokens": None,
    }
    plain = method.model_copy(update=changes)
    plan = prepare(plain, step)
    return first_update(plain, plan, step.group, max_completion_length).coef


def step_effects(
    learner: Learner,
    rollouts: Rollouts,
    step: StepTensors,
    method: Method,
    spec: EffectWeight,
) -> Tensor:
    """Effects (N, T) of the tokens on `spec.outcome` if all rows make one update of the unweighted method, from the present state.

    0 in the first step of an optimizer that divides by the root of squared gradients: its step hardly depends on the gradient's size.

    Raises:
        UserError: The model is sharded, or the optimizer cannot be differentiated.
    """
    parameters = learner.parameters
    blank: list[Tensor | None] = [None] * len(parameters)
    if ComingStep(learner.optimizer, parameters, blank).is_first:
        return torch.zeros_like(step.logp)
    before = rollouts.input_ids.shape[1] - rollouts.completion_ids.shape[1]
    coef = unweighted_coefficients(method, step, learner.max_new_tokens)
    found = effects(
        learner.scorer.model,
        rollouts.input_ids,
        pad(rollouts.completion_mask, (before, 0)),
        pad(coef, (before, 0)),
        learner.optimizer,
        Outcome(kind=spec.outcome, radius=spec.radius),
        rollouts.attention_mask,
        learner.scorer.temperature,
        max_grad_norm=learner.max_grad_norm,
        check="off",
    )
    return found[spec.outcome][:, before:].to(step.logp)
