"""The rollouts of a step: prompts in order, their completions, rewards and group advantages."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from sharpscope.errors import UserError
from sharpscope.methods import Method
from sharpscope.methods.advantages import estimate_advantages, overlong_penalty
from sharpscope.methods.method import DecoupledAdvantage
from sharpscope.policy import Policy, Rollouts, RolloutSpec, TokenStats, draw_scored, join_rollouts
from sharpscope.recording.step import RolloutBatch
from sharpscope.rules.judging import Event
from sharpscope.seeds import derive, generator
from sharpscope.tasks import Example, Reward, Task
from sharpscope.tasks.math import STEP_LIMIT, TIME_LIMIT, limited_step

MAX_REDRAWS = 10
"""Rounds of dynamic sampling per step."""
Draw = Callable[[Policy, Task, list[Example], RolloutSpec, int], tuple[Rollouts, list[Reward]]]
"""(policy, task, examples, spec, seed) -> completions and their rewards."""


@dataclass
class DataOrder:
    """Takes examples in order, a new seeded permutation every epoch; `cursor`, the number taken so far, is its only state."""

    examples: Sequence[Example]
    seed: int
    cursor: int = 0
    _permutations: dict[int, list[int]] = field(
        init=False,
        default_factory=dict,
        repr=False,
        compare=False,
    )

    def take(self, count: int) -> list[Example]:
        """The next `count` examples; every example is seen once before any is seen twice."""
        taken = []
        for position in range(self.cursor, self.cursor + count):
            epoch, index = divmod(position, len(self.examples))
            if epoch not in self._permutations:
                draws = generator(self.seed, "data_order", epoch)
                order = torch.randperm(len(self.examples), generator=draws)
                self._permutations = {epoch: order.tolist()}
            taken.append(self.examples[self._permutations[epoch][index]])
        self.cursor += count
        return taken


@limited_step()
def draw_rollouts(
    policy: Policy,
    task: Task,
    order: DataOrder,
    method: Method,
    spec: RolloutSpec,
    seed: int,
    step: int,
    statistics: Callable[[Rollouts], TokenStats] | None = None,
    draw: Draw | None = None,
) -> RolloutBatch:
    """The rollouts of one step, drawn by `draw`.

    With dynamic sampling (DAPO), further prompts replace groups whose answers are all correct or all wrong, whatever their
    rewards: a group of wrong answers of different lengths would teach lengths only. `statistics` gives π_old's token
    statistics, for methods whose advantages or choice of prompts need them.
    """
    draw = draw or draw_group
    sampling = method.sampling
    examples = order.take(spec.prompts_per_step * (sampling.pool or 1))
    rollouts, rewards = draw(policy, task, examples, spec, derive(seed, "rollouts", step))
    size = len(rewards) // len(examples)
    chosen = list(range(len(examples)))  # groups that are kept, of all that were drawn
    redrawn = 0
    if sampling.pool is not None:
        ranks = prompt_ranks(sampling.rank, rollouts, rewards, statistics).nan_to_num(-1.0)
        best = ranks.argsort(descending=True, stable=True)[: spec.prompts_per_step]
        chosen = best.sort().values.tolist()
    for attempt in range(1, MAX_REDRAWS + 1) if sampling.dynamic else ():
        flat = []  # places in `chosen` to be filled again
        for place, group in enumerate(chosen):
            if _undecided(rewards[group * size : (group + 1) * size]):
                flat.append(place)
        if not flat:
            break
        redrawn += len(flat)
        fresh = order.take(len(flat))
        new, new_rewards = draw(policy, task, fresh, spec, derive(seed, "rollouts", step, attempt))
        for group, place in enumerate(flat, len(examples)):
            chosen[place] = group
        rollouts = join_rollouts(rollouts, new)
        rewards = rewards + new_rewards
        examples = examples + fresh
    if len(chosen) < len(examples):
        places = torch.tensor(chosen)[:, None] * size + torch.arange(size)  # (groups, size)
        rows = places.flatten()
        labels = torch.arange(len(chosen)).repeat_interleave(size)
        rollouts = replace(rollouts.rows(rows), group=labels.to(rollouts.group.device))
        rewards = [rewards[row] for row in rows.tolist()]
        examples = [examples[group] for group in chosen]
    if sampling.overlong is not None:
        penalty = overlong_penalty(sampling.overlong, rollouts.lengths.cpu(), spec.max_new_tokens)
        rollouts = rollouts.with_reward(rollouts.reward.cpu() + penalty)
        parts = (penalty + 0.0).tolist()  # + 0.0: no part is −0
        rewards = [
            replace(reward, total=reward.total + part, parts={**reward.parts, "overlong": part})
            for reward, part in zip(rewards, parts, strict=True)
        ]
    stats = None
    if method.advantage.kind == "token_baseline":
        assert statistics is not None, f"{method.advantage.kind} needs the statistics of the tokens"
        stats = statistics(rollouts)
    advantage = step_advantages(method, rollouts, rewards, stats)
    return RolloutBatch(examples, rollouts, rewards, advantage, redrawn, stats)


def timed_out_events(step: int, rewards: Sequence[Reward]) -> list[Event]:
    """An event if answers of a step took too long to compare."""
    count = sum(reward.parts.get("timed_out", 0.0) > 0 for reward in rewards)
    if not count:
        return []
    limits = f"{TIME_LIMIT:g} s an answer, {STEP_LIMIT:g} s a step"
    text = f"{count} of {len(rewards)} answers took too long to compare ({limits}) and score 0"
    return [Event(step, "timed_out", "warning", count / len(rewards), 0.0, "none", text)]


def step_advantages(
    method: Method,
    rollouts: Rollouts,
    rewards: Sequence[Reward] = (),
    stats: TokenStats | None = None,
) -> Tensor:
    """Advantages of a step's completions, (N,) or (N, T), float64; plain GRPO's need no `rewards` beside the rollouts'.

    Groups with a reward that is not finite have advantage 0 and are left out of the statistics of the step; a health rule
    reports them.
    """
    spec = method.advantage
    total = rollouts.reward.double()  # (N,)
    finite = total.isfinite()
    parts: dict[str, Tensor] = {}
    if isinstance(spec, DecoupledAdvantage):
        for name in dict.fromkeys(name for reward in rewards for name in reward.parts):
            part = total.new_tensor([reward.parts.get(name, 0.0) for reward in rewards])
            parts[name] = part
            if spec.weights.get(name, 0.0) != 0:
                finite &= part.isfinite()
    broken = torch.isin(rollouts.group, rollouts.group[~finite])
    rows = torch.nonzero(~broken).flatten()

    def usable(values: Tensor) -> Tensor:
        """The values of the rows whose group is finite."""
        return values.to(rows.device)[rows]

    correct = torch.tensor([reward.correct for reward in rewards]) if rewards else None
    found = estimate_advantages(
        spec,
        usable(total),
        usable(rollouts.group),
        usable(rollouts.completion_mask),
        parts={name: usable(part) for name, part in parts.items()},
        correct=None if correct is None else usable(correct),
        logp=None if stats is None else usable(stats.logp),
        collision=None if stats is None else usable(stats.collision),
    )
    advantage = found.new_zeros(len(rollouts), *found.shape[1:])
    advantage[rows] = found
    return advantage


def split_examples(task: Task, name: str) -> list[Example]:
    """Examples of a split; a UserError if the task has none."""
    examples = task.splits().get(name, [])
    if not examples:
        raise UserError(
            f"task.kind: {task.name} has no split '{name}' to draw prompts from; choose another task"
        )
    return examples


def prompt_ranks(
    rank: str,
    rollouts: Rollouts,
    rewards: Sequence[Reward],
    statistics: Callable[[Rollouts], TokenStats] | None,
) -> Tensor:
    """What `Sampling.rank` says of each prompt, (groups,)."""
    groups = len(rollouts.group.unique())
    if rank == "variance":
        return rollouts.reward.double().view(groups, -1).var(1, correction=0)
    assert statistics is not None, f"{rank} needs the statistics of the tokens"
    entropies = statistics(rollouts).entropy
    highest = []  # of each row the mean entropy of the fifth of its tokens with the largest
    for entropy, mask in zip(entropies, rollouts.completion_mask.bool(), strict=True):
        fifth = math.ceil(0.2 * int(mask.sum()) - 1e-9)
        highest.append(entropy[mask].topk(fifth).values.mean())
    correct = entropies.new_tensor([reward.correct for reward in rewards])
    mean_correct = correct.view(groups, -1).mean(1)
    mean_entropy = torch.stack(highest).view(groups, -1).mean(1)
    return (1 - (2 * mean_correct - 1).abs()) * mean_entropy


def _undecided(rewards: Sequence[Reward]) -> bool:
    """Whether a group's answers are all correct or all wrong, or a reward is not finite."""
    same = len({reward.correct for reward in rewards}) == 1
    return same or not all(math.isfinite(reward.total) for reward in rewards)


def draw_group(
    policy: Policy,
    task: Task,
    examples: list[Example],
    spec: RolloutSpec,
    seed: int,
) -> tuple[Rollouts, list[Reward]]:
    """`spec.group_size` completions per example with their rewards, before any penalty."""
    completions, rewards = draw_scored(policy, task, examples, spec.group_size, spec, seed)
    total = torch.tensor([reward.total for reward in rewards], dtype=torch.float32)
    return completions.with_reward(total), rewards
