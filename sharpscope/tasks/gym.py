"""Task `gym:NAME`: any data set of reasoning-gym, scored by its own scorer."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import Any

from sharpscope.config.tasks import GymSpec
from sharpscope.errors import UserError, nearest
from sharpscope.tasks.base import Example, Reward, content_id, stream_seed
from sharpscope.tasks.generated import take

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
"""Data sets whose own scorer passes what a model wrote to Python's eval, mostly through sympy."""

_NO_NUMBER = re.compile(r"(?<![a-z])(?:nan|inf|infinity)j?(?![a-z])", re.IGNORECASE)
"""Scorers that compare distances (complex_arithmetic) give "nan" the full score: no comparison with it is ever true."""


class GymTask:
    """Splits `train` and `heldout` of one data set; level "all"; meta["entry"] is what its scorer compares with."""

    def __init__(self, spec: GymSpec) -> None:
        try:
            import reasoning_gym
            from reasoning_gym.factory import DATASETS
        except ImportError:
            raise UserError(f"task gym:{spec.name}: needs reasoning-gym; pip install 'sharpscope[gym]'") from None

        if spec.name not in DATASETS:
            raise UserError(
                f"task.name = '{spec.name}': reasoning-gym has no such data set{nearest(spec.name, DATASETS)}"
            )
        if spec.name in EVALUATING and not spec.allow_eval:
            raise UserError(
                f"task.name = '{spec.name}': its scorer passes the model's text to Python's eval;"
                " set task.allow_eval=true where you trust the model"
            )
        known = {field.name for field in dataclasses.fields(DATASETS[spec.name][1])} - {"seed", "size"}
        for option in spec.options:
            if option not in known:
                raise UserError(f"task.options.{option}: {spec.name} has no such option{nearest(option, known)}")
        self.spec = spec
        self.name = f"gym:{spec.name}"
        seed = stream_seed("gym", spec.name, spec.seed) % 2**31
        # each split takes what it may from one sequence, so the size only has to be larger than what is taken
        size = 100 * (spec.train_size + spec.heldout_size)
        try:
            self._dataset = reasoning_gym.create_dataset(spec.name, seed=seed, size=size, **spec.options)
        except (AssertionError, TypeError, ValueError) as error:
            raise UserError(
                f"task.options = {spec.options}: refused by {spec.name} ({str(error) or type(error).__name__})"
            ) from error
        self._splits: dict[str, list[Example]] | None = None

    def splits(self) -> dict[str, list[Example]]:
        """Questions by split, disjoint in their text.

        Raises:
            UserError: the data set has fewer different questions than asked for.
        """
        if self._splits is None:
            sizes = {"train": self.spec.train_size, "heldout": self.spec.heldout_size}
            self._splits = {
                split: take(self._stream(), count, training=split == "train", field=f"task.{split}_size")
                for split, count in sizes.items()
                if count
            }
        return self._splits

    def _stream(self) -> Iterator[Example]:
        for index in range(len(self._dataset)):
            entry: dict[str, Any] = self._dataset[index]
            question = str(entry["question"])
            meta = {"id": content_id(question), "level": "all", "question": question, "entry": entry}
            yield Example(self.spec.template.replace("{prompt}", question), str(entry["answer"]), meta)

    def score(self, example: Example, completion: str) -> Reward:
        """The data set's own score of the answer, in `parts["answer"]` as it is (it may be partial); correct where it
        is 1.

        A score that is no finite number, or an error in the scorer on what a model wrote, is worth 0.
        """
        answer = gym_answer(example.whole(completion))
        if _NO_NUMBER.search(answer) and not _NO_NUMBER.search(example.answer):
            return Reward(0.0, {"answer": 0.0}, correct=False)
        try:
            score = float(self._dataset.score_answer(answer, example.meta["entry"]))
        except Exception:  # other people's scorers, on arbitrary text
            score = 0.0
        if not math.isfinite(score):
            score = 0.0
        return Reward(score, {"answer": score}, correct=score >= 1.0)


def gym_answer(text: str) -> str:
    """The inside of the last `<answer>…</answer>`, else what follows the last `</think>`, else all of it; stripped."""
    closing = text.rfind("</answer>")
    opening = text.rfind("<answer>", 0, closing) if closing >= 0 else -1
    if opening >= 0:
        return text[opening + len("<answer>") : closing].strip()
    return text.rpartition("</think>")[2].strip()
