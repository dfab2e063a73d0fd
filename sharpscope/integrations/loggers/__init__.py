"""Export of scalars (tables steps, updates, eval and probes) to TensorBoard, Weights & Biases and trackio.

Everything stays on the machine unless `online` is set for Weights & Biases.
"""

from sharpscope.integrations.loggers.export import LOGGERS, ScalarReader, export, scalars

__all__ = ["LOGGERS", "ScalarReader", "export", "scalars"]
