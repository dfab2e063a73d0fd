"""A task that a random policy scores on: the reward is the number of vowels in the completion."""

from __future__ import annotations

from sharpscope.tasks import Example, Reward


def vowels(count: int = 10):
    def examples(first: int, split: str) -> list[Example]:
        return [
            Example(f"say {'a' * (index % 5 + 1)} {index}:", str(index), {"id": f"{split}{index}", "level": index % 2})
            for index in range(first, first + count)
        ]

    def score(example: Example, completion: str) -> Reward:
        found = sum(completion.count(letter) for letter in "aeiou")
        return Reward(float(found), {"vowels": float(found)}, found >= 2)

    return {"train": examples(0, "train"), "heldout": examples(100, "heldout")}, score


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
