"""Generate completions in one or several processes, and score them."""

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
    """Generate `group_size` completions per example; N = examples × group_size rows.

    An interactive task replies within completions. With several processes, each generates a part, and all return the same
    rows as a single process.

    Args:
        policy: The policy.
        task: The task; only interactive tasks are used.
        examples: Examples returned by `with_openings`.
        group_size: Completions per example, G.
        spec: Sampling parameters.
        seed: Seed of sampling.
        first: Index of the first example if `examples` is a part of a longer list; the samples are those of the list.
    """
    part = distributed.local_slice(len(examples))
    if not isinstance(spec.backend, LocalBackend):  # process 0 sends all requests to the server
        part = slice(0, len(examples) if distributed.is_rank_zero() else 0)
    own_examples, own = examples[part], None
    with unsharded(policy.model):
        if own_examples:
            prompts = render_prompts(own_examples, policy)
            environment = Environment(task, own_examples) if isinstance(task, InteractiveTask) else None
            generator = torch.Generator().manual_seed(seed)
            own = generate(policy, prompts, group_size, spec, generator, environment, first + part.start)
    if distributed.world_size() == 1 and own is not None:
        return own
    if own is not None:
        own = replace(own, group=own.group + part.start).to(torch.device("cpu"))
    parts = [completions for completions in distributed.gather(own) if completions is not None]
    return join_rollouts(*parts).to(policy.device)


def score_texts(task: Task, examples: Sequence[Example], texts: Sequence[str]) -> list[Reward]:
    """Score completions, an equal number per example, adjacent; each process scores a part."""
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
    """Generate completions with `draw_completions` and score them."""
    opened = with_openings(examples, policy)
    completions = draw_completions(policy, task, opened, group_size, spec, seed, first)
    return completions, score_texts(task, opened, completions.texts)
