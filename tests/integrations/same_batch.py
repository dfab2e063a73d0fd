"""One batch of completions for several trainers, and our training loop's run on it.

Each case maps one objective to the options of each trainer:

| | sharpscope | TRL | verl |
|---|---|---|---|
| mean over all tokens | aggregate = token_mean | loss_type = dapo | loss_agg_mode = token-mean |
| mean over completions of token means | sequence_mean | grpo | seq-mean-token-mean |
| advantages divided by the group's std | advantage.scale = group | scale_rewards = group | norm_adv_by_std_in_grpo = True |
| not divided | none | none | False |
| epsilon added to the std | advantage.epsilon | 1e-4, not an option | an argument, published 1e-6 |
| divergence from the reference | kl.coef (k3) | beta | kl_loss_coef, kl_loss_type = low_var_kl |
| updates on one batch | update.inner_epochs | num_iterations | epochs |
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import sharpscope
from sharpscope.config import build_config
from sharpscope.policy import completions_of
from sharpscope.tasks import Reward
from sharpscope.training import rollouts as drawing
from sharpscope.training import train
from tests.integrations.trainers import small_model, tokenizer

GROUP, EPOCHS, KL, LR, EPS = 4, 2, 0.05, 0.01, 1e-2
"""EPS is AdamW's: a large one, so that an update does not turn rounding errors of tiny gradients into steps of size LR."""


@dataclass(frozen=True)
class Case:
    """An objective in the terms of each trainer."""

    aggregate: str
    scale: str
    trl_loss: str
    verl_loss: str
    verl_std: bool


CASES = {
    "tokens": Case("token_mean", "group", "dapo", "token-mean", True),
    "sequences": Case("sequence_mean", "none", "grpo", "seq-mean-token-mean", False),
}


@dataclass(frozen=True)
class Given:
    """The batch: 4 prompts, GROUP completions of each, rewards."""

    prompts: list[list[int]]  # 16 rows, completions of a prompt adjacent
    completions: list[list[int]]
    rewards: list[float]


def batch() -> Given:
    """Of random lengths, all ended by <eos> (1)."""
    draw = np.random.default_rng(5)
    prompts = [draw.integers(2, 37, size).tolist() for size in (2, 1, 3, 2)]
    rows = [prompt for prompt in prompts for _ in range(GROUP)]
    completions = [[*draw.integers(2, 37, draw.integers(1, 7)).tolist(), 1] for _ in rows]
    return Given(rows, completions, np.round(draw.normal(size=len(rows)), 2).tolist())


def our_run(folder: Path, case: Case) -> Any:
    """One step of `sharpscope run` on the batch: EPOCHS updates."""
    given = batch()
    small_model().save_pretrained(folder / "model")
    tokenizer().save_pretrained(folder / "model")
    config = build_config(
        values={
            "policy.model": str(folder / "model"),
            "task.kind": "custom",
            "task.factory": "tests.toy_task:vowels",
            "out": str(folder / "ours"),
            "threads": 1,
            "steps": 1,
            "rollout.prompts_per_step": len(given.prompts) // GROUP,
            "rollout.group_size": GROUP,
            "rollout.max_new_tokens": 8,
            "update.mini_batches": 1,
            "update.inner_epochs": EPOCHS,
            "evaluation.every": 0,
            "checkpoint.every": 0,
            "probes.preset": "off",
            "optimizer.lr": LR,
            "optimizer.eps": EPS,
            "method.advantage.kind": "group",
            "method.advantage.scale": case.scale,
            "method.aggregate": case.aggregate,
            "method.kl.coef": KL,
            "recording.token_gradients_every": 1,
            "recording.exact_tokens": 100,
            "recording.group_share": 1.0,
            "recording.heldout_influence_every": 0,
        }
    )

    def drawn(*_: Any) -> Any:
        made = completions_of(given.prompts, given.completions)
        rewards = [Reward(value, {"given": value}, value > 0) for value in given.rewards]
        scored = made.with_reward(torch.tensor(given.rewards))
        return type(scored)(**{**vars(scored), "group": scored.group // GROUP}), rewards

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drawing, "draw_group", drawn)
        train(config)
    return sharpscope.load_run(config.run_dir)


def tokens_by_row(run: Any) -> Any:
    """The tokens in an order that does not depend on the trainer: by completion, each of which is different, and position."""
    tokens = run.tokens().sort_values(["rollout", "position"])
    names = {rollout: str(mine["token_id"].tolist()) for rollout, mine in tokens.groupby("rollout")}
    return tokens.assign(row=tokens["rollout"].map(names)).sort_values(["row", "position"]).reset_index(drop=True)


def check_equal(ours: Any, theirs: Any, columns: list[str]) -> None:
    """Compare the tokens' `columns` and the updates of two runs on the batch, to 1e-5."""
    one, two = tokens_by_row(ours), tokens_by_row(theirs)
    assert one["row"].nunique() == len(batch().completions)
    assert one["row"].tolist() == two["row"].tolist() and one["token_id"].tolist() == two["token_id"].tolist()
    assert len(one) == sum(map(len, batch().completions)) and (one["loss_coef"].abs() > 1e-3).mean() > 0.5
    for column in columns:
        size = float(one[column].abs().max())
        assert size > 0
        np.testing.assert_allclose(two[column], one[column], rtol=1e-5, atol=1e-6 * size, err_msg=column)
    assert len(ours.updates) == len(theirs.updates) == EPOCHS
    for column in ("grad_norm", "update_norm", "loss", "kl_old_k3", "ratio_max", "lr", "tokens"):
        np.testing.assert_allclose(
            theirs.updates[column].astype(float),
            ours.updates[column].astype(float),
            rtol=1e-5,
            atol=1e-6,
            err_msg=column,
        )
    assert ours.updates["ratio_max"].iloc[1] > 1.01  # the second update is off policy
