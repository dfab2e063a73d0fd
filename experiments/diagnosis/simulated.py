"""Healthy trainings by rewards, simulated from single completions: what chance alone does with few groups in a step."""

from __future__ import annotations

import numpy as np
import pandas as pd

GROUPS = (1, 2, 8, 64)
"""Groups of completions in a step."""
SIZE = 8
"""Completions in a group."""
KINDS = ("learns", "hard", "stays")
"""What becomes of the rate of right answers: 0.3 → 0.75, 0.03 → 0.15, or 0.4 throughout."""
_RATES = {"learns": (0.3, 0.75), "hard": (0.03, 0.15), "stays": (0.4, 0.4)}


def simulated(groups: int, steps: int, seed: int, kind: str = "learns") -> pd.DataFrame:
    """Canonical quantities of a run (index: the step) whose prompts differ in difficulty.

    Each completion is right with its prompt's rate, which is Beta distributed around that of the step with a total of 2. The gradient
    norm of groups with equal rewards is 0. Entropy, length and KL have the noise of a mean over `groups`·SIZE completions.
    """
    random = np.random.default_rng([seed, groups, steps])
    learned = 1 - np.exp(-5 * np.arange(1, steps + 1) / steps)
    start, end = _RATES[kind]
    rate = start + (end - start) * learned
    prompt_rates = random.beta(
        np.maximum(2 * rate, 0.02)[:, None],
        np.maximum(2 * (1 - rate), 0.02)[:, None],
        (steps, groups),
    )
    right = random.binomial(SIZE, prompt_rates)
    alive = (right > 0) & (right < SIZE)
    spread = np.sqrt(right / SIZE * (1 - right / SIZE))
    noise = random.normal(size=(4, steps)) / np.sqrt(groups * SIZE)
    alive_share = alive.mean(1)
    return pd.DataFrame(
        {
            "reward": right.mean(1) / SIZE,
            "reward_std": spread.mean(1),
            "dead_groups": 1 - alive_share,
            "grad_norm": 0.4
            * np.sqrt(alive_share)
            * np.exp(random.normal(0, 0.15 + 0.4 / np.sqrt(groups), steps)),
            "entropy": (0.2 + 0.6 * np.exp(-3 * learned)) * np.exp(noise[0]),
            "kl": 0.05 * learned * np.exp(2 * noise[1]) + 1e-5,
            "length": 300 * (1 + 0.3 * learned) * np.exp(1.5 * noise[2]),
            "truncated": random.binomial(groups * SIZE, 0.03, steps) / (groups * SIZE),
            "lr": np.full(steps, 1e-6),
        },
        index=pd.RangeIndex(1, steps + 1, name="step"),
    )
