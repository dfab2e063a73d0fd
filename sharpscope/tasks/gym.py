"""Task `gym:NAME`: a dataset of reasoning-gym with its own scorer."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

from sharpscope.config.tasks import GymSpec
from sharpscope.errors import UserError, nearest
from sharpscope.tasks.answers import last_tagged
from sharpscope.tasks.base import Example, Reward, content_id, once, stream_seed, take

EVALUATING = frozenset(
    {
        "binary_matrix",
        "countdown",
        "intermediate_integration",
        "n_queens",
        "polynomial_multiplication",
        "puzzle24",
        "simple_integration",
        "spiral_matrix",
        "string_insertion",
    }
)
"""Datasets whose scorer passes the completion to Python's eval, mostly through sympy."""

_NO_NUMBER = re.compile(r"(?<![a-z])(?:nan|inf|infinity)j?(?![a-z])", re.IGNORECASE)
"""Scorers that compare distances (complex_arithmetic) give "nan" the full score, because comparisons with it are false."""


class GymTask:
    """Splits `train` and `heldout` of one dataset; level "all"; meta["entry"] is the entry for its scorer."""

    def __init__(self, spec: GymSpec) -> None:
        try:
            import reasoning_gym
            from reasoning_gym.factory import DATASETS
        except ImportError:
            raise UserError(f"task gym:{spec.name}: needs reasoning-gym; pip install 'sharpscope[gym]'") from None

        if spec.name not in DATASETS:
            raise UserError(
                f"task.name = '{spec.name}': reasoning-gym has no such dataset{nearest(spec.name, DATASETS)}"
            )
        if spec.name in EVALUATING:
            raise UserError(
                f"task.name = '{spec.name}': its scorer passes model output to Python's eval; choose another"
            )
        self.spec = spec
        self.name = f"gym:{spec.name}"
        seed = stream_seed("gym", spec.name, spec.seed) % 2**31
        # All splits take questions from one sequence, so it must be longer than the splits together.
        size = 100 * (spec.train_size + spec.heldout_size)
        try:
            self._dataset = reasoning_gym.create_dataset(spec.name, seed=seed, size=size, **spec.options)
        except (AssertionError, TypeError, ValueError) as error:
            raise UserError(
                f"task.options = {spec.options}: rejected by {spec.name} ({str(error) or type(error).__name__})"
            ) from error

    @once
    def splits(self) -> dict[str, list[Example]]:
        """Questions by split, with disjoint texts.

        Raises:
            UserError: the dataset has too few different questions.
        """
        sizes = {"train": self.spec.train_size, "heldout": self.spec.heldout_size}
        return {
            split: take(self._stream(), count, training=split == "train", field=f"task.{split}_size")
            for split, count in sizes.items()
            if count
        }

    def _stream(self) -> Iterator[Example]:
        for index in range(len(self._dataset)):
            entry: dict[str, Any] = self._dataset[index]
            question = str(entry["question"])
            meta = {"id": content_id(question), "level": "all", "question": question, "entry": entry}
            yield Example(self.spec.template.replace("{prompt}", question), str(entry["answer"]), meta)

    def score(self, example: Example, completion: str) -> Reward:
        """The dataset's score of the answer, which may be partial; correct if it is 1.

        A score that is not finite and an error in the scorer count as 0.
        """
        answer = gym_answer(example.whole(completion))
        if _NO_NUMBER.search(answer) and not _NO_NUMBER.search(example.answer):
            return Reward(0.0, {"answer": 0.0}, correct=False)
        try:
            score = float(self._dataset.score_answer(answer, example.meta["entry"]))
        except Exception:  # third-party scorers on arbitrary text
            score = 0.0
        score = score if math.isfinite(score) else 0.0
        return Reward(score, {"answer": score}, correct=score >= 1.0)


def gym_answer(text: str) -> str:
    """Content of the last `<answer>…</answer>`, or the text after the last `</think>`, or the whole text; stripped."""
    tagged = last_tagged(text, "answer")
    return text.rpartition("</think>")[2].strip() if tagged is None else tagged
