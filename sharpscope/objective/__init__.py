"""The objective: rewards to advantages, tokens to weights, log-probabilities to a loss.

Order of use, once a step: `group_advantages`, `prepare`; once an update: `token_normalizer`; once a microbatch:
`policy_loss`. Names load on first use, so that reading a method's description needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sharpscope.objective.advantages import group_advantages, informative_groups, overlong_penalty
    from sharpscope.objective.aggregate import token_normalizer
    from sharpscope.objective.custom import register_shaping
    from sharpscope.objective.methods import control_names, describe, method_label, method_names, named_method
    from sharpscope.objective.plan import prepare
    from sharpscope.objective.shaping import calibrate, choose_preset, token_weights
    from sharpscope.objective.shaping_spec import Schedule, Shaping, needs_calibration, shaping_kinds, weight_bounds
    from sharpscope.objective.spec import Method, passes_of
    from sharpscope.objective.statistics import WeightSummary, summarize_weights
    from sharpscope.objective.surrogates import gradient_killed, k3, policy_loss
    from sharpscope.objective.values import LossOutput, Plan, StepTensors

_HOME = {
    "advantages": ("group_advantages", "informative_groups", "overlong_penalty"),
    "aggregate": ("token_normalizer",),
    "custom": ("register_shaping",),
    "methods": ("control_names", "describe", "method_label", "method_names", "named_method"),
    "plan": ("prepare",),
    "shaping": ("calibrate", "choose_preset", "token_weights"),
    "shaping_spec": ("Schedule", "Shaping", "needs_calibration", "shaping_kinds", "weight_bounds"),
    "spec": ("Method", "passes_of"),
    "statistics": ("WeightSummary", "summarize_weights"),
    "surrogates": ("gradient_killed", "k3", "policy_loss"),
    "values": ("LossOutput", "Plan", "StepTensors"),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "LossOutput",
    "Method",
    "Plan",
    "Schedule",
    "Shaping",
    "StepTensors",
    "WeightSummary",
    "calibrate",
    "choose_preset",
    "control_names",
    "describe",
    "gradient_killed",
    "group_advantages",
    "informative_groups",
    "k3",
    "method_label",
    "method_names",
    "named_method",
    "needs_calibration",
    "overlong_penalty",
    "passes_of",
    "policy_loss",
    "prepare",
    "register_shaping",
    "shaping_kinds",
    "summarize_weights",
    "token_normalizer",
    "token_weights",
    "weight_bounds",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
