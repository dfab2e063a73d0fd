"""What the fault tests train: a policy of a few thousand weights on a task that costs nothing, every recorder on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from sharpscope.tasks import Example, Reward
from sharpscope.traces import TABLES, load_run, timing_columns

if TYPE_CHECKING:
    from sharpscope.config import RunConfig

SETTING: dict[str, Any] = {
    "method": "grpo-sg",
    "method.weight.preset": "calibrated",
    "method.kl.coef": 0.01,
    "task.kind": "custom",
    "task.factory": f"{__name__}:vowels",
    "threads": 1,
    "steps": 6,
    "rollout.prompts_per_step": 2,
    "rollout.group_size": 3,
    "rollout.max_new_tokens": 6,
    "update.mini_batches": 1,
    "evaluation.every": 2,
    "evaluation.prompts": 2,
    "optimizer.lr": 0.01,
    "checkpoint.every": 2,
    "checkpoint.keep_last": 2,
    "health.memory.action": "off",  # it speaks of the machine, not of the run
    "recording.token_gradients_every": 2,
    "recording.group_share": 1.0,
    "recording.rotation_every": 10,
    "recording.exact_tokens": 2,
    "recording.heldout_influence_every": 3,
    "probes.prompts": 2,
    "probes.heldout_prompts": 2,
}


def vowels(count: int = 10) -> tuple[dict[str, list[Example]], Any]:
    """A task on which an untrained policy scores: the number of vowels in the completion."""

    def examples(first: int, split: str) -> list[Example]:
        return [
            Example(f"say {'a' * (index % 5 + 1)} {index}:", str(index), {"id": f"{split}{index}", "level": index % 2})
            for index in range(first, first + count)
        ]

    def score(example: Example, completion: str) -> Reward:
        found = sum(completion.count(letter) for letter in "aeiou")
        return Reward(float(found), {"vowels": float(found)}, found >= 2)

    return {"train": examples(0, "train"), "heldout": examples(100, "heldout")}, score


def tiny_policy(folder: Path, layers: int = 1, width: int = 16, feed_forward: int = 24) -> Path:
    """Save an untrained Qwen2 policy of that size with a byte-level tokenizer to `folder`."""
    import torch
    from transformers.utils.logging import disable_progress_bar

    from sharpscope.policy.loading import build_model, build_tokenizer

    disable_progress_bar()
    splits, _ = vowels()
    tokenizer = build_tokenizer([example.prompt for example in splits["train"]], phrases=(), vocabulary=288)
    model = build_model(tokenizer, layers=layers, width=width, feed_forward=feed_forward, heads=2, seed=0)
    with torch.no_grad():  # sharper than at initialisation, so that tokens differ in probability
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(8)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def tiny_config(policy: Path, run_dir: Path) -> RunConfig:
    """The configuration of a run in `run_dir`."""
    from sharpscope.config import build_config

    return build_config(values={**SETTING, "policy.model": str(policy), "out": str(run_dir)})


def tables(run_dir: Path) -> dict[str, pd.DataFrame]:
    """The tables of a run without their timing columns."""
    run = load_run(run_dir)
    frames = {name: run.tokens() if name == "tokens" else getattr(run, name) for name in TABLES}
    return {name: f.drop(columns=timing_columns(name)) for name, f in frames.items() if f is not None}


def assert_same(one: Path, two: Path) -> None:
    """The traces of two runs are whole and equal row by row."""
    assert not load_run(one).verify() and not load_run(two).verify()
    first, second = tables(one), tables(two)
    assert first.keys() == second.keys()
    for name, frame in first.items():
        pd.testing.assert_frame_equal(frame, second[name], check_exact=True, obj=name)
