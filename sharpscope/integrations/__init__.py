"""Recorders for other trainers, and exports of traces to loggers. Each part needs its own extra.

`sharpscope.integrations.trl.record(trainer, out="runs/x")` records a TRL GRPOTrainer; `sharpscope.integrations.loggers`
sends scalar tables to TensorBoard, Weights & Biases or trackio.
"""

from importlib import import_module
from typing import Any

_PARTS = ("importers", "loggers", "trl", "verl")


def __getattr__(name: str) -> Any:
    if name in _PARTS:
        return import_module(f"sharpscope.integrations.{name}")
    raise AttributeError(f"module 'sharpscope.integrations' has no attribute '{name}'")
