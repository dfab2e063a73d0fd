"""A trained run with all of its checkpoints, and states that arms start from."""

from __future__ import annotations

import pytest

from sharpscope.config import ForkSpec, build_config
from sharpscope.forks.experiment import Measure
from sharpscope.forks.start import Start
from sharpscope.methods.named import parse_method
from sharpscope.training import train
from sharpscope.training.checkpoint import checkpoint_dir
from tests.conftest import TOY

SMALL = {"prompts": 3, "batches": 2}


@pytest.fixture(scope="package")
def trained(tiny_policy, tmp_path_factory):
    """Configuration of a run of six steps with all of its checkpoints."""
    values = {
        **TOY,
        "policy.model": str(tiny_policy),
        "out": str(tmp_path_factory.mktemp("runs") / "run"),
    }
    changes = {
        "steps": 6,
        "checkpoint.every": 1,
        "checkpoint.keep_last": 9,
        "evaluation.every": 0,
        "seed": 3,
    }
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


def start_of(config, step=0, *, warm_up=4, **arms) -> Start:
    folder = checkpoint_dir(config.run_dir, step) if step else None
    return Start(config, arms or {"own": config.method}, folder, warm_up=warm_up, calibrating=2)


def rows_of(start, spec=None, batch=0):
    """Rows of all arms on a batch."""
    spec = spec or ForkSpec(**SMALL)
    return list(Measure(start, spec, spec.rho).batch_rows("x", batch))


def arm_method(text, config):
    """The method as an arm of a fork from a run."""
    return parse_method(text).with_preset(config.default_preset, "auto")
