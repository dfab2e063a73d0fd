"""Records of prime-rl, and rows of a table of tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from sharpscope.integrations.importers import Labels

LABELS = Labels("grpo", "task", 3)


def write_lines(path: Path, records: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records), "utf-8")
    return path


def packed(rng: np.random.Generator, step: int, **changes: Any) -> dict[str, Any]:
    """A record of prime-rl's export: two samples in one sequence, the second with a gap in its loss mask."""
    mask = [0, 0, 1, 1, 1, 0, 1, 1, 0, 1]
    sampler, trainer = (-rng.uniform(0.1, 3, len(mask)) for _ in range(2))
    high = [bool(x) for x in (trainer > sampler + 1) & (np.array(mask) > 0)]
    record = {
        "schema_version": 1,
        "step": step,
        "rank": 0,
        "env_name": "e",
        "position_ids": [*range(5), *range(5)],
        "token_ids": rng.integers(2, 37, len(mask)).tolist(),
        "loss_mask": [bool(x) for x in mask],
        "advantages": [0.5] * 5 + [-1.5] * 5,
        "inference_logprobs": sampler.tolist(),
        "trainer_logprobs": trainer.tolist(),
        "entropy": rng.uniform(0, 2, len(mask)).tolist(),
        "importance_ratio": np.exp(trainer - sampler).tolist(),
        "is_masked": high,
        "is_masked_high": high,
        "is_masked_low": [False] * 10,
        "rl_weights": rng.uniform(0.5, 2, 10).tolist(),
    }
    return record | changes


ROWS = [
    {
        "s": 1,
        "ids": [5, 6, 7],
        "lp": [-0.1, -0.2, -0.3],
        "adv": 0.5,
        "m": [1, 0, 1],
        "prompt_ids": [2, 3],
        "group": "a",
    },
    {"s": 1, "ids": [8, 9], "lp": [-1.0, -2.0], "adv": [0.25, -0.25], "m": [1, 1], "prompt_ids": [4], "group": "b"},
    {"s": 3, "ids": [8, 9], "lp": [-1.5, -2.5], "adv": 1.0, "m": [1, 1], "prompt_ids": [4], "group": "a"},
]


NAMES = {"step": "s", "token_id": "ids", "logp": "lp", "advantage": "adv", "mask": "m"}
