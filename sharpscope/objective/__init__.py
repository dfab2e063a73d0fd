"""The objective: rewards to advantages, tokens to weights, log-probabilities to a loss.

Order of use, once a step: `estimate_advantages`, `prepare`; once an update: `token_normalizer`; once a microbatch:
`policy_loss`.
"""

from __future__ import annotations

from sharpscope.config import Method, TokenWeight, method_label, method_names, named_method, reference_method
from sharpscope.objective.advantages import estimate_advantages, group_advantages, informative_groups, overlong_penalty
from sharpscope.objective.loss import (
    EntropyControl,
    entropy_bonus,
    gradient_killed,
    gradient_mass,
    k3,
    kl_reward,
    policy_loss,
    token_normalizer,
)
from sharpscope.objective.plan import WeightSummary, calibrate, prepare, summarize_weights, token_weights
from sharpscope.objective.values import LossOutput, Plan, StepTensors, per_token

__all__ = [
    "EntropyControl",
    "LossOutput",
    "Method",
    "Plan",
    "StepTensors",
    "TokenWeight",
    "WeightSummary",
    "calibrate",
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
    "per_token",
    "policy_loss",
    "prepare",
    "reference_method",
    "summarize_weights",
    "token_normalizer",
    "token_weights",
]
