"""Accuracy on fixed prompts: by split and level, greedy and sampled, with prompts as clusters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sharpscope.errors import UserError
from sharpscope.policy import Policy, SamplingSpec, draw_scored
from sharpscope.recording import evaluation_row, prompt_pass_at_k, standard_error
from sharpscope.seeds import derive
from sharpscope.tasks import Example, Task
from sharpscope.tasks.dataset import DatasetTask
from sharpscope.training.evaluation_progress import Batch, EvaluationProgress

EVERY_ROW = "all"
"""Split of all rows of a data set, held out or not."""

BATCH_COMPLETIONS = 256
"""Completions drawn before an evaluation's progress is saved again."""


@dataclass(frozen=True)
class Cell:
    """One row of the eval table before it is measured: examples of one split and level, at one temperature."""

    split: str
    level: str
    temperature: float
    samples: int  # completions per example
    examples: list[Example]

    @property
    def name(self) -> str:
        """The name that seeds its draws."""
        return "/".join(map(str, [self.split, self.level, self.temperature]))


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
    progress: EvaluationProgress | None = None,
    pass_at: Sequence[int] = (),
) -> list[dict[str, Any]]:
    """Rows of the eval table: one for each split, level and temperature that the task has.

    `prompts` puzzles of each level, the first in the split's own fixed order. At temperature 0 one completion is enough and
    k = 1; above, k = `samples`. The accuracy is avg@k; its standard error that of the mean over prompts of each prompt's
    share of correct completions. Draws are seeded by (seed, split, level, temperature), the same at every step and for every
    method.

    Args:
        policy, task, step, splits, prompts, temperatures, samples, spec, seed: as above.
        on_progress: called with a line of text on what is measured.
        progress: has the batches that are finished already, and keeps new ones.
        pass_at: further columns `pass_at_<k>` and `pass_at_<k>_std_error`, unbiased, for each k from 1 to `samples`.
    """
    rows = []
    for cell in cells(task, splits, prompts, temperatures, samples):
        report = on_progress or (lambda text: None)
        name, number = f"{cell.split}, level {cell.level}, temperature {cell.temperature:g}", len(cell.examples)
        report(f"{name}: {number} prompts")
        batches: list[Batch] = []
        for batch in _batches(policy, task, cell, spec, seed, progress):
            batches.append(batch)
            done = sum(len(finished.correct) for finished in batches)
            if done < number:
                report(f"{name}: {done} of {number} prompts done")
        correct = np.array([row for batch in batches for row in batch.correct], dtype=bool)
        rewards = [value for batch in batches for value in batch.rewards]
        row = evaluation_row(step, task.name, cell.split, cell.level, correct, rewards, cell.temperature)
        for k in pass_at:
            values = prompt_pass_at_k(correct, min(k, cell.samples))
            row |= {f"pass_at_{k}": float(values.mean()), f"pass_at_{k}_std_error": standard_error(values)}
        rows.append(row)
    return rows


def cells(
    task: Task, splits: Sequence[str], prompts: int, temperatures: Sequence[float], samples: int
) -> Iterator[Cell]:
    """The rows to measure, in their order."""
    for split in splits:
        by_level: dict[str, list[Example]] = {}
        for example in examples_of(task, split):
            by_level.setdefault(str(example.meta.get("level", "all")), []).append(example)
        for level, examples in sorted(by_level.items()):
            for temperature in temperatures:
                yield Cell(split, level, float(temperature), 1 if temperature == 0 else samples, examples[:prompts])


def examples_of(task: Task, split: str) -> list[Example]:
    """Examples of a split, none if the task lacks it; `all` is every row of a data set in its order."""
    if split == EVERY_ROW and isinstance(task, DatasetTask):
        return task.rows()
    return task.splits().get(split, [])


def _batches(
    policy: Policy, task: Task, cell: Cell, spec: SamplingSpec, seed: int, progress: EvaluationProgress | None
) -> Iterator[Batch]:
    """The cell's batches in order; those that `progress` does not have are drawn and scored."""
    greedy = {"top_p": 1.0, "top_k": 0} if cell.temperature == 0 else {}
    drawn = spec.model_copy(update={"temperature": cell.temperature, **greedy})
    size = max(1, BATCH_COMPLETIONS // cell.samples)
    for first in range(0, len(cell.examples), size):
        batch = progress.get(cell.name, first) if progress is not None else None
        if batch is None:
            examples = cell.examples[first : first + size]
            _, rewards = draw_scored(
                policy, task, examples, cell.samples, drawn, derive(seed, f"evaluation:{cell.name}"), first
            )
            correct = np.array([reward.correct for reward in rewards], dtype=bool).reshape(len(examples), cell.samples)
            batch = Batch(correct.tolist(), [reward.total for reward in rewards])
            if progress is not None:
                progress.put(cell.name, first, batch)
        yield batch


def check_splits(task: Task, splits: Sequence[str]) -> None:
    """Check that the task has some of the splits, before the run's folder is created.

    Raises:
        UserError: it has none of them.
    """
    there = [name for name, examples in task.splits().items() if examples]
    if not set(splits) & set(there):
        raise UserError(
            f"evaluation.splits = {list(splits)}: the task has {', '.join(there)}; name one of them, or set evaluation.every to 0"
        )


def heldout_score(rows: Sequence[dict[str, Any]]) -> float:
    """Accuracy that ranks checkpoints: the first split of `rows` at its first temperature, over all levels."""
    chosen = [r for r in rows if (r["split"], r["temperature"]) == (rows[0]["split"], rows[0]["temperature"])]
    return sum(r["accuracy"] * r["n"] for r in chosen) / sum(r["n"] for r in chosen)
