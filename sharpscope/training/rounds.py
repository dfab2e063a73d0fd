"""A round of rollouts: prompts drawn in order, completions sampled, scored and turned into group advantages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

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
)
from sharpscope.tasks import Example, InteractiveTask, Reward, Task
from sharpscope.training.data_order import DataOrder
from sharpscope.training.seeds import derive


@dataclass(frozen=True)
class Round:
    """The rollouts of one step; `examples` has one entry a group, everything else one a completion."""

    examples: list[Example]
    rollouts: Rollouts
    rewards: list[Reward]
    advantage: Tensor  # (N,)
    redrawn_groups: int

    @property
    def zero_variance_share(self) -> float:
        """Share of groups in which all rewards are equal."""
        return 1 - float(informative_groups(self.rollouts.reward, self.rollouts.group).double().mean())


def draw_completions(
    policy: Policy, task: Task, examples: Sequence[Example], group_size: int, spec: SamplingSpec, seed: int
) -> Completions:
    """`group_size` completions of each example's prompt; N = examples × group_size rows, seeded.

    Where the task is interactive it answers in the middle of them, for all rows together.
    """
    prompts = render_prompts(examples, policy)
    environment = Environment(task, examples) if isinstance(task, InteractiveTask) else None
    return generate(policy, prompts, group_size, spec, torch.Generator().manual_seed(seed), environment)


def draw_round(
    policy: Policy, task: Task, order: DataOrder, method: Method, spec: RolloutSpec, seed: int, step: int
) -> Round:
    """One round; with dynamic sampling (DAPO), groups without reward variance are drawn anew with further prompts."""
    examples = order.take(spec.prompts_per_step)
    rollouts, rewards = _draw(policy, task, examples, method, spec, derive(seed, "rollouts", step))
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
            new, new_rewards = _draw(policy, task, fresh, method, spec, derive(seed, "rollouts", step, attempt))
            rollouts, rewards, examples = _replace_groups(rollouts, rewards, examples, flat, new, new_rewards, fresh)
    # A group with a reward that is not finite teaches nothing: with equal rewards its advantages are 0. A health rule speaks.
    finite = torch.isfinite(rollouts.reward).reshape(len(examples), -1).all(dim=1)[rollouts.group]
    reward = torch.where(finite, rollouts.reward, 0.0)
    return Round(examples, rollouts, rewards, group_advantages(reward, rollouts.group, method.advantage), redrawn)


def _draw(
    policy: Policy, task: Task, examples: list[Example], method: Method, spec: RolloutSpec, seed: int
) -> tuple[Rollouts, list[Reward]]:
    completions = draw_completions(policy, task, examples, spec.group_size, spec, seed)
    rewards = [task.score(examples[row // spec.group_size], text) for row, text in enumerate(completions.texts)]
    total = torch.tensor([reward.total for reward in rewards], dtype=torch.float32)
    if method.sampling.overlong is not None:
        total = total + overlong_penalty(method.sampling, completions.lengths.cpu(), spec.max_new_tokens)
    return completions.with_reward(total), rewards


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


def join_rollouts(first: Rollouts, second: Rollouts) -> Rollouts:
    """The rows of both, one below the other: prompts padded on the left and completions on the right to the wider one."""
    prompt = max(first.prompt_width, second.prompt_width)
    width = max(first.completion_ids.shape[1], second.completion_ids.shape[1])

    def pad(rollouts: Rollouts, values: Tensor, left: int, fill: int | float) -> Tensor:
        right = width - rollouts.completion_ids.shape[1]
        return torch.nn.functional.pad(values, (left, right), value=fill)

    joined: dict[str, Any] = {}
    for field in fields(Rollouts):
        parts = []
        for rollouts in (first, second):
            value = getattr(rollouts, field.name)
            if isinstance(value, Tensor) and value.ndim == 2:
                left = prompt - rollouts.prompt_width if field.name in ("input_ids", "attention_mask") else 0
                value = pad(rollouts, value, left, 0)
            parts.append(value)
        if field.name == "texts":
            joined["texts"] = [*parts[0], *parts[1]]
        else:
            joined[field.name] = None if parts[0] is None or parts[1] is None else torch.cat(parts)
    return Rollouts(**joined)
