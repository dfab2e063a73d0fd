"""How unequally a total is shared out: Lorenz curve, Gini coefficient, share of the largest."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def lorenz(values: NDArray[np.floating], points: int = 101) -> NDArray[np.float64]:
    """Lorenz curve of `values` (n,) ≥ 0: share of the total held by the smallest 0, 1/(points − 1), …, 1 of the members.

    Returns:
        (points,) in [0, 1]; the diagonal if the total is 0.
    """
    grid = np.linspace(0.0, 1.0, points)
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    total = ordered.sum()
    if not total > 0:
        return grid
    held = np.concatenate([[0.0], np.cumsum(ordered) / total])
    return np.interp(grid, np.linspace(0.0, 1.0, len(held)), held)


def gini(values: NDArray[np.floating]) -> float:
    """Gini coefficient of `values` (n,) ≥ 0: 0 if all are equal, (n − 1)/n if one holds everything; NaN for a total of 0."""
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    n, total = len(ordered), ordered.sum()
    if not total > 0:
        return float("nan")
    return float(2 * np.dot(np.arange(1, n + 1), ordered) / (n * total) - (n + 1) / n)


def top_share(values: NDArray[np.floating], share: float = 0.1) -> float:
    """Part of the total of `values` (n,) ≥ 0 held by the largest ⌈share·n⌉; NaN without a total."""
    data = np.asarray(values, dtype=np.float64)
    total = data.sum()
    count = int(np.ceil(share * len(data)))
    if not total > 0:
        return float("nan")
    return float(np.partition(data, len(data) - count)[len(data) - count :].sum() / total)
