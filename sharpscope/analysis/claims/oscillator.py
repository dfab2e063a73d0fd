"""Fits of a reward curve: a damped oscillator released at rest, and its overdamped limit, a single exponential.

r(t) = r∞ − D·g(t), where g solves m·g″ + γ·g′ + k·g = 0 with g(0) = 1, g′(0) = 0 (arXiv 2606.30789). With
ω = √(k/m) and ζ = γ/(2√(mk)), g depends on ωt and ζ alone; for ζ → ∞ at fixed k/γ it is exp(−(k/γ)t). r∞ and D enter
linearly, so a grid over (ω, ζ) with linear least squares at each point finds the best fit without a starting guess.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

FOLDS = 5
SMALLEST_ZETA, LARGEST_ZETA = 0.05, 20.0
FASTEST_SWING = 1.5
"""Frequency above which a swing is not told from noise, about four steps a period [1/step]."""


@dataclass(frozen=True)
class Fit:
    """The best curve of a family.

    Attributes:
        limit, drop: r∞ and D.
        parameters: (ω, ζ) [1/step, 1], or (rate,) [1/step].
        curve: (T,) fitted values.
        mse: mean squared error on the points fitted.
    """

    limit: float
    drop: float
    parameters: tuple[float, ...]
    curve: Array
    mse: float


def oscillator_shapes(t: Array, omega: Array, zeta: Array) -> Array:
    """g (M, T) of a unit oscillator released at rest; omega, zeta (M,). Near ζ = 1 the critical form is taken."""
    w, z = omega[:, None], zeta[:, None]
    x = w * t  # (M, T)
    under = np.sqrt(np.maximum(1 - z**2, 1e-12))
    over = np.sqrt(np.maximum(z**2 - 1, 1e-12))
    swinging = np.exp(-z * x) * (np.cos(under * x) + z / under * np.sin(under * x))
    slow, fast = z - over, z + over  # decay rates over ω
    creeping = (fast * np.exp(-slow * x) - slow * np.exp(-fast * x)) / (2 * over)
    critical = np.exp(-x) * (1 + x)
    return np.asarray(np.where(np.abs(z - 1) < 1e-3, critical, np.where(z < 1, swinging, creeping)))


def fit_oscillator(t: Array, reward: Array, keep: NDArray[np.bool_] | None = None) -> Fit:
    """Least squares over (ω, ζ, r∞, D); `keep` (T,) marks the points fitted, the curve covers all."""
    span = float(t[-1] - t[0]) or 1.0
    omega, zeta = np.geomspace(0.5 / span, 40.0, 40), np.geomspace(SMALLEST_ZETA, LARGEST_ZETA, 20)
    best = (0.0, 0.0)
    for _ in range(3):
        grid_w, grid_z = (axis.ravel() for axis in np.meshgrid(omega, zeta))
        possible = (grid_w <= FASTEST_SWING) | (grid_z > 1)
        grid_w, grid_z = grid_w[possible], grid_z[possible]
        found = _best(oscillator_shapes(t - t[0], grid_w, grid_z), reward, keep)
        best = (float(grid_w[found]), float(grid_z[found]))
        omega = _closer(omega, best[0], 9)
        zeta = np.clip(_closer(zeta, best[1], 9), SMALLEST_ZETA, LARGEST_ZETA)
    shape = oscillator_shapes(t - t[0], np.array(best[:1]), np.array(best[1:]))[0]
    return _linear(shape, reward, keep, best)


def fit_exponential(t: Array, reward: Array, keep: NDArray[np.bool_] | None = None) -> Fit:
    """Least squares over (rate, r∞, D) of r∞ − D·exp(−rate·t)."""
    span = float(t[-1] - t[0]) or 1.0
    rate = np.geomspace(0.1 / span, 2.0, 80)
    best = 0.0
    for _ in range(3):
        shapes = np.exp(-rate[:, None] * (t - t[0]))
        best = float(rate[_best(shapes, reward, keep)])
        rate = _closer(rate, best, 15)
    return _linear(np.exp(-best * (t - t[0])), reward, keep, (best,))


def blocks(count: int) -> NDArray[np.int_]:
    """(count,) fold of each step: short blocks dealt to FOLDS in turn, so that every part of a curve but its start is predicted.

    The first block is in no fold (−1): it is always fitted. Without it a fast drop is extrapolated without bound, to a first
    reward of −1,000 where rewards end at −3, and that one point decides.
    """
    block = np.arange(count) // max(2, count // 40)
    return np.where(block == 0, -1, (block - 1) % FOLDS)


def prediction_errors(t: Array, reward: Array) -> tuple[float, float]:
    """Mean squared error of (oscillator, exponential) on blocks of steps that were not fitted; the first block is not scored."""
    fold = blocks(len(t))
    errors = np.zeros(2)
    for k in range(FOLDS):
        keep = fold != k
        for i, fit in enumerate((fit_oscillator, fit_exponential)):
            errors[i] += float(np.sum((fit(t, reward, keep).curve - reward)[~keep] ** 2))
    scored = int((fold >= 0).sum())
    return float(errors[0] / scored), float(errors[1] / scored)


def noise_variance(reward: Array) -> float:
    """Variance of the noise around a smooth curve, from second differences: Σ(r_{t−1} − 2r_t + r_{t+1})²/(6(T − 2))."""
    return float(np.mean(np.diff(reward, 2) ** 2) / 6)


def explained(fit: Fit, reward: Array) -> tuple[float, float]:
    """R² of a fit, and R² with the noise taken out of both error and variance (NaN where all variance is noise)."""
    total, noise = float(np.var(reward)), noise_variance(reward)
    plain = 1 - fit.mse / total if total > 0 else float("nan")
    signal = total - noise
    return plain, 1 - max(0.0, fit.mse - noise) / signal if signal > 0 else float("nan")


def _closer(axis: Array, best: float, points: int) -> Array:
    step = (axis[1] / axis[0]) if len(axis) > 1 and axis[1] > axis[0] else 1.1
    return np.geomspace(best / step, best * step, points)


def _moments(shapes: Array, reward: Array, keep: NDArray[np.bool_] | None) -> tuple[Array, Array, Array]:
    w = np.ones(len(reward)) if keep is None else keep.astype(np.float64)
    centred = reward - (w @ reward) / w.sum()
    means = shapes @ w / w.sum()
    square = (shapes**2) @ w - means**2 * w.sum()
    return means, shapes @ (w * centred), np.maximum(square, 1e-12)


def _best(shapes: Array, reward: Array, keep: NDArray[np.bool_] | None) -> int:
    _, cross, square = _moments(shapes, reward, keep)
    return int(np.argmax(cross**2 / square))


def _linear(shape: Array, reward: Array, keep: NDArray[np.bool_] | None, parameters: tuple[float, ...]) -> Fit:
    means, cross, square = _moments(shape[None], reward, keep)
    used = np.ones(len(reward), dtype=bool) if keep is None else keep
    slope = float(cross[0] / square[0])
    limit = float(reward[used].mean() - slope * means[0])
    curve = limit + slope * shape
    return Fit(limit, -slope, parameters, curve, float(np.mean((curve - reward)[used] ** 2)))
