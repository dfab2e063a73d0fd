"""Task `math`: generated questions with one answer that can be checked; real benchmarks come through the task
`dataset`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from random import Random

from sharpscope.tasks.base import Example, Reward, content_id, stream_seed
from sharpscope.tasks.generated import take
from sharpscope.tasks.math_families import FAMILIES
from sharpscope.tasks.math_scoring import score_math
from sharpscope.tasks.spec import MathSpec


class MathTask:
    """Splits `train` and `heldout` (`spec.levels`) and `unseen` (`spec.unseen_levels`); meta: id, level, family,
    question.
    """

    name = "math"

    def __init__(self, spec: MathSpec) -> None:
        self.spec = spec
        self._splits: dict[str, list[Example]] | None = None

    def splits(self) -> dict[str, list[Example]]:
        """Questions by split; a split asked for with size 0 is left out.

        Raises:
            UserError: more questions are asked for than exist.
        """
        if self._splits is None:
            spec = self.spec
            wanted = {
                "train": (spec.levels, spec.train_size),
                "heldout": (spec.levels, spec.heldout_size),
                "unseen": (spec.unseen_levels, spec.unseen_size),
            }
            self._splits = {
                split: [example for level in levels for example in self._level(split, level, count)]
                for split, (levels, count) in wanted.items()
                if levels and count
            }
        return self._splits

    def _level(self, split: str, level: int, count: int) -> Iterator[Example]:
        """`count` questions of each family, the families in turn: the first few of a level are of all of them."""
        taken = [
            take(self._stream(split, family, level), count, training=split == "train", field=f"task.{split}_size")
            for family in self.spec.families
        ]
        return chain.from_iterable(zip(*taken, strict=True))

    def score(self, example: Example, completion: str) -> Reward:
        """1 where the final answer of prefill + completion is mathematically equal to the true one, else 0."""
        return score_math(example.whole(completion), (example.answer,), self.spec.time_limit)

    def _stream(self, split: str, family: str, level: int) -> Iterator[Example]:
        rng = Random(stream_seed("math", self.spec.seed, split, family, level))
        while True:
            question, answer = FAMILIES[family](level, rng)
            prompt = self.spec.template.replace("{prompt}", question)
            meta = {"id": content_id(question), "level": level, "family": family, "question": question}
            yield Example(prompt, answer, meta)
