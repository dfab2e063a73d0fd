"""Statistics of a policy over rollouts, in microbatches that the processes of a run divide among themselves."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

import torch
from torch import Tensor, nn

from sharpscope import distributed
from sharpscope.policy.forward import Scored, microbatches, score_completions
from sharpscope.policy.rollouts import Rollouts
from sharpscope.policy.sharding import is_sharded
from sharpscope.policy.token_stats import TokenStats


@dataclass(frozen=True)
class Scorer:
    """Forward passes of a policy over rollouts.

    Attributes:
        model: the policy.
        temperature: T > 0 of the softmax.
        microbatch_tokens: tokens of one forward pass, prompts included.
        share_prompt: run the prompt of a group once for all its rows. A sharded model never does: every process must run
            the layers equally often, so each microbatch is one pass, prompts included.
        compute: dtype of the matrix products; None for that of the weights.
        gradient_checkpointing: recompute activations in the backward pass.
    """

    model: nn.Module
    temperature: float
    microbatch_tokens: int
    share_prompt: bool
    compute: torch.dtype | None = None
    gradient_checkpointing: bool = False

    @cached_property
    def sharded(self) -> bool:
        """Whether the model's parameters are divided over processes."""
        return is_sharded(self.model)

    @property
    def _shares(self) -> bool:
        return self.share_prompt and not self.sharded

    def score(
        self, rows: Rollouts, *, model: nn.Module | None = None, with_grad: bool = False, stats: bool = False
    ) -> Scored:
        """Log-probabilities (n, T) of some rows, in one microbatch; by `model` instead of the policy if one is given."""
        return score_completions(
            self.model if model is None else model, rows, self.temperature, share_prompt=self._shares,
            with_grad=with_grad, stats=stats, compute=self.compute, recompute=self.gradient_checkpointing,
            one_pass=self.sharded,
        )  # fmt: skip

    @torch.no_grad()
    def statistics(self, rollouts: Rollouts) -> TokenStats:
        """TokenStats (N, T) of the present policy over all rows. Every process must call it."""
        found = self.zeros(rollouts)
        own, batches = self.split(rollouts, torch.arange(len(rollouts)))
        idle = self.idle_passes(batches)
        for rows in batches:
            write_stats(found, rows, self.score(rollouts.rows(rows), stats=True).stats)
        for _ in range(idle):
            self.score(shortest_row(rollouts), stats=True)
        distributed.exchange_rows(own, [getattr(found, stat.name) for stat in fields(TokenStats)])
        return found

    def zeros(self, rollouts: Rollouts) -> TokenStats:
        """TokenStats (N, T) of zeros on the rollouts' device, in the dtype that the model's statistics have."""
        mask = rollouts.completion_mask
        dtype = torch.float64 if next(self.model.parameters()).dtype == torch.float64 else torch.float32
        return TokenStats(
            **{stat.name: torch.zeros(mask.shape, dtype=dtype, device=mask.device) for stat in fields(TokenStats)}
        )

    def split(self, rollouts: Rollouts, rows: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The part of `rows` (n,) that this process computes, and its microbatches.

        Processes get whole groups of about the same work.
        """
        part = rollouts.rows(rows)
        labels, member = part.group.cpu().unique(return_inverse=True)
        work = torch.zeros(len(labels), dtype=torch.long).scatter_add(
            0, member, (part.lengths + part.prompt_lengths).cpu()
        )
        own = torch.isin(member, torch.tensor(distributed.balance(work.tolist()), dtype=torch.long)).nonzero()[:, 0]
        if not len(own):
            return rows[own], []
        part, rows = part.rows(own), rows[own]
        group = part.group if self._shares else None
        batches = microbatches(part.lengths, self.microbatch_tokens, prompt_lengths=part.prompt_lengths, group=group)
        return rows, [rows[batch] for batch in batches]

    def idle_passes(self, batches: list[Tensor]) -> int:
        """How many passes this process adds because others have more microbatches of a sharded model.

        Call it before the first pass: in between, its message would mix with those of the layers.
        """
        return max(distributed.gather(len(batches))) - len(batches) if self.sharded else 0


def shortest_row(rollouts: Rollouts) -> Rollouts:
    """The row with the fewest tokens, as rollouts of one row."""
    return rollouts.rows((rollouts.lengths + rollouts.prompt_lengths).argmin()[None].cpu())


def write_stats(target: TokenStats, rows: Tensor, values: TokenStats | None) -> None:
    """Put `values` (n, T) into the rows `rows` of `target` (N, T)."""
    assert values is not None
    for name in (stat.name for stat in fields(TokenStats)):
        getattr(target, name)[rows] = getattr(values, name).to(getattr(target, name).dtype)
