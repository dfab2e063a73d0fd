"""Variants of the task that a random policy scores on: the reward is the number of vowels in the completion."""

from __future__ import annotations

from sharpscope.tasks import Example, Reward
from tests.faults.setting import vowels

__all__ = ["always_nan", "always_wrong", "half_flat", "only_train", "sometimes_nan", "vowels"]


def sometimes_nan():
    """As `vowels`, but a completion with an "e" is worth NaN."""
    splits, score = vowels()

    def spoilt(example: Example, completion: str) -> Reward:
        reward = score(example, completion)
        return Reward(float("nan"), reward.parts, reward.correct) if "e" in completion else reward

    return splits, spoilt


def half_flat():
    """As `vowels`, but every second prompt gives all completions the same reward."""
    splits, score = vowels()

    def flat(example: Example, completion: str) -> Reward:
        return Reward(0.0, {}, False) if int(example.answer) % 2 else score(example, completion)

    return splits, flat


def only_train():
    """`vowels` without held-out examples."""
    splits, score = vowels()
    return {"train": splits["train"]}, score


def always_nan():
    """As `vowels`, but no reward is a number."""
    splits, score = vowels()
    return splits, lambda example, completion: Reward(float("nan"), {}, score(example, completion).correct)


def always_wrong():
    """As `vowels`, but no completion is worth anything."""
    splits, _ = vowels()
    return splits, lambda example, completion: Reward(0.0, {"vowels": 0.0}, False)
