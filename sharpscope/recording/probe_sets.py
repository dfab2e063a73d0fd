"""The probe set of a run: fixed prompts, shared by all methods and seeds of a study, and completions of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from sharpscope import distributed
from sharpscope.errors import UserError
from sharpscope.policy import Policy, draw_scored, load_policy, render_prompts
from sharpscope.probes import Drawn, ProbeSet, Radius, build_probe_set, choose_radius, probe_set_batches
from sharpscope.tasks import Example, Task, make_task

if TYPE_CHECKING:
    from sharpscope.config import RunConfig

PROBE_SET_FILE = "probe_set.parquet"


class Drawer:
    """Draws seeded completions of a policy for probes, and has the task score them.

    Probes assume draws from softmax(z/T) of this policy, so these are without top-p and top-k, at the run's temperature.
    """

    def __init__(self, config: RunConfig, policy: Policy, task: Task) -> None:
        self.policy, self.task = policy, task
        self.sampling = config.rollout.model_copy(update={"top_p": 1.0})

    def __call__(self, examples: Sequence[Example], samples: int, seed: int) -> Drawn:
        """`samples` completions per example, rows of an example adjacent, with their success (0 or 1)."""
        drawn, rewards = draw_scored(self.policy, self.task, examples, samples, self.sampling, seed)
        correct = torch.tensor([r.correct for r in rewards], dtype=torch.float32, device=self.policy.device)
        return Drawn(drawn.with_reward(correct), correct)


def needs_probe_set(config: RunConfig) -> bool:
    """Whether any schedule of the run uses the probe set."""
    probes = config.probes
    surface = probes.every != 0 and bool(probes.functionals)
    entropy = bool(config.recording.probe_entropy_every)
    return 0 < config.recording.heldout_influence_every <= config.steps or entropy or surface


def check_probe_set(config: RunConfig, task: Task) -> None:
    """Refuse a held-out measurement on a task without held-out examples, before the run's folder is created."""
    if config.recording.heldout_influence_every and not (
        task.splits().get("heldout") and config.probes.heldout_prompts
    ):
        raise UserError(
            "recording.heldout_influence_every: needs a task with a split 'heldout' and probes.heldout_prompts above 0; set it to 0"
        )


def run_probe_set(config: RunConfig, task: Task) -> ProbeSet:
    """The run's probe set: from the run's folder, or built and saved.

    It depends on the task, the initial policy and `probes.probe_set_seed` only, never on the method or the run's seed.
    """
    path = Path(config.run_dir) / PROBE_SET_FILE
    if distributed.broadcast(path.exists()):
        return ProbeSet.load(path)
    probe_set = _built(config, load_policy(config.policy), task)
    distributed.rank_zero_call(lambda: probe_set.save(path) and None)
    return probe_set


def _built(config: RunConfig, initial: Policy, task: Task) -> ProbeSet:
    """The probe set that a configuration asks for, with the initial policy's solutions."""
    return build_probe_set(
        task,
        Drawer(config, initial, task),
        lambda examples: render_prompts(examples, initial),
        policy=config.policy.model,
        seed=config.probes.probe_set_seed,
        train=config.probes.prompts,
        heldout=config.probes.heldout_prompts,
        task_name=task_key(config),
    )


def initial_radius(config: RunConfig) -> Radius:
    """A radius for all runs of a study: that of `choose_radius` for the initial policy on the study's probe set."""
    task, policy = make_task(config.task), load_policy(config.policy)
    draw, temperature = Drawer(config, policy, task), config.rollout.temperature
    batches = probe_set_batches(_built(config, policy, task), config.probes, draw, temperature=temperature)
    return choose_radius(policy.model, next(batches), config.probes)


def task_key(config: RunConfig) -> str:
    """The task's kind with a hash of its settings, so that probe sets of different data never share a name."""
    settings = json.dumps(config.task.model_dump(mode="json"), sort_keys=True)
    return f"{config.task.kind}-{hashlib.sha256(settings.encode()).hexdigest()[:8]}"
