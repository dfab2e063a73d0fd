"""The step in progress: its batches of completions, what the loss did with their tokens, updates and timing."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sharpscope.integrations.trl.batches import Batch, join, joined_updates, widened
from sharpscope.integrations.trl.loss import token_loss
from sharpscope.recording import PendingUpdate, RolloutBatch, StepTokens, UpdateResult, UpdateTokens


@dataclass
class Step:
    """Whole batches and whole updates; `micro` counts the micro-steps so far, `seconds` is the time by part [s]."""

    batches: list[Batch] = field(default_factory=list)
    updates: list[UpdateResult] = field(default_factory=list)
    micro: int = 0
    seconds: dict[str, float] = field(
        default_factory=lambda: {"generation_s": 0.0, "training_s": 0.0, "recording_s": 0.0}
    )
    gradient: tuple[float, float, float] = (math.nan, math.nan, 1.0)  # loss, norm, clip factor of the present update
    corrected: bool = False  # whether TRL multiplies the loss by a factor for the sampler's policy
    losses: list[Tensor] = field(default_factory=list)  # of the present update's micro-batches
    gaps: list[Tensor] = field(
        default_factory=list
    )  # |ln π of TRL − ln π of our forward pass| before the first update [nats]
    pending: list[tuple[int, Tensor, UpdateTokens]] = field(
        default_factory=list
    )  # serial, rows (n,), what they do in the present update

    @property
    def other_seconds(self) -> float:
        """Seconds of generation and recording."""
        return self.seconds["generation_s"] + self.seconds["recording_s"]

    def hook(self, trainer: Any, logp: Tensor, inputs: dict[str, Any], numbers: Tensor) -> None:
        """Record what a micro-batch's tokens do in the loss and, in the backward pass, ∂L/∂log π of each.

        Args:
            trainer: whose options apply.
            logp: (n, T) [nats], what TRL's loss differentiates.
            inputs: TRL's micro-batch.
            numbers: (n, 2), serial number of the batch and row in it.
        """
        serial, rows = int(numbers[0, 0]), numbers[:, 1].cpu()
        batch = next(b for b in self.batches if b.serial == serial)
        tokens, index = batch.tokens, len(self.updates)
        mask = batch.rollout_batch.rollouts.completion_mask[rows.to(logp.device)].bool().cpu()
        first = mask & (tokens.update[rows] < 0)  # (n, T): a token's columns are those of its first update
        if index == 0:
            ours = tokens.stats.logp[rows.to(tokens.stats.logp.device)].cpu()
            self.gaps.append((logp.detach().cpu() - ours).abs()[mask])
        found = token_loss(trainer, inputs, logp)
        values = [(tokens.ratio, found.ratio), (tokens.clipped, found.clipped)]
        if inputs.get("importance_sampling_ratio") is not None:  # (n, 1) for a whole completion, else (n, T)
            self.corrected = True
            values.append((tokens.correction, inputs["importance_sampling_ratio"].expand(logp.shape)))
        for target, value in values:
            target[rows] = torch.where(first, value.detach().cpu().to(target.dtype), target[rows])
        tokens.update[rows] = torch.where(first, index, tokens.update[rows])
        update_tokens = UpdateTokens.zeros(mask.shape, tokens.loss_coef.dtype)
        update_tokens.write(
            torch.arange(len(rows)),
            mask,
            clipped=found.clipped,
            kl=found.kl,
            ratio=found.ratio,
            log_ratio=found.log_ratio,
        )

        def keep(gradient: Tensor) -> None:
            update_tokens.coef = torch.where(mask, gradient.detach().to("cpu", update_tokens.coef.dtype), 0.0)
            tokens.loss_coef[rows] = torch.where(first, update_tokens.coef, tokens.loss_coef[rows])
            self.pending.append((serial, rows, update_tokens))

        logp.register_hook(keep)

    def joined(self) -> tuple[RolloutBatch, StepTokens]:
        """All batches so far as one, and its tokens."""
        joined, tokens, _ = join(self.batches)
        return joined, tokens

    def pending_update(self) -> PendingUpdate:
        """The present update between its gradient and the optimizer's step."""
        joined, tokens, offset = join(self.batches)
        width, index = joined.rollouts.completion_ids.shape[1], len(self.updates)
        rows = torch.cat([rows + offset[serial] for serial, rows, _ in self.pending])
        coef = torch.cat([widened(update_tokens.coef, width) for _, _, update_tokens in self.pending])
        _, norm, factor = self.gradient
        return PendingUpdate(index, rows, tokens.update[rows] == index, coef, norm, factor)

    def record_update(self, size: float, skipped: bool, lr: float) -> None:
        """Record that the present update was made; `size` is ‖Δθ‖₂, `lr` its learning rate."""
        loss, norm, factor = self.gradient
        summary = joined_updates([tokens for _, _, tokens in self.pending]).summary()
        self.updates.append(UpdateResult(loss, norm, norm, size, factor, skipped, lr=lr, summary=summary))
        if not skipped:
            tokens = {batch.serial: batch.tokens for batch in self.batches}
            for serial, rows, update_tokens in self.pending:
                tokens[serial].count(rows, update_tokens)
        self.pending, self.losses = [], []
