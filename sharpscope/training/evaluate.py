"""Accuracy on fixed prompts: by split and level, greedy and sampled, with prompts as clusters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sharpscope.config.run import EvaluationSpec
from sharpscope.errors import UserError
from sharpscope.policy import Policy, SamplingSpec, draw_scored, load_policy
from sharpscope.recording import run_folder
from sharpscope.recording.rows import evaluation_row, prompt_pass_at_k, standard_error
from sharpscope.seeds import derive
from sharpscope.tasks import Example, Reward, Task, make_task, task_choice
from sharpscope.tasks.dataset import DatasetTask
from sharpscope.training.checkpoint import checkpoints, step_of

EVERY_ROW = "all"
"""Split of all rows of a data set, held out or not."""
DEFAULT_SPLITS = ("heldout", "unseen")
BATCH_COMPLETIONS = 256


def evaluate(
    policy: Policy,
    task: Task,
    asked: EvaluationSpec,
    spec: SamplingSpec,
    *,
    step: int,
    seed: int,
    on_progress: Callable[[str], None] = lambda text: None,
    pass_at: Sequence[int] = (),
) -> list[dict[str, Any]]:
    """Rows of the eval table: one for each split, level and temperature that is asked for and that the task has.

    The first `asked.prompts` examples of each level, in the split's own fixed order. At temperature 0 one completion is
    enough and k = 1; above, k = `asked.samples`. The accuracy is avg@k; its standard error that of the mean over prompts of
    each prompt's share of correct completions; `pass_at` adds the unbiased `pass_at_<k>` and `pass_at_<k>_std_error`. Draws
    are seeded by (seed, split, level, temperature), the same at every step and for every method.
    """
    rows = []
    for split, level, of_level in _levels(task, asked.splits):
        for temperature in map(float, asked.temperatures):
            examples = of_level[: asked.prompts]
            k = 1 if temperature == 0 else asked.samples
            number = len(examples)
            on_progress(f"{split}, level {level}, temperature {temperature:g}: {number} prompts")
            limits = {"top_p": 1.0} if temperature == 0 else {}
            sampling = spec.model_copy(update={"temperature": temperature, **limits})
            draws = derive(seed, f"evaluation:{split}/{level}/{temperature}")
            rewards: list[Reward] = []
            cut: list[bool] = []
            size = max(1, BATCH_COMPLETIONS // k)
            for first in range(0, number, size):
                drawn, scored = draw_scored(
                    policy,
                    task,
                    examples[first : first + size],
                    k,
                    sampling,
                    draws,
                    first,
                )
                rewards += scored
                cut += drawn.truncated.tolist()
            correct = np.array([one.correct for one in rewards], dtype=bool).reshape(number, k)
            totals = [one.total for one in rewards]
            truncated = np.array(cut, dtype=bool).reshape(number, k)
            row = evaluation_row(
                step,
                task.name,
                split,
                level,
                correct,
                totals,
                temperature,
                truncated,
            )
            for each in pass_at:
                if each > k:  # one greedy completion says nothing about several
                    row |= {f"pass_at_{each}": None, f"pass_at_{each}_std_error": None}
                    continue
                values = prompt_pass_at_k(correct, each)
                row |= {
                    f"pass_at_{each}": float(values.mean()),
                    f"pass_at_{each}_std_error": standard_error(values),
                }
            rows.append(row)
    return rows


def _levels(task: Task, splits: Sequence[str]) -> Iterator[tuple[str, str, list[Example]]]:
    """Split, level and examples, level by level."""
    for split in splits:
        by_level: dict[str, list[Example]] = {}
        for example in _examples_of(task, split):
            by_level.setdefault(str(example.meta.get("level", "all")), []).append(example)
        for level, examples in sorted(by_level.items()):
            yield split, level, examples


def _examples_of(task: Task, split: str) -> list[Example]:
    """Examples of a split, none if the task lacks it; `all` is every row of a data set in its order."""
    if split == EVERY_ROW and isinstance(task, DatasetTask):
        return task.rows()
    return task.splits().get(split, [])


def evaluate_model(
    model: str,
    *,
    task: str | None = None,
    splits: Sequence[str] | None = None,
    temperatures: Sequence[float] = (0.0, 1.0),
    prompts: int = 500,
    samples: int = 1,
    seed: int = 0,
    pass_at: Sequence[int] = (),
    overrides: Sequence[str] = (),
    on_progress: Callable[[str], None] = lambda text: None,
) -> list[dict[str, Any]]:
    """Rows of the eval table, with 95 % intervals, for a run's last checkpoint, a model folder, a hub id or `embedded:NAME`.

    A run has its own task and sampling limits, an embedded policy its task; `task` and `overrides` change them. All `splits`
    are measured, by default those of DEFAULT_SPLITS that the task has; of task `dataset`, `all` is every row.

    Raises:
        UserError: no such model, a run without a checkpoint, a task without the splits, or a number out of its range.
    """
    from sharpscope.config import build_config, read_recorded

    if not all(1 <= k <= samples for k in pass_at):
        raise UserError(
            f"-k {max(pass_at)}: pass@k needs --samples of at least k, it is {samples}; raise --samples"
        )
    folder = Path(model)
    recorded = (folder / "run.json").exists()
    saved = checkpoints(folder) if recorded else []
    if recorded and not saved:
        raise UserError(
            f"run '{folder}' has no checkpoint; evaluate one of its models by folder, or let it run on"
        )
    model = str(saved[-1]) if saved else model
    given = {"prompts": prompts, "samples": samples, "temperatures": list(temperatures)}
    values: dict[str, Any] = {"policy.model": model, "evaluation": given}
    if task is not None:
        values["task"] = dict(task_choice(task))
    config = (
        read_recorded(folder, values, overrides)
        if recorded
        else build_config(None, overrides, values)
    )
    run_folder.set_threads(config.threads, config.policy.model)
    made = make_task(config.task)
    present = present_splits(made, splits or DEFAULT_SPLITS, every=splits is not None)
    asked = config.evaluation.model_copy(update={"splits": tuple(present)})
    policy = load_policy(
        config.policy, base=read_recorded(folder).policy.model if recorded else None
    )
    rows = evaluate(
        policy,
        made,
        asked,
        config.rollout,
        step=step_of(saved[-1]) if saved else 0,
        seed=seed,
        on_progress=on_progress,
        pass_at=pass_at,
    )
    return [row | _intervals(row, pass_at) for row in rows]


def present_splits(task: Task, wanted: Sequence[str], every: bool = False) -> list[str]:
    """The wanted splits that the task has; a UserError if it has none of them, or with `every` not all."""
    missing = [split for split in wanted if not _examples_of(task, split)]
    if len(missing) == len(wanted) or (missing and every):
        there = (
            ", ".join(name for name in (*task.splits(), EVERY_ROW) if _examples_of(task, name))
            or "no splits"
        )
        raise UserError(f"split {', '.join(missing)}: the task has {there}; choose one of them")
    return [split for split in wanted if split not in missing]


def _intervals(row: dict[str, Any], pass_at: Sequence[int]) -> dict[str, float]:
    """95 % intervals over prompts of a row's accuracy and of its pass@k."""
    from sharpscope.analysis.statistics import accuracy_interval  # scipy is slow to import

    ends = {"accuracy": accuracy_interval(row["accuracy"], row["std_error"], row["n"], row["k"])}
    for k in pass_at:
        if row[f"pass_at_{k}"] is None:  # at T = 0 all completions of a prompt are one
            continue
        # of k completions each, at most this many independent ones
        groups = row["k"] / min(k, row["k"])
        ends[f"pass_at_{k}"] = accuracy_interval(
            row[f"pass_at_{k}"],
            row[f"pass_at_{k}_std_error"],
            row["n"],
            groups,
        )
    return {
        f"{name}_{end}": getattr(interval, end)
        for name, interval in ends.items()
        for end in ("low", "high")
    }
