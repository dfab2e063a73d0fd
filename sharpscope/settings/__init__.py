"""What every settings class builds on: validation with clear errors, and reading of YAML and of `--set`. Imports no torch."""

from __future__ import annotations

from sharpscope.settings.base import (
    Schedule,
    SettingInfo,
    Spec,
    known_settings,
    settings_of,
    validate,
)
from sharpscope.settings.reading import merge, parse_overrides, read_yaml, to_yaml
