"""Accuracy on fixed prompts: by split and level, greedy and sampled, with prompts as clusters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from sharpscope.policy import Policy, SamplingSpec
from sharpscope.tasks import Example, Task
from sharpscope.training.rounds import draw_completions
from sharpscope.training.seeds import derive


def pass_at_k(correct: np.ndarray, k: int) -> float:
    """Unbiased pass@k (arXiv 2107.03374) from `correct` (prompts, n ≥ k) booleans: mean of 1 − C(n−c, k)/C(n, k)."""
    n = correct.shape[1]
    hits = correct.sum(axis=1)
    # 1 − Π_{i=n−c+1..n} (1 − k/i), which never overflows
    values = [1.0 - float(np.prod(1.0 - k / np.arange(n - c + 1, n + 1))) if n - c >= k else 1.0 for c in hits]
    return float(np.mean(values))


def evaluate(
    policy: Policy,
    task: Task,
    *,
    step: int,
    splits: Sequence[str],
    prompts: int,
    temperatures: Sequence[float],
    samples: int,
    spec: SamplingSpec,
    seed: int,
    on_progress: Callable[[str], None] | None = None,
) -> list[dict[str, Any]]:
    """Rows of the eval table: one for each split, level and temperature that the task has.

    `prompts` puzzles of each level, the first in the split's own fixed order. At temperature 0 one completion is enough and
    k = 1; above, k = `samples`. The standard error is that of the mean over prompts of each prompt's share of correct
    completions. Draws are seeded by (seed, split, level, temperature), the same at every step and for every method.
    """
    rows = []
    available = task.splits()
    for split in splits:
        by_level: dict[str, list[Example]] = {}
        for example in available.get(split, []):
            by_level.setdefault(str(example.meta.get("level", "all")), []).append(example)
        for level, examples in sorted(by_level.items()):
            for temperature in temperatures:
                if on_progress is not None:
                    on_progress(f"{split}, level {level}, temperature {temperature:g}")
                rows.append(
                    _one(policy, task, split, level, examples[:prompts], temperature, samples, spec, seed, step)
                )
    return rows


def heldout_score(rows: Sequence[dict[str, Any]]) -> float:
    """Accuracy by which checkpoints are kept: the first split of `rows` at its first temperature, over all puzzles of it."""
    chosen = [r for r in rows if (r["split"], r["temperature"]) == (rows[0]["split"], rows[0]["temperature"])]
    return sum(r["accuracy"] * r["n"] for r in chosen) / sum(r["n"] for r in chosen)


def _one(
    policy: Policy,
    task: Task,
    split: str,
    level: str,
    examples: list[Example],
    temperature: float,
    samples: int,
    spec: SamplingSpec,
    seed: int,
    step: int,
) -> dict[str, Any]:
    k = 1 if temperature == 0 else samples
    greedy = {"top_p": 1.0, "top_k": 0} if temperature == 0 else {}
    drawn = spec.model_copy(update={"temperature": temperature, **greedy})
    place = "/".join(map(str, [split, level, temperature]))
    completions = draw_completions(policy, task, examples, k, drawn, derive(seed, f"evaluation:{place}"))
    rewards = [task.score(examples[row // k], text) for row, text in enumerate(completions.texts)]
    correct = np.array([reward.correct for reward in rewards], dtype=bool).reshape(len(examples), k)
    return evaluation_row(
        step, task.name, split, level, correct, [reward.total for reward in rewards], float(temperature)
    )


def evaluation_row(
    step: int, task: str, split: str, level: str, correct: np.ndarray, rewards: Sequence[float], temperature: float
) -> dict[str, Any]:
    """A row of the eval table from `correct` (prompts, k) and the completions' total rewards."""
    share, k = correct.mean(axis=1), correct.shape[1]
    return {
        "step": step, "task": task, "split": split, "level": level, "n": len(share), "k": k,
        "accuracy": float(share.mean()),
        "std_error": float(share.std(ddof=1) / np.sqrt(len(share))) if len(share) > 1 else None,
        "pass_at_k": pass_at_k(correct, k),
        "reward_mean": float(np.mean(rewards)),
        "heldout_loss": None, "temperature": temperature,
    }  # fmt: skip
