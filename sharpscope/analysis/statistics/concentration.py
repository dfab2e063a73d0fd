"""How unequally a total is shared out: Lorenz curve, Gini coefficient, share of the largest."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def lorenz(
    values: NDArray[np.floating], points: int = 101, weights: NDArray[np.floating] | None = None
) -> NDArray[np.float64]:
    """Lorenz curve of `values` (n,) ≥ 0: share of the total held by the smallest 0, 1/(points − 1), …, 1 of the members.

    A member with weight w counts as w members.

    Returns:
        (points,) in [0, 1]; the diagonal if the total is 0.
    """
    grid = np.linspace(0.0, 1.0, points)
    ordered, count = _ordered(values, weights)
    total = ordered.sum()
    if not total > 0:
        return grid
    held = np.concatenate([[0.0], np.cumsum(ordered) / total])
    members = np.concatenate([[0.0], np.cumsum(count) / count.sum()])
    return np.interp(grid, np.linspace(0.0, 1.0, len(held)) if weights is None else members, held)


def gini(values: NDArray[np.floating], weights: NDArray[np.floating] | None = None) -> float:
    """Gini coefficient of `values` (n,) ≥ 0: 0 if all are equal, (n − 1)/n if one holds everything; NaN for a total of 0.

    A member with weight w counts as w members of which its value is shared.
    """
    ordered, count = _ordered(values, weights)
    total = ordered.sum()
    if not total > 0:
        return float("nan")
    if weights is None:
        n = len(ordered)
        return float(2 * np.dot(np.arange(1, n + 1), ordered) / (n * total) - (n + 1) / n)
    held = np.concatenate([[0.0], np.cumsum(ordered) / total])
    return float(1 - np.dot(count / count.sum(), held[1:] + held[:-1]))


def top_share(values: NDArray[np.floating], share: float = 0.1, weights: NDArray[np.floating] | None = None) -> float:
    """Part of the total of `values` (n,) ≥ 0 held by the largest ⌈share·n⌉; NaN without a total.

    With weights: by the fewest largest whose weights sum to at least `share` of all.
    """
    data = np.asarray(values, dtype=np.float64)
    if weights is None and data.sum() > 0:
        largest = int(np.ceil(share * len(data)))
        return float(np.partition(data, len(data) - largest)[len(data) - largest :].sum() / data.sum())
    ordered, count = _ordered(data, weights)
    total = ordered.sum()
    if not total > 0:
        return float("nan")
    above = np.cumsum(count[::-1]) - count[::-1]  # weight of the larger members
    few = above < share * count.sum() * (1 - 1e-12)
    return float(ordered[::-1][few].sum() / total)


def _ordered(
    values: NDArray[np.floating], weights: NDArray[np.floating] | None
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Members by ascending value: what each contributes to the total, and the weight of each."""
    data = np.asarray(values, dtype=np.float64)
    count = np.ones(len(data)) if weights is None else np.asarray(weights, dtype=np.float64)
    order = np.argsort(data, kind="stable")
    return (data * count)[order], count[order]
