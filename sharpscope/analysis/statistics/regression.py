"""A slope with controls over clustered rows, from each cluster's moments alone, so that rows can be streamed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sharpscope.analysis.statistics.intervals import BCA_FROM, Interval, bootstrap_interval
from sharpscope.analysis.statistics.permutation import Alternative, sign_flip_interval, sign_flip_p


def weighted_ranks(values: NDArray[np.floating], weight: NDArray[np.floating]) -> NDArray[np.float64]:
    """(n,) mid-ranks in (0, 1): the share of weight below plus half of the weight that ties."""
    data, w = np.asarray(values, dtype=np.float64), np.asarray(weight, dtype=np.float64)
    levels, key = np.unique(data, return_inverse=True)
    mass = np.bincount(key, weights=w, minlength=len(levels))
    below = np.cumsum(mass) - mass
    return np.asarray((below + mass / 2)[key] / w.sum())


def cluster_moments(
    y: NDArray[np.floating],
    x: NDArray[np.floating],
    controls: Sequence[NDArray[np.floating]],
    weight: NDArray[np.floating] | None = None,
) -> NDArray[np.float64] | None:
    """Moments of one cluster about its own means (fixed effects): (p, p), in the order x, controls, y.

    Args:
        y, x: (n,) rows of the cluster.
        controls: (n,) each.
        weight: (n,) ≥ 0, e.g. inverse drawing probabilities; scaled to sum to n. None: ones.

    Returns:
        (p, p) sums of weighted products; None for fewer than 2 rows.
    """
    table = np.column_stack([x, *controls, y]).astype(np.float64)  # (n, p)
    if len(table) < 2:
        return None
    w = np.ones(len(table)) if weight is None else np.asarray(weight, dtype=np.float64) * len(table) / np.sum(weight)
    centered = table - (w @ table) / w.sum()
    return np.asarray((centered * w[:, None]).T @ centered)


@dataclass(frozen=True)
class ClusterSlope:
    """Slope of y on x given controls, pooled over clusters from their moments (C, p, p).

    Tests flip the signs of the clusters' scores Σ x̃(ỹ − b·x̃), x̃ and ỹ being what the controls leave of x and y: the
    wild score bootstrap (Kline & Santos 2012), here with all sign patterns where there are few clusters.
    """

    moments: NDArray[np.float64]

    @property
    def clusters(self) -> int:
        """Number of clusters."""
        return len(self.moments)

    @property
    def value(self) -> float:
        """The pooled slope; NaN if x does not vary beyond the controls."""
        return float(_slopes(self.moments.mean(axis=0)[None])[0])

    def p(self, slope: float = 0.0, alternative: Alternative = "two-sided") -> float:
        """p-value of "the slope is `slope`"."""
        cross, square = self._partial()
        return sign_flip_p(cross - slope * square, alternative)

    def interval(self) -> Interval | None:
        """BCa over clusters; below 15 clusters the slopes that the sign-flip test does not reject, None if it cannot reject."""
        if self.clusters >= BCA_FROM:
            shape = self.moments.shape[1:]
            flat = self.moments.reshape(self.clusters, -1)
            return bootstrap_interval(flat, lambda means: _slopes(means.reshape(-1, *shape)))
        cross, square = self._partial()
        ends = sign_flip_interval(cross, square)
        return None if ends is None else Interval(*ends, "sign-flip")

    def _partial(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Per cluster Σ x̃ỹ and Σ x̃² (C,), the controls' effect taken out with pooled coefficients."""
        pooled = self.moments.mean(axis=0)
        inner = pooled[1:-1, 1:-1]
        gx = np.linalg.pinv(inner) @ pooled[1:-1, 0]
        gy = np.linalg.pinv(inner) @ pooled[1:-1, -1]
        left = np.concatenate([[1.0], -gx, [0.0]])  # x̃ = left·(x, controls, y)
        right = np.concatenate([[0.0], -gy, [1.0]])
        return self.moments @ right @ left, self.moments @ left @ left


def _slopes(moments: NDArray[np.floating]) -> NDArray[np.float64]:
    """First coefficient of y on (x, controls) for each of (B, p, p) moments."""
    design, target = moments[:, :-1, :-1], moments[:, :-1, -1]
    return np.asarray((np.linalg.pinv(design, hermitian=True) @ target[..., None])[:, 0, 0])
