"""Rule for spikes of the gradient norm, shared by the recorder and the analysis."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

WINDOW = 50
MINIMUM = 10


def robust_z(history: Sequence[float], value: float) -> float:
    """Robust z-score (value − median)/(1.4826·MAD) against the last `WINDOW` values of `history`.

    Applied to the natural logarithm of gradient norms, which makes it independent of their scale.

    Returns:
        The score; NaN with fewer than `MINIMUM` finite values. If the MAD is zero, 0 at the median and ±inf otherwise.
    """
    recent = [v for v in history[-WINDOW:] if math.isfinite(v)]
    if len(recent) < MINIMUM or not math.isfinite(value):
        return math.nan
    median = statistics.median(recent)
    scale = 1.4826 * statistics.median([abs(v - median) for v in recent])
    if scale == 0:
        return 0.0 if value == median else math.copysign(math.inf, value - median)
    return (value - median) / scale
