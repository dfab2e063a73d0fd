"""`sharpscope eval`: any checkpoint, task, split, temperature and k."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sharpscope.errors import UserError
from sharpscope.policy import load_policy
from sharpscope.tasks import make_task, task_choice
from sharpscope.training import environment
from sharpscope.training.checkpoint import checkpoints
from sharpscope.training.evaluate import evaluate


def evaluate_model(
    model: str,
    *,
    task: str | None = None,
    splits: Sequence[str] = ("heldout", "unseen"),
    temperatures: Sequence[float] = (0.0, 1.0),
    prompts: int = 500,
    samples: int = 1,
    seed: int = 0,
    overrides: Sequence[str] = (),
    on_progress: Callable[[str], None] | None = None,
) -> list[dict[str, Any]]:
    """Rows of the eval table for a run's last checkpoint, a model folder, a hub id or `embedded:NAME`.

    A run brings its own task and sampling limits; `task` and `overrides` change them.

    Raises:
        UserError: no such model, a run without a checkpoint, or a task without the splits.
    """
    from sharpscope.config import build_config

    folder, file, step = Path(model), None, 0
    if (folder / "run.json").exists():
        saved = checkpoints(folder)
        if not saved:
            raise UserError(f"run '{folder}' has no checkpoint; evaluate one of its models by folder, or let it run on")
        file, model, step = folder / "config.yaml", str(saved[-1]), int(saved[-1].name.removeprefix("step-"))
    values: dict[str, Any] = {"policy.model": model}
    if task is not None:
        values["task"] = dict(task_choice(task))
    config = build_config(file, overrides, values)
    environment.set_threads(config.threads)
    for temperature in temperatures:
        if temperature < 0:
            raise UserError(f"--temperature {temperature:g}: must be 0 (greedy) or positive")
    made = make_task(config.task)
    missing = [split for split in splits if split not in made.splits()]
    present = [split for split in splits if split not in missing]
    if not present:
        raise UserError(f"--split {', '.join(missing)}: the task has {', '.join(made.splits()) or 'no splits'}")
    rows = evaluate(
        load_policy(config.policy), made, step=step, splits=present, prompts=prompts, temperatures=temperatures,
        samples=samples, spec=config.rollout, seed=seed, on_progress=on_progress,
    )  # fmt: skip
    if not rows:
        raise UserError(f"--split {', '.join(present)}: the split is empty for this task")
    return rows
