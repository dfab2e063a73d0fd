"""Completions of prompts, drawn by one or several processes, and their rewards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from sharpscope import distributed
from sharpscope.config.policy import LocalBackend, SamplingSpec
from sharpscope.policy.conversation import Environment
from sharpscope.policy.generation import generate
from sharpscope.policy.loading import Policy
from sharpscope.policy.prompts import render_prompts, with_openings
from sharpscope.policy.rollouts import Completions, join_rollouts
from sharpscope.policy.sharding import unsharded
from sharpscope.tasks import Example, InteractiveTask, Reward, Task


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

    An interactive task answers within the completions, for all rows together. Each process draws for a part of the prompts,
    and all get all completions, the same as one process would draw.

    Args:
        policy: draws them.
        task: answers within them if it is interactive.
        examples: as `with_openings` returns them.
        group_size: completions of each prompt.
        spec: temperature, top-p, top-k, length and backend.
        seed: of the draws.
        first: index of the first example in the list that `examples` is a part of, so that the draws are those of the list.
    """
    part = distributed.local_slice(len(examples))
    if not isinstance(spec.backend, LocalBackend):  # the first process requests all of them
        part = slice(0, len(examples) if distributed.is_rank_zero() else 0)
    mine, own = examples[part], None
    with unsharded(policy.model):
        if mine:
            prompts = render_prompts(mine, policy)
            environment = Environment(task, mine) if isinstance(task, InteractiveTask) else None
            seeded = torch.Generator().manual_seed(seed)
            own = generate(policy, prompts, group_size, spec, seeded, environment, first + part.start)
    if distributed.world_size() == 1 and own is not None:
        return own
    if own is not None:
        own = replace(own, group=own.group + part.start).to(torch.device("cpu"))
    drawn = [completions for completions in distributed.gather(own) if completions is not None]
    return join_rollouts(*drawn).to(policy.device)


def score_texts(task: Task, examples: Sequence[Example], texts: Sequence[str]) -> list[Reward]:
    """Rewards of completions, equally many for each example and adjacent; each process scores a part."""
    size, part = len(texts) // len(examples), distributed.local_slice(len(texts))
    own = [task.score(examples[row // size], texts[row]) for row in range(len(texts))[part]]
    return [reward for rewards in distributed.gather(own) for reward in rewards]


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
