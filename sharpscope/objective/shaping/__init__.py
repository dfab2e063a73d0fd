"""From a shaping (data) to weights (tensors): curves of a token's own statistics, batch-wide ones, and controls around
them.
"""

from sharpscope.objective.shaping.calibration import calibrate, choose_preset
from sharpscope.objective.shaping.weights import token_weights

__all__ = ["calibrate", "choose_preset", "token_weights"]
