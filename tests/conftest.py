"""Shared fixtures: a tiny random policy on disk with a real tokenizer, and a small configuration that trains in a second."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)

TOY = {
    "task.kind": "custom",
    "task.factory": "tests.toy_task:vowels",
    "threads": 1,
    "steps": 3,
    "rollout.prompts_per_step": 4,
    "rollout.group_size": 4,
    "rollout.max_new_tokens": 8,
    "evaluation.prompts": 4,
    "evaluation.every": 2,
    "optimizer.lr": 0.01,
    "recording.heldout_influence_every": 0,
}


@pytest.fixture(scope="session")
def tiny_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a randomly initialised two-layer Qwen2 policy with a byte-level tokenizer."""
    from sharpscope.policy.embedded import build_model, build_tokenizer
    from tests.toy_task import vowels

    splits, _ = vowels()
    tokenizer = build_tokenizer([e.prompt for e in splits["train"]], phrases=(), vocabulary=288)
    model = build_model(tokenizer, layers=2, width=32, feed_forward=48, heads=2, seed=0)
    with torch.no_grad():  # sharper than at initialisation, so that tokens differ in probability
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(8)
    folder = tmp_path_factory.mktemp("tiny_policy")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def toy_config(tiny_policy: Path, tmp_path: Path):
    """A function from field paths to a RunConfig of the toy task in a fresh folder."""
    from sharpscope.config import build_config

    def make(**changes):
        values = {**TOY, "policy.model": str(tiny_policy), "out": str(tmp_path), "name": "run"}
        return build_config(values=values | {path.replace("__", "."): value for path, value in changes.items()})

    return make
