"""The step in progress: its batches of completions, what the loss did with their tokens, updates and timing."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from sharpscope import distributed
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


@dataclass(frozen=True)
class Use:
    """What a micro-batch of the present update does with n rows of a batch."""

    serial: int  # of the batch
    rows: Tensor  # (n,) in the batch, on the CPU
    tokens: UpdateTokens
    correction: Tensor | None  # (n, T), as in TokenLoss

    def divided(self, count: int) -> Use:
        """The same use with coefficients divided by the number of processes, over which DDP and FSDP2 average gradients."""
        return replace(self, tokens=replace(self.tokens, coef=self.tokens.coef / count))


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
    pending: list[Use] = field(default_factory=list)  # of the present update

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
        mask = batch.rollout_batch.rollouts.completion_mask[rows.to(batch.device)].bool().cpu()
        if known is None:
            known = TokenLoss(*(torch.full(mask.shape, value) for value in (1.0, 0.0, 0, 0.0)))
        mask = mask[:, : known.ratio.shape[1]]  # a process's own rows can be shorter than the whole batch's
        correction = None if known.correction is None else known.correction.detach().cpu().expand(mask.shape)
        tokens = UpdateTokens.zeros(mask.shape, batch.tokens.loss_coef.dtype)
        tokens.write(
            torch.arange(len(rows)),
            mask,
            clipped=known.clipped,
            kl=known.kl,
            ratio=known.ratio,
            log_ratio=known.log_ratio,
        )

        def keep(gradient: Tensor) -> None:
            tokens.coef = torch.where(mask, gradient.detach().to("cpu", tokens.coef.dtype), 0.0)
            self.pending.append(Use(serial, rows, tokens, correction))

        return keep

    def collect(self) -> None:
        """Gather what the micro-batches of all processes do, where these have the same batches."""
        count = distributed.world_size()
        if count == 1:
            return
        own = (self.pending, self.gaps, [float(loss) / count for loss in self.losses])
        parts = distributed.gather(own)
        self.pending = [use.divided(count) for uses, _, _ in parts for use in uses]
        if not self.updates:  # later there are no new ones
            self.gaps = [gap for _, gaps, _ in parts for gap in gaps]
        self.losses = [torch.tensor(loss) for _, _, losses in parts for loss in losses]

    def settle(self) -> None:
        """Give each token of the present update, whose gradient is complete, the columns of its first use."""
        index = len(self.updates)
        settled: list[Use] = []
        for use in self.pending:
            tokens, rows = self.batch(use.serial).tokens, use.rows
            width = tokens.update.shape[1]
            each = UpdateTokens(*(widened(value, width) for value in use.tokens.tensors()))
            first = each.used & (tokens.update[rows] < 0)  # (n, T)
            values = [(tokens.ratio, each.ratio), (tokens.clipped, each.clipped), (tokens.loss_coef, each.coef)]
            if use.correction is not None:
                self.corrected = True
                values.append((tokens.correction, widened(use.correction, width)))
            for target, value in values:
                target[rows] = torch.where(first, value.to(target.dtype), target[rows])
            tokens.update[rows] = torch.where(first, index, tokens.update[rows])
            settled.append(replace(use, tokens=each))
        self.pending = settled

    def compare(self, serial: int, rows: Tensor, logp: Tensor) -> None:
        """Keep the gaps between the trainer's log-probabilities (n, T) and our forward pass's, before the first update."""
        if self.updates:
            return
        batch = self.batch(serial)
        mask = batch.rollout_batch.rollouts.completion_mask[rows.to(batch.device), : logp.shape[1]].bool().cpu()
        ours = batch.tokens.stats.logp[rows.to(batch.device), : logp.shape[1]].cpu()
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
        rows = torch.cat([use.rows + offset[use.serial] for use in self.pending])
        coef = torch.cat([widened(use.tokens.coef, width) for use in self.pending])
        _, norm, factor = self.gradient
        return PendingUpdate(index, rows, tokens.update[rows] == index, coef, norm, factor)

    def record_update(self, size: float, skipped: bool, lr: float) -> None:
        """Record that the present update was made; `size` is ‖Δθ‖₂, `lr` its learning rate."""
        loss, norm, factor = self.gradient
        summary = joined_updates([use.tokens for use in self.pending]).summary()
        self.updates.append(UpdateResult(loss, norm, norm, size, factor, skipped, lr=lr, summary=summary))
        if not skipped:
            tokens = {batch.serial: batch.tokens for batch in self.batches}
            for use in self.pending:
                tokens[use.serial].count(use.rows, use.tokens)
        self.pending, self.losses = [], []
