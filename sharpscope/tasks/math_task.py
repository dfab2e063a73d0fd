"""Task `math`: generated questions with one answer that can be checked; real benchmarks come through the task
`dataset`.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from itertools import chain
from random import Random

from sharpscope.config.tasks import MathSpec
from sharpscope.tasks.base import Example, Reward, content_id, stream_seed
from sharpscope.tasks.generated import take
from sharpscope.tasks.math_families import FAMILIES, unordered
from sharpscope.tasks.math_scoring import score_value


class MathTask:
    """Splits `train` and `heldout` (`spec.levels`) and `unseen` (`spec.unseen_levels`); meta: id, level, family,
    question, form (the question with its terms and factors sorted).

    No form of a held-out question is in the training set: 4 + 3 is not trained on where 3 + 4 is held out.
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
            heldout = self._split("heldout", spec.levels, spec.heldout_size)
            forms = {str(example.meta["form"]) for example in heldout}
            made = {
                "train": self._split("train", spec.levels, spec.train_size, forms),
                "heldout": heldout,
                "unseen": self._split("unseen", spec.unseen_levels, spec.unseen_size),
            }
            self._splits = {split: examples for split, examples in made.items() if examples}
        return self._splits

    def _split(self, split: str, levels: Sequence[int], count: int, without: Container[str] = ()) -> list[Example]:
        return [example for level in levels for example in self._level(split, level, count, without)]

    def _level(self, split: str, level: int, count: int, without: Container[str]) -> Iterator[Example]:
        """`count` questions of each family, the families in turn: the first few of a level are of all of them."""
        training, field = split == "train", f"task.{split}_size"
        taken = [
            take(self._stream(split, family, level), count, training=training, field=field, without=without)
            for family in self.spec.families
        ]
        return chain.from_iterable(zip(*taken, strict=True))

    def score(self, example: Example, completion: str) -> Reward:
        """1 where the final answer of prefill + completion is a number equal to the true one, else 0.

        A number: who writes the question down again, 3 + 4, has not answered it.
        """
        return score_value(example.whole(completion), (example.answer,), self.spec.time_limit)

    def _stream(self, split: str, family: str, level: int) -> Iterator[Example]:
        rng = Random(stream_seed("math", self.spec.seed, split, family, level))
        while True:
            question, answer = FAMILIES[family](level, rng)
            prompt = self.spec.template.replace("{prompt}", question)
            meta = {"id": content_id(question), "level": level, "family": family, "question": question}
            meta["form"] = unordered(family, question)
            yield Example(prompt, answer, meta)
