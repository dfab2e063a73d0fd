"""Configuration of runs as pydantic models. This package does not import torch."""

from __future__ import annotations

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
