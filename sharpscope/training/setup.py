"""The parts that a run, a fork and a rotation share: policy, reference, learner and learning rate."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from sharpscope.errors import UserError
from sharpscope.policy import Policy, load_policy
from sharpscope.policy.adapters import has_adapters
from sharpscope.policy.scoring import Scorer
from sharpscope.training.learner import Learner
from sharpscope.training.optimizer import learning_rate

if TYPE_CHECKING:
    from sharpscope.config import RunConfig


def load_start(config: RunConfig, checkpoint: Path | None) -> Policy:
    """The policy of a run's checkpoint, or with None the one that the run starts from."""
    source = config.policy if checkpoint is None else config.policy.model_copy(update={"model": str(checkpoint)})
    return load_policy(source, base=config.policy.model)


def reference_policy(config: RunConfig, policy: Policy) -> nn.Module:
    """The reference of the KL term: the initial policy, or the policy itself if its adapters can be switched off."""
    if has_adapters(policy.model):
        return policy.model
    return load_policy(config.policy).model.eval().requires_grad_(False)


def make_learner(
    config: RunConfig,
    policy: Policy,
    optimizer: torch.optim.AdamW,
    *,
    reference: nn.Module | None = None,
    proximal: nn.Module | None = None,
) -> Learner:
    """A learner with the run's settings."""
    scorer = Scorer(
        policy.model,
        config.rollout.temperature,
        config.update.microbatch_tokens,
        config.update.share_prompt,
        policy.compute,
        config.update.gradient_checkpointing,
    )
    return Learner(
        scorer,
        optimizer,
        max_new_tokens=config.rollout.max_new_tokens,
        mini_batches=config.update.mini_batches,
        inner_epochs=config.update.inner_epochs,
        max_grad_norm=config.optimizer.max_grad_norm,
        seed=config.seed,
        reference=reference,
        proximal=proximal,
    )


def positive_learning_rate(config: RunConfig, step: int) -> float:
    """The learning rate of a run's step.

    Raises:
        UserError: it is 0, so an update changes nothing.
    """
    lr = learning_rate(config.optimizer, step, config.steps)
    if not lr > 0:
        raise UserError(
            f"optimizer.schedule = {config.optimizer.schedule}: the learning rate is 0 at step {step}; choose an earlier "
            "checkpoint, or --set optimizer.schedule=constant"
        )
    return lr
