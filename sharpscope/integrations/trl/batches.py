"""TRL's batches of completions as Rollouts with rewards."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sharpscope.policy import Completions, Rollouts
from sharpscope.tasks import Example, Reward


@dataclass
class RewardScores:
    """What TRL's reward functions gave for one batch of completions, in the order before its shuffle."""

    rewards: Tensor  # (N, functions) of all processes, NaN where a function gave none
    completion_ids: list[list[int]]  # of this process


def rollouts_of(
    output: dict[str, Any],
    scored: RewardScores,
    reward: Tensor,
    tokenizer: Any,
    eos_ids: Collection[int],
) -> Rollouts:
    """This process's part of TRL's batch as Rollouts of n rows, each a group of its own; `reward` is (n,).

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
        group=torch.arange(len(mask), device=mask.device),
        truncated=~torch.tensor(ends, device=mask.device),
        texts=tokenizer.batch_decode(contents, skip_special_tokens=False, clean_up_tokenization_spaces=False),
    )
    return completions.with_reward(reward)


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
