"""The parts that a run, a fork and a rotation share: policy, reference, optimizer with its learning rate, and learner."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from sharpscope.config.run import OptimizerSpec
from sharpscope.errors import UserError
from sharpscope.memory import require_memory
from sharpscope.policy import Policy, load_policy
from sharpscope.policy.adapters import has_adapters
from sharpscope.policy.scoring import Scorer
from sharpscope.policy.sharding import is_shard
from sharpscope.training.learner import Learner

if TYPE_CHECKING:
    from sharpscope.config import RunConfig


def load_start(config: RunConfig, checkpoint: Path | None) -> Policy:
    """The policy of a run's checkpoint, or with None the one that the run starts from.

    Raises:
        UserError: the model cannot be loaded, or its gradient and the optimizer's moments do not fit into memory.
    """
    source = config.policy if checkpoint is None else config.policy.model_copy(update={"model": str(checkpoint)})
    policy = load_policy(source, base=config.policy.model)
    trained = sum(p.numel() * p.element_size() for p in policy.model.parameters() if p.requires_grad)
    require_memory(
        3 * trained, policy.device, "a gradient with AdamW's two moments", "train adapters (--set policy.lora.r=16)"
    )
    return policy


def reference_policy(config: RunConfig, policy: Policy) -> nn.Module:
    """The reference of the KL term: the initial policy, or the policy itself if its adapters can be switched off."""
    if has_adapters(policy.model):
        return policy.model
    return load_policy(config.policy).model.eval().requires_grad_(False)


def make_learner(
    config: RunConfig, policy: Policy, optimizer: torch.optim.AdamW, *, reference: nn.Module | None = None
) -> Learner:
    """A learner with the run's settings."""
    scorer = Scorer(
        policy.model,
        config.rollout.temperature,
        config.update.microbatch_tokens,
        True,
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
    )


def build_optimizer(model: nn.Module, spec: OptimizerSpec) -> torch.optim.AdamW:
    """AdamW over the trainable parameters; weight decay acts on tensors of two or more dimensions only.

    Sharded parameters have groups of their own: AdamW's fused operations take one kind of tensor at a time.
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {
            "params": [p for p in trainable if (p.ndim >= 2) is matrices and is_shard(p) is divided],
            "weight_decay": spec.weight_decay if matrices else 0.0,
        }
        for divided in (False, True)
        for matrices in (True, False)
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=spec.lr, betas=(0.9, spec.beta2), eps=spec.eps
    )


def learning_rate(spec: OptimizerSpec, step: int, steps: int) -> float:
    """Learning rate of `step` (counted from 1) in a run of `steps` steps.

    With w warm-up steps: lr·step/w up to step w, then constant, or a decay from lr at step max(w, 1) to 0 at step `steps`:
    linear lr·(1 − d), cosine lr·(1 + cos πd)/2 with d = (step − max(w, 1))/(steps − max(w, 1)). These are transformers'
    schedules after `step` calls of the scheduler. A run of one step has no decay.
    """
    if step <= spec.warmup_steps:
        return spec.lr * step / spec.warmup_steps
    peak = max(spec.warmup_steps, 1)
    done = (step - peak) / max(steps - peak, 1)
    if spec.schedule == "linear":
        return spec.lr * (1 - done)
    if spec.schedule == "cosine":
        return spec.lr * 0.5 * (1 + math.cos(math.pi * done))
    return spec.lr


def positive_learning_rate(config: RunConfig, step: int) -> float:
    """The learning rate of a run's step.

    Raises:
        UserError: it is 0, so an update changes nothing.
    """
    lr = learning_rate(config.optimizer, step, config.steps)
    if not lr > 0:
        given = f"optimizer.schedule = {config.optimizer.schedule}: the learning rate is 0 at step {step}"
        raise UserError(f"{given}; choose an earlier checkpoint, or --set optimizer.schedule=constant")
    return lr


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give every parameter group the same learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = lr
