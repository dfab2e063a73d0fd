"""Batches of a trainer as RolloutBatch and StepTokens, and several of them joined into one step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from sharpscope.policy import Rollouts, TokenStats, join_rollouts
from sharpscope.recording import RolloutBatch, StepTokens, UpdateTokens


@dataclass
class Batch:
    """One batch of completions: N rows, in GRPO in their order before TRL's shuffle; T completion positions."""

    serial: int
    rollout_batch: RolloutBatch
    tokens: StepTokens
    sampled: bool  # whether the sampler's log-probabilities are known

    @property
    def device(self) -> torch.device:
        """Device of the completions and their statistics."""
        return self.rollout_batch.rollouts.completion_mask.device


def generated_lengths(rollouts: Rollouts) -> Tensor:
    """(N,) tokens that the policy generated, also of completions that the trainer excludes from the loss.

    Of the latter it is not known which tokens came from a tool, so these are counted as well.
    """
    counted = rollouts.completion_mask.sum(1)
    return torch.where(counted > 0, counted, rollouts.lengths)


def unused_tokens(stats: TokenStats, advantage: Tensor, weight: Tensor | None) -> StepTokens:
    """StepTokens (N, T) that no update has used yet, with weights and advantages."""
    shape, dtype = stats.logp.shape, stats.logp.dtype
    return replace(
        StepTokens.unused(stats),
        weight=torch.ones(shape, dtype=dtype) if weight is None else weight.to("cpu", dtype),
        advantage=advantage.to("cpu", dtype)[:, None].expand(shape).clone(),
    )


def same_prompts(rollouts: Rollouts, group_size: int) -> bool:
    """Whether the rows of every group have one prompt, so that it can be run once for all of them."""
    ids = rollouts.input_ids[:, : rollouts.prompt_width] * rollouts.attention_mask[:, : rollouts.prompt_width]
    grouped = ids.view(-1, group_size, ids.shape[1])
    return bool((grouped == grouped[:, :1]).all())


def join(batches: Sequence[Batch]) -> tuple[RolloutBatch, StepTokens, dict[int, int]]:
    """Several batches as one, their tokens as one StepTokens, and each batch's first row by its serial number."""
    joined, tokens = batches[0].rollout_batch, batches[0].tokens
    first = {batches[0].serial: 0}
    for batch in batches[1:]:
        first[batch.serial] = len(joined.rewards)
        joined, tokens = _joined(joined, batch.rollout_batch), _joined_tokens(tokens, batch.tokens)
    return joined, tokens, first


def _joined(one: RolloutBatch, two: RolloutBatch) -> RolloutBatch:
    rollouts = join_rollouts(one.rollouts, two.rollouts)
    groups = torch.cat([one.rollouts.group, two.rollouts.group + len(one.examples)])
    return RolloutBatch(
        [*one.examples, *two.examples],
        Rollouts(**{**vars(rollouts), "group": groups}),
        [*one.rewards, *two.rewards],
        torch.cat([one.advantage, two.advantage]),
        None,
    )


def _joined_tokens(one: StepTokens, two: StepTokens) -> StepTokens:
    width = max(one.update.shape[1], two.update.shape[1])

    def cat(first: Tensor, second: Tensor, fill: int = 0) -> Tensor:
        return torch.cat([widened(first, width, fill), widened(second, width, fill)])

    stats = {f.name: cat(getattr(one.stats, f.name), getattr(two.stats, f.name)) for f in fields(TokenStats)}
    rest = {f.name: cat(getattr(one, f.name), getattr(two, f.name)) for f in fields(StepTokens) if f.name != "stats"}
    rest["update"] = cat(one.update, two.update, -1)
    return StepTokens(stats=TokenStats(**stats), **rest)


def joined_updates(parts: Sequence[UpdateTokens]) -> UpdateTokens:
    """The tokens of an update's micro-batches as one."""
    width = max(part.used.shape[1] for part in parts)
    columns = zip(*(part.tensors() for part in parts), strict=True)
    return UpdateTokens(*(torch.cat([widened(value, width) for value in column]) for column in columns))


def widened(values: Tensor, width: int, fill: int = 0) -> Tensor:
    """`values` (n, T) padded on the right with `fill` to `width` columns."""
    return torch.nn.functional.pad(values, (0, width - values.shape[1]), value=fill)
