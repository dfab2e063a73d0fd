"""One step of each method from the start, the middle and the end of GRPO training, for every embedded policy.

Trains a run of plain GRPO for each task and forks it at three states. A repeated call continues, also with more batches.
`forks_report` makes the tables of docs/fork.md and of the second study from the runs.

    python -m experiments.benchmarks.forks --batches 30
    python -m experiments.benchmarks.forks --task math --sharpness --batches 10
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import sharpscope
from sharpscope.config import arm_name, build_config
from sharpscope.training import train

TASKS = ("math", "tool_qa", "knights_knaves")
MASS = "weight.preset=calibrated+weight.percentiles=gradient"
INNER = "weight.of.preset=calibrated+weight.of.percentiles=gradient+weight.of.U=4"
ARMS = (
    "grpo",
    "published=grpo-sg+weight.preset=paper",
    f"mass 1.4=grpo-sg+{MASS}",
    f"mass 4=grpo-sg+{MASS}+weight.U=4",
    f"mass 4 reversed=grpo-sg-reverse+{INNER}",
    f"mass 4 shuffled=grpo-sg-shuffled+{INNER}",
    "ar=grpo+weight.kind=linear",
    "cov-grpo",
    "sapo",
    "grpo-sam",
    "low p=grpo+tokens.kind=probability",
    "high p=grpo+tokens.kind=probability+tokens.side=high",
    "A>0=grpo+tokens.kind=advantage",
    "A<0=grpo+tokens.kind=advantage+tokens.sign=negative",
)
FEWER = ("grpo", "published", "mass 4", "mass 4 reversed", "mass 4 shuffled", "ar", "cov-grpo", "low p", "high p")
"""Arms of Knights and Knaves, whose batches take longest."""
SHARPER = ("grpo", "mass 4", "mass 4 reversed", "mass 4 shuffled", "grpo-sam")
RUN = {
    "method": "grpo",
    "evaluation.every": 0,
    "recording.tokens_every": 0,
    "recording.rollouts_every": 0,
    "recording.heldout_influence_every": 0,
    "checkpoint.keep_last": 3,
}


def settings(task: str) -> dict[str, Any]:
    """Settings of the fork of a task."""
    if task == "knights_knaves":
        return {"methods": _named(FEWER), "comparisons": ("step", "kl")}
    return {"methods": ARMS}


def sharpness_settings() -> dict[str, Any]:
    """Settings of the fork that measures sharpness."""
    return {"methods": _named(SHARPER), "comparisons": ("step", "kl"), "outcomes": ("failure", "sharpness")}


def _named(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(arm for arm in ARMS if arm_name(arm) in names)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", action="append", choices=TASKS, help="default: all")
    parser.add_argument("--steps", type=int, default=100, help="of the GRPO runs")
    parser.add_argument("--batches", type=int, default=30)
    parser.add_argument("--sharpness", action="store_true", help="with fewer arms, at the start and the end")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--runs", type=Path, default=Path("runs/forks"))
    options = parser.parse_args()
    for task in options.task or TASKS:
        folder = options.runs / task
        trained(folder, task, options.steps)
        states = [0, options.steps] if options.sharpness else [0, options.steps // 2, options.steps]
        chosen: Mapping[str, Any] = sharpness_settings() if options.sharpness else settings(task)
        sharpscope.fork(
            folder,
            checkpoint=states,
            batches=options.batches,
            threads=options.threads,
            on_progress=lambda text: print(f"  {text}", flush=True),
            **chosen,
        )


def trained(folder: Path, task: str, steps: int) -> None:
    """Train a run of GRPO with checkpoints in the middle and at the end, or continue it."""
    values = {**RUN, "task": {"kind": task}, "steps": steps, "checkpoint.every": steps // 2}
    config = build_config(values={**values, "out": str(folder.parent), "name": folder.name})
    if not (folder / "run.json").exists():
        train(config)
    elif sharpscope.load_run(folder).status != "finished":
        train(config, resume=True)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
