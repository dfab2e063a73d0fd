"""Rules shared by the recorders, the importers and the analysis: spikes of the gradient norm, and the sampler's log-probabilities.

With tokens drawn from the sampler's policy μ and r = π/μ, π the trainer's policy, KL(μ‖π) is estimated by k1 = −ln r,
k2 = (ln r)²/2 and k3 = r − 1 − ln r. A mean hides a few tokens that differ much, so the share of ratios outside a band is
given as well.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

WINDOW = 50
MINIMUM = 10
"""Steps of the window of `robust_z`, and the fewest that it needs."""
BAND = (0.9, 1.1)
"""Ratios π/μ outside are counted."""
QUANTITIES = ("outside", "k1", "k2", "k3")
POSITIVE = 1e-4
"""Rounding that a log-probability of 0 may have [nats]."""
CERTAIN = -0.1
"""Where the trainer's log-probability is below this, a sampler's of exactly 0 is wrong [nats]."""
FEWEST = 16
"""Tokens from which on equal log-probabilities are no coincidence."""


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


def mismatch(logp: NDArray[np.floating], sampler: NDArray[np.floating]) -> dict[str, NDArray[np.float64]]:
    """QUANTITIES of each token (n,): `outside` (0 or 1), k1, k2, k3 [nats]."""
    x = np.asarray(logp, dtype=np.float64) - np.asarray(sampler, dtype=np.float64)
    ratio = np.exp(x)
    outside = (ratio < BAND[0]) | (ratio > BAND[1])
    return {"outside": outside.astype(float), "k1": -x, "k2": x * x / 2, "k3": np.expm1(x) - x}


def sampler_values(logp: NDArray[np.floating], sampler: NDArray[np.floating]) -> dict[str, float]:
    """What the health rules judge of a step's log-probabilities (n,) [nats], of tokens where both are known; empty without any."""
    known = np.isfinite(logp) & ~np.isnan(sampler)
    if not known.any():
        return {}
    logp, sampler = logp[known], sampler[known]
    share, _ = impossible(logp, sampler)
    gap, outside = np.abs(logp - sampler), mismatch(logp, sampler)["outside"].mean()
    largest = float(np.exp(np.minimum(gap.max(), 700)))
    return {
        "sampler_impossible": share,
        "sampler_outside": float(outside),
        "mismatch": float(gap.mean()),
        "ratio_max": largest,
    }


def impossible(logp: NDArray[np.floating], sampler: NDArray[np.floating]) -> tuple[float, str]:
    """The share of a step's tokens whose sampler log-probability cannot be right, and why; (0, "") if all may be.

    It cannot be above 0, exactly 0 where the trainer's is below CERTAIN, or the same for all tokens while the trainer's
    differ. `logp` is the trainer's ln π, `sampler` the sampler's ln μ, (n,) [nats] each.
    """
    theirs, ours = np.asarray(sampler, dtype=np.float64), np.asarray(logp, dtype=np.float64)
    if len(theirs) >= FEWEST and np.ptp(theirs) == 0 and np.ptp(ours) > 0:
        return 1.0, f"all are {theirs[0]:g}"
    positive, zero = theirs > POSITIVE, (theirs == 0) & (ours < CERTAIN)
    reasons = [text for bad, text in ((positive, "above 0"), (zero, "exactly 0")) if bad.any()]
    return float((positive | zero).mean()) if len(theirs) else 0.0, ", ".join(reasons)
