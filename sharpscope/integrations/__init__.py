"""Recorders for other trainers and loops (`sharpscope.record`), importers of their files, and exports to loggers.

Each part needs its own extra.
"""

from importlib import import_module
from typing import Any

_PARTS = ("importers", "loggers", "trl", "verl")


def __getattr__(name: str) -> Any:
    if name in _PARTS:
        return import_module(f"sharpscope.integrations.{name}")
    raise AttributeError(f"module 'sharpscope.integrations' has no attribute '{name}'")
