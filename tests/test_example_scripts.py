"""The scripts in `examples/` run, and GRPO in one file does what the package does."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from sharpscope.config.run import OptimizerSpec
from sharpscope.methods import named_method
from sharpscope.policy import completions_of
from sharpscope.policy.forward import Scorer
from sharpscope.tasks import Reward
from sharpscope.traces import load_run
from sharpscope.training.learner import Learner, build_optimizer
from sharpscope.training.rollouts import step_advantages

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.parametrize("name", ["trl_grpo", "trl_sft", "trl_dpo", "lora", "plain_loop"])
def test_a_script_runs_and_its_shares_sum_to_one(name: str, tmp_path: Path):
    paths = os.pathsep.join([str(EXAMPLES), str(EXAMPLES.parent)])
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning:sharpscope", str(EXAMPLES / f"{name}.py")],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    run = load_run(tmp_path / "runs" / name.replace("_", "-"))
    assert run.status == "finished" and len(run.steps) == 4
    shares = run.tokens().groupby(["step", "update"])["attribution"].sum()
    assert len(shares) == 4
    np.testing.assert_allclose(shares, 1.0, atol=1e-3)


def test_grpo_in_one_file_is_the_packages_and_is_not_changed_by_recording(tmp_path: Path):
    """Losses, gradient norms and weights after two steps of two updates."""
    example = runpy.run_path(str(EXAMPLES / "grpo_in_one_file.py"))
    plain, updates = example["train"](steps=2, record=False)
    recorded, _ = example["train"](steps=2, out=str(tmp_path / "run"))
    pairs = zip(plain.parameters(), recorded.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert load_run(tmp_path / "run").steps["updates"].tolist() == [2, 2]

    ours, tokenizer = example["make_model"](), example["make_tokenizer"]()
    spec = OptimizerSpec(lr=example["LR"], max_grad_norm=example["MAX_GRAD_NORM"])
    learner = Learner(
        Scorer(ours, 1.0, 4096, True),
        build_optimizer(ours, spec),
        max_new_tokens=example["NEW_TOKENS"],
        mini_batches=1,
        inner_epochs=example["UPDATES"],
        max_grad_norm=spec.max_grad_norm,
        seed=0,
    )
    method, made = named_method("grpo"), []
    for step in range(2):
        batch = example["draw"](ours, tokenizer, step)
        rows = [row[:2].tolist() for row in batch.ids]
        lengths = batch.mask.sum(1).tolist()
        texts = [row[2 : 2 + n].tolist() for row, n in zip(batch.ids, lengths, strict=True)]
        drawn = replace(completions_of(rows, texts), group=batch.group).with_reward(batch.rewards)
        rewards = [Reward(value, {}, value > 0) for value in batch.rewards.tolist()]
        advantage = step_advantages(method, drawn, rewards)
        assert float(advantage.abs().max()) > 0.5  # the groups teach something
        made += learner.learn(drawn, advantage, step + 1, 0.0, method=method).updates
    assert len(made) == len(updates) == 4
    for ours_update, theirs in zip(made, updates, strict=True):
        assert ours_update.loss == pytest.approx(theirs.loss, abs=2e-6)
        assert ours_update.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-4)
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=2e-5)
