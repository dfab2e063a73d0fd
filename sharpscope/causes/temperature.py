"""The temperature at which tokens were drawn, by maximum likelihood from what a trace has of their distributions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

GRID = [float(round(heat, 3)) for heat in np.geomspace(0.1, 4.0, 186)]
"""Temperatures that are tried, as multiples of the policy's, 2 % apart."""
ROUNDS = 12
"""Fixed-point rounds for the two levels; the change is below 1e-3 then."""

MOST_OTHERS = 12.0
"""Largest ln m: that of a large vocabulary. Rounding of a Σp² near 1 would give more."""


def log_partition(tokens: pd.DataFrame, power: float) -> np.ndarray:
    """Estimate of ln Σ_j p_j^power of each token's distribution [nats].

    Of the distribution H and Σp² are known. A distribution of two levels has both: one token of probability p, and m others
    of (1 − p)/m each. Its ln Σ_j p_j^power is exact for power 1, its slope there, and for power 2.
    """
    return _Levels.of(tokens).log_partition(power)


@dataclass(frozen=True, kw_only=True)
class _Levels:
    """Tokens' distributions as two levels: ln p of the one, ln of the sum and ln m of the others (N,)."""

    likeliest: np.ndarray
    left: np.ndarray
    others: np.ndarray

    @classmethod
    def of(cls, tokens: pd.DataFrame) -> _Levels:
        """The levels that fit entropy and Σp², found once for all powers."""
        likeliest, others = _two_levels(
            tokens["entropy"].to_numpy(float), tokens["collision"].to_numpy(float)
        )
        return cls(likeliest=np.log(likeliest), left=np.log1p(-likeliest), others=others)

    def log_partition(self, power: float) -> np.ndarray:
        """Ln Σ_j p_j^power (N,)."""
        return np.logaddexp(power * self.likeliest, (1 - power) * self.others + power * self.left)


def _two_levels(entropy: np.ndarray, collision: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The probability p and ln m of the two levels with this entropy [nats] and collision Σp²."""
    likeliest = np.clip(np.sqrt(collision), 1e-9, 1 - 1e-9)
    others = np.zeros_like(likeliest)
    for _ in range(ROUNDS):
        left = 1 - likeliest
        own = -likeliest * np.log(likeliest) - left * np.log(left)
        others = np.clip((entropy - own) / left, 0.0, MOST_OTHERS)
        rest = np.square(left) * np.exp(-others)
        likeliest = np.clip(np.sqrt(np.maximum(collision - rest, 0.0)), 1e-9, 1 - 1e-9)
    return likeliest, others


@dataclass(frozen=True, kw_only=True)
class Heat:
    """A temperature as a multiple of the policy's, and the share of ln μ − ln π that it explains."""

    temperature: float
    explained: float


def drawn_temperature(tokens: pd.DataFrame) -> float:
    """The temperature, as a multiple of the policy's, at which these tokens are likeliest.

    ln μ = ln π/T − ln Σ_j π_j^(1/T) for a sampler at T times the policy's temperature. Its sum over tokens is concave in
    1/T, so that the best temperature of the grid is found by comparing neighbors in its middle.
    """
    levels = _Levels.of(tokens)
    logp = tokens["logp"].to_numpy(float)

    def likelihood(heat: float) -> float:
        return float(_gap_at(logp, levels, heat).sum())

    low, high = 0, len(GRID) - 1
    while low < high:
        middle = (low + high) // 2
        if likelihood(GRID[middle]) >= likelihood(GRID[middle + 1]):
            high = middle
        else:
            low = middle + 1
    return GRID[low]


def told_temperature(tokens: pd.DataFrame, gap: np.ndarray) -> Heat:
    """The temperature that explains `gap` = ln μ − ln π of these tokens best, by least squares."""
    levels = _Levels.of(tokens)
    logp = tokens["logp"].to_numpy(float)
    left = [float(np.square(gap - _gap_at(logp, levels, heat)).sum()) for heat in GRID]
    best = int(np.argmin(left))
    return Heat(temperature=GRID[best], explained=1 - left[best] / float(gap @ gap))


def _gap_at(logp: np.ndarray, levels: _Levels, heat: float) -> np.ndarray:
    """Ln μ − ln π of the tokens for a sampler at `heat` times the policy's temperature."""
    return (1 / heat - 1) * logp - levels.log_partition(1 / heat)
