"""`sharpscope eval`: accuracy of any checkpoint on any task, split, temperature and k."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sharpscope import __version__
from sharpscope.config.policy import EMBEDDED_PREFIX
from sharpscope.errors import UserError
from sharpscope.policy import check_revision, embedded_policy, load_policy
from sharpscope.recording import environment
from sharpscope.tasks import Task, make_task, task_choice
from sharpscope.tasks.dataset import DatasetTask
from sharpscope.training.checkpoint import checkpoints
from sharpscope.training.evaluate import BATCH_COMPLETIONS, EVERY_ROW, evaluate, examples_of
from sharpscope.training.evaluation_progress import EvaluationProgress

DEFAULT_SPLITS = ("heldout", "unseen")


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
    on_progress: Callable[[str], None] | None = None,
    keep: Path | str = "evaluations",
    save: Callable[[list[dict[str, Any]]], None] | None = None,
) -> list[dict[str, Any]]:
    """Rows of the eval table, with 95 % intervals, for a run's last checkpoint, a model folder, a hub id or `embedded:NAME`.

    A run has its own task and sampling limits, an embedded policy its task; `task` and `overrides` change them. Finished
    batches are kept in the folder `keep` until all are there: a repeated call after an interruption draws only the rest.

    Args:
        model, task, temperatures, prompts, samples, seed, pass_at, overrides, keep: as above, and as of `evaluate`.
        splits: all of these; None: those of DEFAULT_SPLITS that the task has. Of task `dataset`, `all` is every row.
        on_progress: called with a line of text on what is measured.
        save: called with the rows while the batches are still kept, so that a failure to write them loses nothing.

    Raises:
        UserError: no such model, a run without a checkpoint, a task without the splits, or a number out of its range.
    """
    from sharpscope.config import build_config

    _check_numbers(prompts, samples, temperatures, pass_at)
    folder, file, step = Path(model), None, 0
    if (folder / "run.json").exists():
        saved = checkpoints(folder)
        if not saved:
            raise UserError(f"run '{folder}' has no checkpoint; evaluate one of its models by folder, or let it run on")
        file, model, step = folder / "config.yaml", str(saved[-1]), int(saved[-1].name.removeprefix("step-"))
    values: dict[str, Any] = {"policy.model": model}
    if task is None and file is None and model.startswith(EMBEDDED_PREFIX):
        task = embedded_policy(model.removeprefix(EMBEDDED_PREFIX)).task
    if task is not None:
        values["task"] = dict(task_choice(task))
    config = build_config(file, overrides, values)
    environment.set_threads(config.threads, config.policy.model)
    made = make_task(config.task)
    present = _present_splits(made, splits)
    if file is None:
        check_revision(config.policy)
    policy = load_policy(config.policy)
    progress = EvaluationProgress(
        Path(keep),
        re.sub(r"[^A-Za-z0-9._-]+", "-", Path(model).name).strip("-.") or "model",
        {
            "version": __version__,
            "batch": BATCH_COMPLETIONS,
            "model": _fingerprint(model),
            "seed": seed,
            "prompts": prompts,
            "samples": samples,
            **config.model_dump(mode="json", include={"task", "policy", "rollout"}),
        },
    )
    if progress and on_progress is not None:
        on_progress(f"going on with an interrupted evaluation: {len(progress)} batches are in {progress.path}")
    if isinstance(made, DatasetTask) and on_progress is not None:
        for split in present:
            on_progress(_rows_used(made, split))
    rows = evaluate(
        policy,
        made,
        step=step,
        splits=present,
        prompts=prompts,
        temperatures=temperatures,
        samples=samples,
        spec=config.rollout,
        seed=seed,
        on_progress=on_progress,
        progress=progress,
        pass_at=pass_at,
    )
    rows = [row | _intervals(row, pass_at) for row in rows]
    if save is not None:
        save(rows)
    progress.finish()
    return rows


def _check_numbers(prompts: int, samples: int, temperatures: Sequence[float], pass_at: Sequence[int]) -> None:
    for option, number in (("--prompts", prompts), ("--samples", samples)):
        if number < 1:
            raise UserError(f"{option} {number}: must be at least 1")
    for temperature in temperatures:
        if not 0 <= temperature < math.inf:
            raise UserError(f"--temperature {temperature:g}: must be 0 (greedy) or a positive number")
    for k in pass_at:
        if not 1 <= k <= samples:
            raise UserError(
                f"-k {k}: pass@k needs from 1 to --samples = {samples} completions per puzzle; raise --samples"
            )


def _present_splits(task: Task, splits: Sequence[str] | None) -> list[str]:
    """The named splits, all of which the task must have; None: those of DEFAULT_SPLITS that it has."""
    wanted = DEFAULT_SPLITS if splits is None else splits
    present = [split for split in wanted if examples_of(task, split)]
    missing = [split for split in wanted if split not in present]
    if not present or (missing and splits is not None):
        available = [split for split, examples in task.splits().items() if examples]
        available += [EVERY_ROW] if isinstance(task, DatasetTask) else []
        raise UserError(
            f"--split {', '.join(missing)}: the task has {', '.join(available) or 'no splits'}; name one of them, or "
            "repeat --split for several"
        )
    return present


def _intervals(row: dict[str, Any], pass_at: Sequence[int]) -> dict[str, float]:
    """95 % intervals over prompts of a row's accuracy and of its pass@k."""
    from sharpscope.analysis.statistics import accuracy_interval  # scipy is slow to import

    ends = {"accuracy": accuracy_interval(row["accuracy"], row["std_error"], row["n"], row["k"])}
    for k in pass_at:
        groups = row["k"] / min(k, row["k"])  # of k completions each, at most this many independent ones
        ends[f"pass_at_{k}"] = accuracy_interval(row[f"pass_at_{k}"], row[f"pass_at_{k}_std_error"], row["n"], groups)
    return {f"{name}_{end}": getattr(interval, end) for name, interval in ends.items() for end in ("low", "high")}


def _rows_used(task: DatasetTask, split: str) -> str:
    """A line on how many rows of the data set's file a split has."""
    spec, count = task.spec, len(examples_of(task, split))
    if split == "heldout" and spec.heldout_path:
        return f"split heldout: all {count} rows of task.heldout_path = {spec.heldout_path}"
    text = f"split {split}: {count} of the {len(task.rows())} rows of task.path = {spec.path}"
    return text if split == EVERY_ROW else f"{text}; --split all takes every row"


def _fingerprint(model: str) -> list[tuple[str, int, int]]:
    """Name, size and time of each file in a model's folder; a change of any makes another evaluation."""
    folder = Path(model).expanduser()
    if not folder.is_dir():
        return []
    files = sorted(file for file in folder.iterdir() if file.is_file())
    return [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
