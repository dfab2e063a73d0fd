"""A trained run with all of its checkpoints."""

from __future__ import annotations

import pytest

from sharpscope.config import build_config
from sharpscope.training import train
from tests.conftest import TOY


@pytest.fixture(scope="package")
def trained(tiny_policy, tmp_path_factory):
    """Configuration of a run of six steps with all of its checkpoints."""
    values = {**TOY, "policy.model": str(tiny_policy), "out": str(tmp_path_factory.mktemp("runs") / "run")}
    changes = {"steps": 6, "checkpoint.every": 1, "checkpoint.keep_last": 9, "evaluation.every": 0, "seed": 3}
    changes |= {
        "method": "grpo-sg",
        "method.weight.preset": "calibrated",
        "method.kl.coef": 0.01,
        "update.mini_batches": 2,
    }
    changes |= {"optimizer.schedule": "cosine", "optimizer.weight_decay": 0.1}
    config = build_config(values=values | changes)
    assert train(config).status == "finished"
    return config
