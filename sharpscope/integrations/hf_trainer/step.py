"""The step in progress: its batches of completions, what the loss did with their tokens, updates and timing."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sharpscope.integrations.hf_trainer.batches import Batch, join, joined_updates, widened
from sharpscope.recording import PendingUpdate, RolloutBatch, StepTokens, UpdateResult, UpdateTokens


@dataclass(frozen=True)
class TokenLoss:
    """(n, T) values of the tokens of one micro-batch under the policy of its update."""

    ratio: Tensor
    log_ratio: Tensor  # ln π − ln π_old of the token [nats], 0 outside the mask
    clipped: Tensor  # −1 lower bound acts, 1 upper, 0 none
    kl: Tensor  # k3 [nats], 0 without a reference
    correction: Tensor | None = (
        None  # factor of the loss for the sampler's policy, (n, 1) for whole completions or (n, T)
    )


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
    corrected: bool = False  # whether the trainer multiplies the loss by a factor for the sampler's policy
    losses: list[Tensor] = field(default_factory=list)  # of the present update's micro-batches
    gaps: list[Tensor] = field(
        default_factory=list
    )  # |ln π of the trainer − ln π of our forward pass| before the first update [nats]
    pending: list[tuple[int, Tensor, UpdateTokens]] = field(
        default_factory=list
    )  # serial, rows (n,), what they do in the present update

    @property
    def other_seconds(self) -> float:
        """Seconds of generation and recording."""
        return self.seconds["generation_s"] + self.seconds["recording_s"]

    def use(self, serial: int, rows: Tensor, known: TokenLoss | None = None) -> Callable[[Tensor], None]:
        """Record that a micro-batch of the present update uses some rows of a batch.

        Args:
            serial: of the batch.
            rows: (n,) in the batch, on the CPU.
            known: what the loss does with their tokens, if it has a ratio; None: the ratio is 1 and nothing is clipped.

        Returns:
            A function to call in the backward pass with ∂L/∂log π (n, T) of the rows' tokens.
        """
        batch = self.batch(serial)
        tokens, index = batch.tokens, len(self.updates)
        mask = batch.rollout_batch.rollouts.completion_mask[rows.to(batch.device)].bool().cpu()
        first = mask & (tokens.update[rows] < 0)  # (n, T): a token's columns are those of its first update
        if known is None:
            known = TokenLoss(*(torch.full(mask.shape, value) for value in (1.0, 0.0, 0, 0.0)))
        values = [(tokens.ratio, known.ratio), (tokens.clipped, known.clipped)]
        if known.correction is not None:
            self.corrected = True
            values.append((tokens.correction, known.correction.expand(mask.shape)))
        for target, value in values:
            target[rows] = torch.where(first, value.detach().cpu().to(target.dtype), target[rows])
        tokens.update[rows] = torch.where(first, index, tokens.update[rows])
        update_tokens = UpdateTokens.zeros(mask.shape, tokens.loss_coef.dtype)
        update_tokens.write(
            torch.arange(len(rows)),
            mask,
            clipped=known.clipped,
            kl=known.kl,
            ratio=known.ratio,
            log_ratio=known.log_ratio,
        )

        def keep(gradient: Tensor) -> None:
            update_tokens.coef = torch.where(mask, gradient.detach().to("cpu", update_tokens.coef.dtype), 0.0)
            tokens.loss_coef[rows] = torch.where(first, update_tokens.coef, tokens.loss_coef[rows])
            self.pending.append((serial, rows, update_tokens))

        return keep

    def compare(self, serial: int, rows: Tensor, logp: Tensor) -> None:
        """Keep the gaps between the trainer's log-probabilities (n, T) and our forward pass's, before the first update."""
        if self.updates:
            return
        batch = self.batch(serial)
        mask = batch.rollout_batch.rollouts.completion_mask[rows.to(batch.device)].bool().cpu()
        ours = batch.tokens.stats.logp[rows.to(batch.device)].cpu()
        self.gaps.append((logp.detach().cpu() - ours).abs()[mask])

    def batch(self, serial: int) -> Batch:
        """The batch with this serial number."""
        return next(batch for batch in self.batches if batch.serial == serial)

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
