"""What counts as a spike of the gradient norm: one rule for recorder and reader."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

WINDOW = 50
MINIMUM = 10


def robust_z(history: Sequence[float], value: float) -> float:
    """(value − median)/(1.4826·MAD) of the last `WINDOW` values of `history`; NaN with fewer than `MINIMUM` of them.

    Applied to the natural logarithm of gradient norms, so that it does not depend on their scale. A MAD of zero gives
    ±inf for a value off the median and 0 on it.
    """
    recent = [v for v in history[-WINDOW:] if math.isfinite(v)]
    if len(recent) < MINIMUM or not math.isfinite(value):
        return math.nan
    median = statistics.median(recent)
    spread = 1.4826 * statistics.median([abs(v - median) for v in recent])
    if spread == 0:
        return 0.0 if value == median else math.copysign(math.inf, value - median)
    return (value - median) / spread
