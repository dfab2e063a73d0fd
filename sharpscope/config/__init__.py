"""Configuration of runs as pydantic models. This package does not import torch."""

from __future__ import annotations

from sharpscope.config.base import Schedule, SettingInfo, Spec, known_settings, settings_of, validate
from sharpscope.config.method import Method
from sharpscope.config.methods import (
    constants,
    control_label,
    control_names,
    describe,
    is_reference,
    method_label,
    method_names,
    method_rotation_bound,
    named_method,
    parse_methods,
    reference_method,
    rotation_bound,
    same_at_one_update,
)
from sharpscope.config.reading import merge, parse_overrides, read_yaml, to_yaml
from sharpscope.config.run import (
    ClaimsSpec,
    ForkSpec,
    RolloutSpec,
    RunConfig,
    build_config,
    config_data,
    make_config,
    read_recorded,
    recorded_settings,
)
from sharpscope.config.token_weights import TokenWeight, weight_bounds
