"""A recorded training is the training: weights, the optimizer's state, random numbers and log lines of TRL's trainers are equal bit by bit.

A table of loss types × features. A part of it runs always, all of it with `-m slow`.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import sharpscope

pytest.importorskip("trl", reason="TRL is not installed (test extra)")
pytest.importorskip("peft", reason="peft is not installed (test extra)")

from peft import LoraConfig

from tests.integrations.test_hooked import made
from tests.integrations.test_variants import LORA, synchronized, with_tools
from tests.integrations.trainers import dpo_trainer, sft_trainer, trainer

Maker = Callable[..., Any]
TIMES = ("runtime", "per_second", "step_time", "train_loss_time", "total_flos")
ALWAYS = {
    ("GRPO", "dapo", "PPO epochs"),
    ("KTO", "kto", "accumulation"),
    ("RLOO", "", "PPO epochs"),
}
"""Cells of the table that the ordinary run has; test_variants.py has others."""

ADAPTERS = {"peft_config": LoraConfig(**LORA)}
COMMON: dict[str, dict[str, Any]] = {
    "plain": {},
    "LoRA": ADAPTERS,
    "checkpointing": {"gradient_checkpointing": True},
    "accumulation": {"gradient_accumulation_steps": 2},
    "bf16": {"bf16": True},
}


def adapted(make: Maker) -> Maker:
    """A maker whose trainer trains adapters where `peft_config` is given."""

    def build(folder: Path, **arguments: Any) -> Any:
        config = arguments.pop("peft_config", None)
        one = make(folder, **arguments)
        if config is None:
            return one
        torch.manual_seed(0)
        again = {"model": one.model, "args": one.args, "train_dataset": one.train_dataset}
        return type(one)(**again, processing_class=one.processing_class, peft_config=config)

    return build


def hooked(kind: str) -> Maker:
    return lambda folder, **arguments: made(kind, folder, **arguments)


TABLE: dict[str, tuple[Maker, tuple[str, ...], dict[str, dict[str, Any]]]] = {
    "GRPO": (
        trainer,
        ("grpo", "bnpo", "dapo", "dr_grpo", "cispo", "sapo", "vespo"),
        COMMON
        | {
            "PPO epochs": {"num_iterations": 2, "max_steps": 4},
            "masks": {"mask_truncated_completions": True},
        },
    ),
    "GRPO, tools": (with_tools, ("grpo", "dapo"), {"plain": {}}),
    "GRPO, reference follows": (synchronized, ("grpo", "dapo"), {"plain": {}}),
    "SFT": (adapted(sft_trainer), ("nll", "chunked_nll", "dft"), COMMON),
    "DPO": (adapted(dpo_trainer), ("sigmoid", "ipo", "hinge", "robust"), COMMON),
    "RLOO": (
        hooked("RLOO"),
        ("",),
        {name: COMMON[name] for name in ("plain", "accumulation", "bf16")}
        | {"PPO epochs": {"num_iterations": 2, "max_steps": 4}},
    ),
    "KTO": (
        hooked("KTO"),
        ("kto", "apo_zero_unpaired"),
        {name: COMMON[name] for name in ("plain", "accumulation", "bf16")},
    ),
}


def cells() -> Iterator[Any]:
    """The cells of the table; those that are not of `ALWAYS` are slow."""
    for name, (_, losses, features) in TABLE.items():
        for loss in losses:
            for feature in features:
                cell = (name, loss, feature)
                marks = [] if cell in ALWAYS else [pytest.mark.slow]
                yield pytest.param(*cell, id=" ".join(cell), marks=marks)


def ended(one: Any, out: Path | None) -> dict[str, Any]:
    """What a training leaves behind."""
    random.seed(0)
    np.random.seed(0)
    if out is not None:
        sharpscope.record(one, out=out, every=1)
    one.train()
    lines = [
        {name: value for name, value in line.items() if not any(part in name for part in TIMES)}
        for line in one.state.log_history
    ]
    states = [
        value
        for _, state in one.optimizer.state_dict()["state"].items()
        for value in state.values()
    ]
    return {
        "weights": [p.detach() for p in one.model.parameters()],
        "optimizer": [torch.as_tensor(value) for value in states],
        "random": [
            torch.get_rng_state(),
            torch.tensor(random.getstate()[1]),
            torch.tensor(np.random.get_state()[1].astype(int)),
        ],
        "lines": lines,
    }


@pytest.mark.parametrize(("name", "loss", "feature"), cells())
def test_a_recorded_training_is_the_training(name: str, loss: str, feature: str, tmp_path: Path):
    make, _, features = TABLE[name]
    arguments = {"max_steps": 2} | features[feature] | ({"loss_type": loss} if loss else {})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = ended(make(tmp_path / "a", **arguments), None)
        recorded = ended(make(tmp_path / "b", **arguments), tmp_path / "run")
    assert plain["lines"] and plain["lines"] == recorded["lines"]
    for what in ("weights", "optimizer", "random"):
        assert len(plain[what]) == len(recorded[what]) > 0
        for a, b in zip(plain[what], recorded[what], strict=True):
            assert torch.equal(a, b), what
    run = sharpscope.load_run(tmp_path / "run")
    assert run.status == "finished" and len(run.updates) == arguments["max_steps"]
    assert run.tokens()["attribution"].notna().any()
