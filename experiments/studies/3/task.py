"""The task of the third study: two-digit sums after three worked examples, with training questions of its own for each seed."""

from __future__ import annotations

from random import Random

from experiments.smollm2.sums import WORKED, ask, sums
from sharpscope.tasks import Example

TRAIN = 64
HELD_OUT = 1000
SEED = 0
"""The run's seed, which draws its training questions; `run.py` sets it. Held-out questions are the same for all."""


class questions(sums):  # noqa: N801 - a factory of a task, named like a function
    """Splits `train` (64 questions of `SEED`), `heldout` (1,000), `validation` (200) and `unseen` (three-digit sums, 300)."""

    def __init__(self) -> None:
        super().__init__(seed=0)
        heldout, train = self._splits["heldout"], self._splits["train"]
        larger = Random("three digits")
        self._splits = {
            "train": Random(f"train {SEED}").sample(train, TRAIN),
            "heldout": heldout[:HELD_OUT],
            "validation": heldout[HELD_OUT : HELD_OUT + 200],
            "unseen": [
                three_digits(larger.randint(100, 999), larger.randint(100, 999)) for _ in range(300)
            ],
        }


def three_digits(a: int, b: int) -> Example:
    """A sum outside the range of training."""
    return Example(f"{WORKED}{a} + {b} =", str(a + b))


__all__ = ["ask", "questions"]
