"""Configuration of runs as pydantic models. This package does not import torch."""

from __future__ import annotations

from sharpscope.config.base import Spec
from sharpscope.config.claims import ClaimsSpec
from sharpscope.config.custom_weights import find_token_weight, register_shaping, register_token_weight
from sharpscope.config.forks import Comparison, ForkSpec, arm_method, arm_name
from sharpscope.config.method import Method, passes_of
from sharpscope.config.named_methods import (
    control_label,
    control_names,
    describe,
    method_label,
    method_names,
    named_method,
)
from sharpscope.config.policy import PolicySpec, RolloutSpec, SamplingSpec
from sharpscope.config.probes import ProbesSpec
from sharpscope.config.reference import (
    method_rotation_bound,
    reference_method,
    rotation_bound,
    same_at_one_update,
    weight_rotation_bound,
)
from sharpscope.config.run import (
    RunConfig,
    build_config,
    check_keys,
    default_preset,
    explain_fields,
    explain_part,
    kinds_of,
    merge,
    parse_override,
    parse_overrides,
    part_model,
    read_yaml,
    resolve_method,
    to_yaml,
    type_text,
    validate,
)
from sharpscope.config.tasks import KnightsKnavesSpec, TaskSpec
from sharpscope.config.token_weights import Schedule, TokenWeight, token_weight_kinds

__all__ = [
    "ClaimsSpec",
    "Comparison",
    "ForkSpec",
    "KnightsKnavesSpec",
    "Method",
    "PolicySpec",
    "ProbesSpec",
    "RolloutSpec",
    "RunConfig",
    "SamplingSpec",
    "Schedule",
    "Spec",
    "TaskSpec",
    "TokenWeight",
    "arm_method",
    "arm_name",
    "build_config",
    "check_keys",
    "control_label",
    "control_names",
    "default_preset",
    "describe",
    "explain_fields",
    "explain_part",
    "find_token_weight",
    "kinds_of",
    "merge",
    "method_label",
    "method_names",
    "method_rotation_bound",
    "named_method",
    "parse_override",
    "parse_overrides",
    "part_model",
    "passes_of",
    "read_yaml",
    "reference_method",
    "register_shaping",
    "register_token_weight",
    "resolve_method",
    "rotation_bound",
    "same_at_one_update",
    "to_yaml",
    "token_weight_kinds",
    "type_text",
    "validate",
    "weight_rotation_bound",
]
