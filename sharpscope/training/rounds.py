"""A round of rollouts: prompts drawn in order, completions sampled, scored and turned into group advantages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from sharpscope import distributed
from sharpscope.config.method import Sampling
from sharpscope.config.policy import LocalBackend
from sharpscope.objective import Method, group_advantages, informative_groups, overlong_penalty
from sharpscope.policy import (
    Completions,
    Environment,
    Policy,
    Rollouts,
    RolloutSpec,
    SamplingSpec,
    generate,
    render_prompts,
    with_openings,
)
from sharpscope.seeds import derive
from sharpscope.tasks import Example, InteractiveTask, Reward, Task
from sharpscope.training.data_order import DataOrder
from sharpscope.training.sharding import whole_weights

C = TypeVar("C", bound=Completions)


@dataclass(frozen=True)
class Round:
    """The rollouts of one step; `examples` has one entry a group, everything else one a completion."""

    examples: list[Example]
    rollouts: Rollouts
    rewards: list[Reward]
    advantage: Tensor  # (N,), float64
    redrawn_groups: int

    @property
    def zero_variance_share(self) -> float:
        """Share of groups in which all rewards are equal."""
        return 1 - float(informative_groups(self.rollouts.reward, self.rollouts.group).double().mean())


def draw_completions(
    policy: Policy,
    task: Task,
    examples: Sequence[Example],
    group_size: int,
    spec: SamplingSpec,
    seed: int,
    first: int = 0,
) -> Completions:
    """`group_size` completions of each example's prompt; N = examples × group_size rows, seeded.

    Where `examples` is a part of a longer list, `first` is the index of its first there: the draws are those of the list.

    Where the task is interactive it answers in the middle of them, for all rows together. Several processes draw a part of the
    prompts each; all get all, the same as one process would draw.

    Args:
        examples: as `with_openings` returns them.
    """
    part = distributed.local_slice(len(examples))
    if not isinstance(spec.backend, LocalBackend):  # one server for all: the first process asks it for everything
        part = slice(0, len(examples) if distributed.is_rank_zero() else 0)
    mine, own = examples[part], None
    with whole_weights(policy.model):
        if mine:
            prompts = render_prompts(mine, policy)
            environment = Environment(task, mine) if isinstance(task, InteractiveTask) else None
            seeded = torch.Generator().manual_seed(seed)
            own = generate(policy, prompts, group_size, spec, seeded, environment, first + part.start)
    if distributed.world_size() == 1 and own is not None:
        return own
    if own is not None:
        own = moved(replace(own, group=own.group + part.start), torch.device("cpu"))
    drawn = [completions for completions in distributed.gather(own) if completions is not None]
    return moved(join_rollouts(*drawn), policy.device)


def score_texts(task: Task, examples: Sequence[Example], texts: Sequence[str]) -> list[Reward]:
    """Rewards of completions, as many for each example, those of an example adjacent; each process scores a part."""
    size, part = len(texts) // len(examples), distributed.local_slice(len(texts))
    own = [task.score(examples[row // size], texts[row]) for row in range(len(texts))[part]]
    return [reward for rewards in distributed.gather(own) for reward in rewards]


def draw_round(
    policy: Policy, task: Task, order: DataOrder, method: Method, spec: RolloutSpec, seed: int, step: int
) -> Round:
    """One round; with dynamic sampling (DAPO), groups without reward variance are drawn anew with further prompts.

    That variance is the task's own: wrong answers of different lengths teach nothing but lengths, so the penalty on overlong
    completions comes after.
    """
    examples = order.take(spec.prompts_per_step)
    rollouts, rewards = _draw(policy, task, examples, spec, derive(seed, "rollouts", step))
    redrawn = 0
    sampling = method.sampling
    if sampling.dynamic:
        for attempt in range(1, sampling.max_redraws + 1):
            informative = informative_groups(rollouts.reward, rollouts.group).reshape(len(examples), -1)[:, 0]
            flat = torch.nonzero(~informative).flatten().tolist()
            if not flat:
                break
            redrawn += len(flat)
            fresh = order.take(len(flat))
            new, new_rewards = _draw(policy, task, fresh, spec, derive(seed, "rollouts", step, attempt))
            rollouts, rewards, examples = _replace_groups(rollouts, rewards, examples, flat, new, new_rewards, fresh)
    if sampling.overlong is not None:
        rollouts, rewards = _penalized(rollouts, rewards, sampling, spec.max_new_tokens)
    # A group with a reward that is not finite teaches nothing: with equal rewards its advantages are 0. A health rule speaks.
    finite = torch.isfinite(rollouts.reward).reshape(len(examples), -1).all(dim=1)[rollouts.group]
    reward = torch.where(finite, rollouts.reward, 0.0)
    advantage = group_advantages(reward.double(), rollouts.group, method.advantage)
    return Round(examples, rollouts, rewards, advantage, redrawn)


def draw_scored(
    policy: Policy,
    task: Task,
    examples: Sequence[Example],
    group_size: int,
    spec: SamplingSpec,
    seed: int,
    first: int = 0,
) -> tuple[Completions, list[Reward]]:
    """Completions of `draw_completions` and their rewards."""
    opened = with_openings(examples, policy)
    completions = draw_completions(policy, task, opened, group_size, spec, seed, first)
    return completions, score_texts(task, opened, completions.texts)


def _draw(
    policy: Policy, task: Task, examples: list[Example], spec: RolloutSpec, seed: int
) -> tuple[Rollouts, list[Reward]]:
    completions, rewards = draw_scored(policy, task, examples, spec.group_size, spec, seed)
    total = torch.tensor([reward.total for reward in rewards], dtype=torch.float32)
    return completions.with_reward(total), rewards


def _penalized(
    rollouts: Rollouts, rewards: list[Reward], sampling: Sampling, limit: int
) -> tuple[Rollouts, list[Reward]]:
    """The same with DAPO's penalty on overlong completions in the reward, and as its part `overlong`."""
    penalty = overlong_penalty(sampling, rollouts.lengths.cpu(), limit)
    own = [
        replace(reward, total=reward.total + part, parts={**reward.parts, "overlong": part})
        for reward, part in zip(rewards, (penalty + 0.0).tolist(), strict=True)  # + 0.0: no part is −0
    ]
    return rollouts.with_reward(rollouts.reward.cpu() + penalty), own


def _replace_groups(
    old: Rollouts, old_rewards: list[Reward], old_examples: list[Example], flat: list[int],
    new: Rollouts, new_rewards: list[Reward], new_examples: list[Example],
) -> tuple[Rollouts, list[Reward], list[Example]]:  # fmt: skip
    """`old` with the groups `flat` replaced by the groups of `new`, in order."""
    groups, size = len(old_examples), len(old_rewards) // len(old_examples)
    source = list(range(groups))
    for position, group in enumerate(flat):
        source[group] = groups + position
    rows = torch.tensor([group * size + member for group in source for member in range(size)])
    picked = join_rollouts(old, new).rows(rows)
    labels = torch.arange(groups, device=picked.group.device).repeat_interleave(size)
    rewards = old_rewards + new_rewards
    examples = old_examples + new_examples
    return replace(picked, group=labels), [rewards[row] for row in rows.tolist()], [examples[g] for g in source]


def moved(rows: C, device: torch.device) -> C:
    """The same rows with their tensors on `device`."""
    values = {field.name: getattr(rows, field.name) for field in fields(rows)}
    tensors: dict[str, Any] = {name: v.to(device) for name, v in values.items() if isinstance(v, Tensor)}
    return replace(rows, **tensors)


def join_rollouts(*parts: C) -> C:
    """The rows of all, one below the other: prompts padded on the left and completions on the right to the widest."""
    prompt = max(part.prompt_width for part in parts)
    width = max(part.completion_ids.shape[1] for part in parts)

    def padded(part: C, name: str) -> Tensor:
        value: Tensor = getattr(part, name)
        if value.ndim != 2:
            return value
        left = prompt - part.prompt_width if name in ("input_ids", "attention_mask") else 0
        return torch.nn.functional.pad(value, (left, width - part.completion_ids.shape[1]), value=0)

    joined: dict[str, Any] = {"texts": [text for part in parts for text in part.texts]}
    for name in (field.name for field in fields(parts[0]) if field.name != "texts"):
        known = all(getattr(part, name) is not None for part in parts)
        joined[name] = torch.cat([padded(part, name) for part in parts]) if known else None
    return replace(parts[0], **joined)
