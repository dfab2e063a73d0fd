"""Scalar tables of a trace (steps, eval, probes) for TensorBoard, Weights & Biases and trackio, each an extra.

Nothing leaves the machine unless Weights & Biases is asked for by `online`.
"""

from sharpscope.integrations.loggers.export import LOGGERS, export
from sharpscope.integrations.loggers.scalars import ScalarReader, scalars

__all__ = ["LOGGERS", "ScalarReader", "export", "scalars"]
