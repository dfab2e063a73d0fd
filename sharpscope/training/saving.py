"""Checkpoints of a policy whose weights may be sharded: the first process saves them unsharded, all processes read them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from sharpscope import distributed
from sharpscope.policy import Policy
from sharpscope.policy.sharding import gathered_copy, is_sharded, shard_state
from sharpscope.training.checkpoint import Progress, load_checkpoint, prune, save_checkpoint

if TYPE_CHECKING:
    from sharpscope.config import RunConfig


def save(
    config: RunConfig,
    policy: Policy,
    optimizer: torch.optim.AdamW,
    progress: Progress,
    proximal: nn.Module | None,
    vectors: Tensor | None,
) -> None:
    """Write a checkpoint with unsharded weights and optimizer state, and remove those that are not kept.

    Every process must call it.

    Raises:
        OSError: in every process, if the first one cannot write.
    """
    model = policy.model
    if is_sharded(model):
        gathered = gathered_copy(model, optimizer, torch.device("cpu"), keep=distributed.is_rank_zero())
        model, optimizer = gathered.model, gathered.optimizer

    def write() -> None:
        save_checkpoint(config.run_dir, model, policy.tokenizer, optimizer, progress, proximal, vectors)
        prune(config.run_dir, config.checkpoint)

    distributed.rank_zero_call(write)


def restore(checkpoint: Path, policy: Policy, optimizer: torch.optim.AdamW, proximal: nn.Module | None) -> Progress:
    """Restore optimizer and proximal policy from `checkpoint`, from which the policy was loaded before.

    Every process reads the folder, so several machines must share it.
    """
    if not is_sharded(policy.model):
        return load_checkpoint(checkpoint, policy.model, optimizer, proximal)
    gathered = gathered_copy(policy.model, optimizer, torch.device("cpu"))
    progress = load_checkpoint(checkpoint, gathered.model, gathered.optimizer, None)
    shard_state(gathered, policy.model, optimizer)
    return progress
