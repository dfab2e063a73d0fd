"""Simulated training logs with TRL's keys: healthy ones, and ones with a symptom planted at a known step."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd


def healthy(steps: int = 200, seed: int = 0, rate: float = 40.0) -> pd.DataFrame:
    """A run that learns: reward rises and levels off, entropy falls to a fifth, the gradient norm is log-normal."""
    rng = np.random.default_rng(seed)
    t = np.arange(1, steps + 1)
    learned = 1 - np.exp(-t / rate)
    reward = 0.25 + 0.5 * learned + rng.normal(0, 0.05, steps)
    entropy = 0.2 + 0.8 * np.exp(-t / rate) + rng.normal(0, 0.02, steps)
    return pd.DataFrame(
        {
            "step": t,
            "reward": reward,
            "reward_std": 0.3 + rng.normal(0, 0.02, steps),
            "grad_norm": 0.4 * np.exp(rng.normal(0, 0.25, steps)),
            "entropy": np.maximum(entropy, 0.02),
            "kl": 0.05 * learned * np.exp(rng.normal(0, 0.2, steps)),
            "completions/mean_length": 120 * np.exp(rng.normal(0, 0.05, steps)),
            "completions/clipped_ratio": np.clip(rng.normal(0.02, 0.01, steps), 0, 1),
            "frac_reward_zero_std": np.clip(0.1 + 0.2 * learned + rng.normal(0, 0.05, steps), 0, 1),
            "clip_ratio/low_mean": np.abs(rng.normal(0.01, 0.005, steps)),
            "clip_ratio/high_mean": np.abs(rng.normal(0.01, 0.005, steps)),
            "sampling/sampling_logp_difference/mean": np.abs(rng.normal(0.04, 0.005, steps)),
            "learning_rate": np.full(steps, 1e-6),
        }
    )


def write(frame: pd.DataFrame, folder: Path) -> Path:
    """The frame as the trainer_state.json of transformers' trainers."""
    file = folder / "trainer_state.json"
    file.write_text(json.dumps({"log_history": frame.to_dict("records")}))
    return file
