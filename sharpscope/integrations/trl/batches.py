"""Batches of TRL's completions as RolloutBatch and StepTokens, and several of them joined into one step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from sharpscope.objective import Plan
from sharpscope.policy import Completions, Rollouts
from sharpscope.policy.rollouts import join_rollouts
from sharpscope.policy.token_stats import TokenStats
from sharpscope.recording import RolloutBatch, StepTokens, UpdateTokens
from sharpscope.tasks import Example, Reward


@dataclass
class RewardScores:
    """What TRL's reward functions gave for one batch of completions, in the order before its shuffle."""

    rewards: Tensor  # (N, functions), NaN where a function gave none
    completion_ids: list[list[int]]


@dataclass
class Batch:
    """One batch of completions, N rows in their order before TRL's shuffle, T completion positions."""

    serial: int
    rollout_batch: RolloutBatch
    tokens: StepTokens
    plan: Plan | None
    sampled: bool  # whether the sampler's log-probabilities are known


def rollouts_of(
    output: dict[str, Any],
    scored: RewardScores,
    reward: Tensor,
    group_size: int,
    tokenizer: Any,
    eos_ids: Collection[int],
) -> Rollouts:
    """TRL's batch as Rollouts of N rows.

    `behavior_logp` is NaN where TRL does not know the sampler's log-probabilities.
    """
    mask = output["completion_mask"]
    # Not from the mask: it is 0 throughout a completion that TRL excludes from the loss (mask_truncated_completions).
    lengths = torch.tensor([len(ids) for ids in scored.completion_ids], device=mask.device)
    present = torch.arange(mask.shape[1], device=mask.device) < lengths[:, None]
    if output.get("tool_mask") is not None:
        loss_mask = mask * output["tool_mask"]
    else:
        loss_mask = mask
    sampler = output.get("sampling_per_token_logps")
    ends = [bool(ids) and ids[-1] in eos_ids for ids in scored.completion_ids]
    contents = [ids[:-1] if end else ids for ids, end in zip(scored.completion_ids, ends, strict=True)]
    completions = Completions(
        input_ids=torch.cat([output["prompt_ids"], output["completion_ids"]], 1),
        attention_mask=torch.cat([output["prompt_mask"], present], 1).long(),
        completion_ids=output["completion_ids"],
        completion_mask=loss_mask.long(),
        behavior_logp=torch.full(mask.shape, torch.nan, device=mask.device) if sampler is None else sampler.float(),
        sampler_logp=None,
        group=torch.arange(len(mask), device=mask.device) // group_size,
        truncated=~torch.tensor(ends, device=mask.device),
        texts=tokenizer.batch_decode(contents, skip_special_tokens=False, clean_up_tokenization_spaces=False),
    )
    return completions.with_reward(reward)


def generated_lengths(rollouts: Rollouts) -> Tensor:
    """(N,) tokens that the policy generated, also of completions that TRL excludes from the loss.

    Of the latter TRL does not keep which tokens came from a tool, so these are counted as well.
    """
    counted = rollouts.completion_mask.sum(1)
    return torch.where(counted > 0, counted, rollouts.lengths)


def rewards_of(
    scored: RewardScores, names: Sequence[str], total: Tensor, correct: Callable[[float], bool]
) -> list[Reward]:
    """One Reward a completion: its parts by reward function, and TRL's weighted total."""
    parts = [dict(zip(names, row, strict=True)) for row in scored.rewards.tolist()]
    return [Reward(value, part, bool(correct(value))) for value, part in zip(total.tolist(), parts, strict=True)]


def examples_of(rollouts: Rollouts, group_size: int, tokenizer: Any) -> list[Example]:
    """One Example a group, holding the prompt's text as the model saw it."""
    first = slice(None, None, group_size)
    ids, seen = rollouts.input_ids[first, : rollouts.prompt_width], rollouts.attention_mask[first]
    prompts = [row[keep.bool()].tolist() for row, keep in zip(ids, seen[:, : rollouts.prompt_width], strict=True)]
    return [Example(text, "", {}) for text in tokenizer.batch_decode(prompts, clean_up_tokenization_spaces=False)]


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
