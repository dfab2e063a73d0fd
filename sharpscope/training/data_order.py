"""The order of training examples: a new seeded permutation every epoch, with a cursor as its only state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch

from sharpscope.seeds import generator
from sharpscope.tasks import Example


@dataclass
class DataOrder:
    """Takes examples in order; `cursor`, the number taken so far, is all that a checkpoint has to hold."""

    examples: Sequence[Example]
    seed: int
    cursor: int = 0
    _permutation: object = field(init=False, repr=False)

    def __post_init__(self) -> None:
        @lru_cache(maxsize=2)
        def permutation(epoch: int) -> list[int]:
            return torch.randperm(len(self.examples), generator=generator(self.seed, "data_order", epoch)).tolist()

        self._permutation = permutation

    @property
    def epoch(self) -> float:
        """Passes over the training set so far."""
        return self.cursor / len(self.examples)

    def take(self, count: int) -> list[Example]:
        """The next `count` examples; every example is seen once before any is seen twice."""
        taken = []
        for position in range(self.cursor, self.cursor + count):
            epoch, index = divmod(position, len(self.examples))
            taken.append(self.examples[self._permutation(epoch)[index]])  # type: ignore[operator]
        self.cursor += count
        return taken
