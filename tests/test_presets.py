"""The configurations under experiments/paper hold the paper's constants, and methods that ask something of the training loop train."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from sharpscope.config import build_config
from sharpscope.config.token_weights import SigmoidWeight
from sharpscope.traces import load_run
from sharpscope.training import train

PAPER = sorted((Path(__file__).resolve().parents[1] / "experiments" / "paper").glob("*.yaml"))
LOOP = ("lopti", "holder", "dapo", "lp-reg", "grpo-sam", "otb", "gdpo", "maxrl")
"""Methods that ask something else of the training loop than plain GRPO."""


@pytest.mark.parametrize("method", LOOP)
def test_a_method_trains_one_step(method: str, toy_config):
    config = toy_config(method=method, steps=1, update__mini_batches=2, evaluation__every=0, probes__preset="off")
    if method == "gdpo":
        advantage = config.method.advantage.model_copy(update={"weights": {"vowels": 1.0}})
        config = config.model_copy(update={"method": config.method.model_copy(update={"advantage": advantage})})
    run = load_run(train(config).run_dir)
    assert run.status == "finished" and float(run.steps["grad_norm"].iloc[0]) > 0
    assert run.steps["updates"].iloc[0] == 2 * config.method.pass_count
    assert bool((run.tokens()["weight"] >= 0).all())


def preset(name: str):
    return build_config(next(path for path in PAPER if path.name.startswith(name)))


@pytest.mark.parametrize("path", PAPER, ids=lambda path: path.stem)
def test_a_preset_is_a_valid_configuration_that_says_what_is_ours(path):
    text = path.read_text()
    config = build_config(path)
    assert "Ours" in text and "From the paper" in text
    weight = config.method.weight.with_preset("auto", "paper")  # what any model but the embedded ones gets
    assert isinstance(weight, SigmoidWeight)
    assert weight.constants() == {"alpha": 2.0, "tau": 9.0, "mu": 0.25, "L": 1.0, "U": 1.4, "u0": 0.0}
    assert config.policy.dtype == "bfloat16" and config.update.gradient_checkpointing
    given = yaml.safe_load(text)
    assert given["method"]["name"] == "grpo-sg" and given["policy"]["model"] == config.policy.model


def test_the_presets_have_the_published_settings():
    config = preset("knights_knaves")
    assert (config.task.sizes, config.task.train_size, config.task.heldout_size) == ((3, 4, 5, 6, 7), 900, 100)
    assert (config.rollout.prompts_per_step, config.rollout.group_size, config.rollout.temperature) == (64, 8, 0.7)
    assert (config.optimizer.lr, config.steps, config.method.kl.coef) == (1e-6, 350, 0.001)
    assert (config.method.clip.low, config.method.clip.high) == (0.2, 0.24)
    task, config = preset("search_r1").task, preset("deepscaler")
    assert (task.style, task.turns, task.top) == ("search_r1", 4, 3)
    assert config.evaluation.samples == 16 and config.task.scorer == "math"
