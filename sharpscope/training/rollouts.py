"""The rollouts of a step: prompts in order, their completions, rewards and group advantages."""

from __future__ import annotations

from dataclasses import replace

import torch

from sharpscope.config.method import Sampling
from sharpscope.objective import Method, group_advantages, informative_groups, overlong_penalty
from sharpscope.policy import Policy, Rollouts, RolloutSpec
from sharpscope.policy.drawing import draw_scored
from sharpscope.policy.rollouts import join_rollouts
from sharpscope.recording import RolloutBatch
from sharpscope.seeds import derive
from sharpscope.tasks import Example, Reward, Task
from sharpscope.training.data_order import DataOrder


def draw_rollouts(
    policy: Policy, task: Task, order: DataOrder, method: Method, spec: RolloutSpec, seed: int, step: int
) -> RolloutBatch:
    """The rollouts of one step; with dynamic sampling (DAPO), further prompts replace groups without reward variance.

    The variance is that of the task's rewards, without the penalty on overlong completions: otherwise a group of wrong
    answers of different lengths would count as informative and teach lengths only.
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
    # A group with a reward that is not finite gets equal rewards, so that its advantages are 0. A health rule reports it.
    finite = torch.isfinite(rollouts.reward).reshape(len(examples), -1).all(dim=1)[rollouts.group]
    reward = torch.where(finite, rollouts.reward, 0.0)
    advantage = group_advantages(reward.double(), rollouts.group, method.advantage)
    return RolloutBatch(examples, rollouts, rewards, advantage, redrawn)


def _draw(
    policy: Policy, task: Task, examples: list[Example], spec: RolloutSpec, seed: int
) -> tuple[Rollouts, list[Reward]]:
    completions, rewards = draw_scored(policy, task, examples, spec.group_size, spec, seed)
    total = torch.tensor([reward.total for reward in rewards], dtype=torch.float32)
    return completions.with_reward(total), rewards


def _penalized(
    rollouts: Rollouts, rewards: list[Reward], sampling: Sampling, limit: int
) -> tuple[Rollouts, list[Reward]]:
    """Rollouts and rewards with DAPO's penalty on overlong completions, which is also the reward's part `overlong`."""
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
