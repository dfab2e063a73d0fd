"""Rank correlation: Kendall's τ, granulated over a grid with a permutation test, and weighted ranks."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

PERMUTATIONS = 9_999


def kendall(x: NDArray[np.floating], y: NDArray[np.floating]) -> float:
    """Kendall's τ-a: mean over pairs of sign(Δx)·sign(Δy); NaN for fewer than 2 values. Ties count 0."""
    a, b = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    i, j = np.triu_indices(len(a), 1)
    return float(np.mean(np.sign(a[i] - a[j]) * np.sign(b[i] - b[j]))) if len(i) else float("nan")


def weighted_ranks(values: NDArray[np.floating], weight: NDArray[np.floating]) -> NDArray[np.float64]:
    """(n,) mid-ranks in (0, 1): the share of weight below plus half of the weight that ties."""
    data, w = np.asarray(values, dtype=np.float64), np.asarray(weight, dtype=np.float64)
    levels, key = np.unique(data, return_inverse=True)
    mass = np.bincount(key, weights=w, minlength=len(levels))
    below = np.cumsum(mass) - mass
    return np.asarray((below + mass / 2)[key] / w.sum())


@dataclass(frozen=True)
class Granulated:
    """Granulated Kendall coefficient (Jiang et al. 2020, "Fantastic generalization measures").

    Attributes:
        value: Ψ, mean over axes of `axes`.
        axes: axis → ψ, the mean τ over groups of runs that differ in this axis alone.
        strata: (S,) Ψ of each stratum by itself.
        p_value: two-sided, permuting y within strata.
        smallest_p: what perfect agreement would give: no smaller p can be had from this grid.
        pairs: number of compared pairs.
    """

    value: float
    axes: dict[str, float]
    strata: NDArray[np.float64]
    p_value: float
    smallest_p: float
    pairs: int


def granulated_kendall(
    x: NDArray[np.floating],
    y: NDArray[np.floating],
    axes: dict[str, Sequence[Hashable]],
    stratum: Sequence[Hashable],
    seed: int = 0,
) -> Granulated | None:
    """Rank correlation of x and y between runs of one stratum that differ in one axis only.

    Args:
        x, y: (n,) one value per run.
        axes: axis → its setting in each run (n,).
        stratum: what is held fixed (n,); runs are compared and y is permuted within equal values only.
        seed: of the PERMUTATIONS random orders.

    Returns:
        None if no two runs can be compared.
    """
    pairs = _pairs(axes, stratum)
    if not pairs:
        return None
    first, second, weight, axis = (np.array(column) for column in zip(*pairs, strict=True))
    a, b = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    labels, member = np.unique([repr(s) for s in stratum], return_inverse=True)
    signs = np.sign(a[first] - a[second])

    def psi(values: NDArray[np.float64], sign: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.sign(values[..., first] - values[..., second]) @ (sign * weight)

    orders = _permutations(member, seed)  # (P, n)
    value = float(psi(b, signs))
    drawn, best = psi(b[orders], signs), psi(a[orders], signs)
    agreement = np.sign(b[first] - b[second]) * signs
    by_axis = {name: _weighted_mean(agreement, weight, axis == name) for name in axes if (axis == name).any()}
    in_stratum = [_stratum_psi(agreement, weight, axis, member[first] == s) for s in range(len(labels))]
    return Granulated(
        value,
        by_axis,
        np.array([v for v in in_stratum if v is not None]),
        float(np.mean(np.abs(drawn) >= abs(value) - 1e-12)),
        float(np.mean(np.abs(best) >= abs(psi(a, signs)) - 1e-12)),
        len(pairs),
    )


def _pairs(axes: dict[str, Sequence[Hashable]], stratum: Sequence[Hashable]) -> list[tuple[int, int, float, str]]:
    """(i, j, weight, axis) of runs that differ in one axis alone; groups of an axis, and axes, count equally."""
    groups: dict[str, list[list[tuple[int, int]]]] = {}
    for name in axes:
        others = [axes[other] for other in axes if other != name]
        cells: dict[Hashable, list[int]] = {}
        for run, key in enumerate(zip(stratum, *others, strict=True)):
            cells.setdefault(key, []).append(run)
        result = [
            [(i, j) for i, j in itertools.combinations(runs, 2) if axes[name][i] != axes[name][j]]
            for runs in cells.values()
        ]
        if any(result):
            groups[name] = [group for group in result if group]
    return [
        (i, j, 1 / (len(groups) * len(of_axis) * len(group)), name)
        for name, of_axis in groups.items()
        for group in of_axis
        for i, j in group
    ]


def _permutations(member: NDArray[np.int_], seed: int) -> NDArray[np.int_]:
    """(P, n) orders that move runs within their stratum only; the first is the one seen."""
    inside = [np.flatnonzero(member == s) for s in np.unique(member)]
    rng = np.random.default_rng(seed)
    orders = np.tile(np.arange(len(member)), (PERMUTATIONS + 1, 1))
    for keys in inside:
        orders[1:, keys] = keys[np.argsort(rng.random((PERMUTATIONS, len(keys))), axis=1)]
    return orders


def _weighted_mean(values: NDArray[np.float64], weight: NDArray[np.float64], chosen: NDArray[np.bool_]) -> float:
    return float(np.sum(values[chosen] * weight[chosen]) / np.sum(weight[chosen]))


def _stratum_psi(
    agreement: NDArray[np.float64], weight: NDArray[np.float64], axis: NDArray[np.str_], inside: NDArray[np.bool_]
) -> float | None:
    parts = [_weighted_mean(agreement, weight, inside & (axis == name)) for name in np.unique(axis[inside])]
    return float(np.mean(parts)) if parts else None
