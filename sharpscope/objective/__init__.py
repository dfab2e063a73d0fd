"""The objective: rewards to advantages, tokens to weights, log-probabilities to a loss.

Order of use, once a step: `estimate_advantages`, `prepare`; once an update: `token_normalizer`; once a microbatch:
`policy_loss`.
"""

from __future__ import annotations

from sharpscope.config import (
    control_names,
    describe,
    method_label,
    method_names,
    named_method,
    reference_method,
    register_shaping,
    register_token_weight,
)
from sharpscope.config.method import Method, passes_of
from sharpscope.config.token_weights import Schedule, TokenWeight, token_weight_kinds
from sharpscope.objective.advantages import estimate_advantages, group_advantages, informative_groups, overlong_penalty
from sharpscope.objective.aggregate import gradient_mass, token_normalizer
from sharpscope.objective.calibration import calibrate
from sharpscope.objective.plan import prepare
from sharpscope.objective.statistics import WeightSummary, summarize_weights
from sharpscope.objective.surrogates import EntropyControl, entropy_bonus, gradient_killed, k3, kl_reward, policy_loss
from sharpscope.objective.token_weights import token_weights
from sharpscope.objective.values import LossOutput, Plan, StepTensors, per_token

__all__ = [
    "EntropyControl",
    "LossOutput",
    "Method",
    "Plan",
    "Schedule",
    "StepTensors",
    "TokenWeight",
    "WeightSummary",
    "calibrate",
    "control_names",
    "describe",
    "entropy_bonus",
    "estimate_advantages",
    "gradient_killed",
    "gradient_mass",
    "group_advantages",
    "informative_groups",
    "k3",
    "kl_reward",
    "method_label",
    "method_names",
    "named_method",
    "overlong_penalty",
    "passes_of",
    "per_token",
    "policy_loss",
    "prepare",
    "reference_method",
    "register_shaping",
    "register_token_weight",
    "summarize_weights",
    "token_normalizer",
    "token_weight_kinds",
    "token_weights",
]
