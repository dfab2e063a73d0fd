"""Configuration of runs as pydantic models. This package does not import torch."""

from __future__ import annotations

from sharpscope.config.base import Schedule, Setting, Spec, check_keys, settings_of, validate
from sharpscope.config.claims import ClaimsSpec
from sharpscope.config.forks import Comparison, ForkSpec
from sharpscope.config.method import Method
from sharpscope.config.methods import (
    arm_name,
    constants,
    control_label,
    control_names,
    describe,
    method_label,
    method_names,
    named_method,
    parse_method,
    parse_methods,
)
from sharpscope.config.policy import PolicySpec, RolloutSpec, SamplingSpec
from sharpscope.config.probes import ProbesSpec
from sharpscope.config.reading import merge, parse_override, parse_overrides, read_yaml, to_yaml
from sharpscope.config.reference import (
    method_rotation_bound,
    reference_method,
    rotation_bound,
    same_at_one_update,
    weight_rotation_bound,
)
from sharpscope.config.removed import without_none_kinds
from sharpscope.config.run import RunConfig, arm_method, build_config, config_data, make_config, read_recorded
from sharpscope.config.tasks import KnightsKnavesSpec, TaskSpec
from sharpscope.config.token_weights import TokenWeight, find_token_weight, register_token_weight, token_weight_kinds

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
    "Setting",
    "Spec",
    "TaskSpec",
    "TokenWeight",
    "arm_method",
    "arm_name",
    "build_config",
    "check_keys",
    "config_data",
    "constants",
    "control_label",
    "control_names",
    "describe",
    "find_token_weight",
    "make_config",
    "merge",
    "method_label",
    "method_names",
    "method_rotation_bound",
    "named_method",
    "parse_method",
    "parse_methods",
    "parse_override",
    "parse_overrides",
    "read_recorded",
    "read_yaml",
    "reference_method",
    "register_token_weight",
    "rotation_bound",
    "same_at_one_update",
    "settings_of",
    "to_yaml",
    "token_weight_kinds",
    "validate",
    "weight_rotation_bound",
    "without_none_kinds",
]
