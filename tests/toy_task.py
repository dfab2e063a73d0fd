"""Variants of the task that a random policy scores on: the reward is the number of vowels in the completion; and two weightings."""

from __future__ import annotations

import torch

from sharpscope import weight_bounds
from sharpscope.tasks import Example, Reward
from tests.faults.conftest import vowels


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
    return splits, lambda example, completion: Reward(
        float("nan"), {}, score(example, completion).correct
    )


def always_wrong():
    """As `vowels`, but no completion is worth anything."""
    splits, _ = vowels()
    return splits, lambda example, completion: Reward(0.0, {"vowels": 0.0}, False)


def wrong_but_rewarded():
    """As `vowels`, but every completion is wrong."""
    splits, score = vowels()

    def wrong(example: Example, completion: str) -> Reward:
        reward = score(example, completion)
        return Reward(reward.total, reward.parts, False)

    return splits, wrong


def equally_rewarded():
    """Every completion is worth 1; those with a vowel are correct."""
    splits, score = vowels()
    return splits, lambda example, completion: Reward(1.0, {}, score(example, completion).total > 0)


def even_start():
    """Correct is a completion whose first character has an even code, about half of them, also of one token."""
    splits, _ = vowels()

    def scored(example: Example, completion: str) -> Reward:
        even = ord((completion or " ")[0]) % 2 == 0
        return Reward(float(even), {"even": float(even)}, even)

    return splits, scored


@weight_bounds(0.0, 2.0)
def weight_nan(step):
    """Weight 1, but NaN at the second step."""
    middle = 0.25 < step.progress < 0.75
    return torch.full_like(step.logp, float("nan") if middle else 1.0)


@weight_bounds(0.5, 1.5)
def by_probability(step):
    """Weight one half more than the token's probability: as good as no two alike."""
    return step.logp.exp() + 0.5
