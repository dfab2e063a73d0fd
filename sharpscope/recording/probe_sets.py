"""The probe set of a run, fixed prompts shared by all methods and seeds of a study, and the probes of the loss surface on it."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sharpscope import distributed
from sharpscope.errors import CheckError, UserError
from sharpscope.policy import Policy, draw_scored, load_policy, render_prompts
from sharpscope.policy.sharding import ModelView
from sharpscope.recording.health import refusal
from sharpscope.recording.run_folder import note
from sharpscope.rules.judging import Event
from sharpscope.seeds import derive
from sharpscope.surface import (
    Drawn,
    Estimate,
    ProbeSet,
    Radius,
    build_probe_set,
    columns,
    probe_set_batches,
    problems,
    prompt_columns,
    run,
)
from sharpscope.tasks import Example, Task

if TYPE_CHECKING:
    from sharpscope.config import RunConfig
    from sharpscope.recording.observers import MeasurementSchedule


class Drawer:
    """Draws and scores completions for probes: without top-p, since these assume draws from softmax(z/T)."""

    def __init__(self, config: RunConfig, policy: Policy, task: Task) -> None:
        self.policy, self.task = policy, task
        self.sampling = config.rollout.model_copy(update={"top_p": 1.0})

    def __call__(self, examples: Sequence[Example], samples: int, seed: int) -> Drawn:
        """`samples` completions per example, rows of an example adjacent, with their success (0 or 1)."""
        drawn, rewards = draw_scored(self.policy, self.task, examples, samples, self.sampling, seed)
        correct = torch.tensor(
            [r.correct for r in rewards], dtype=torch.float32, device=self.policy.device
        )
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
    """The probe set in the run's folder, or a new one that is saved there; no method and no seed of the run enters it."""
    path = Path(config.run_dir) / "probe_set.parquet"
    if distributed.broadcast(path.exists()):
        return ProbeSet.load(path)
    probe_set = _built(config, load_policy(config.policy), task)
    distributed.rank_zero_call(lambda: probe_set.save(path) and None)
    return probe_set


def _built(config: RunConfig, initial: Policy, task: Task) -> ProbeSet:
    """The probe set of a configuration with the initial policy's solutions, named by the task and its settings."""
    settings = json.dumps(config.task.model_dump(mode="json"), sort_keys=True)
    return build_probe_set(
        task,
        Drawer(config, initial, task),
        lambda examples: render_prompts(examples, initial),
        policy=config.policy.model,
        seed=config.probes.probe_set_seed,
        train=config.probes.prompts,
        heldout=config.probes.heldout_prompts,
        name=f"{config.task.kind}-{hashlib.sha256(settings.encode()).hexdigest()[:8]}",
    )


class SurfaceProbes:
    """Probes the loss surface at scheduled steps."""

    def __init__(
        self,
        config: RunConfig,
        view: Callable[[], ModelView],
        drawer: Drawer | None,
        schedule: MeasurementSchedule,
    ) -> None:
        self.config, self.view, self.drawer = config, view, drawer
        self.spec = config.probes
        self.schedule = schedule
        self.probe_set: ProbeSet | None = None
        # of the perturbations, found at the first probe and kept in run.json
        self.radius: Radius | None = None
        self.refused = False  # whether the probed loss differed from the policy's own

    def start(self, probe_set: ProbeSet, info: dict[str, Any]) -> list[Event]:
        """Take the run's probe set and, in a resumed run, its radius.

        Without solutions there is no `nll`: an event says so, and without another loss the expected failure takes its place.
        """
        self.probe_set = probe_set
        if info.get("probe_radius"):
            self.radius = Radius(**info["probe_radius"])
        bare = [
            split
            for split in probe_set.splits
            if split in self.spec.splits
            and not any(item.solution for item in probe_set.split(split))
        ]
        if not self.schedule.every["surface"] or "nll" not in self.spec.functionals or not bare:
            return []
        left = tuple(name for name in self.spec.functionals if name != "nll") or (
            "expected_failure",
        )
        self.spec = self.spec.model_copy(update={"functionals": left})
        text = (
            f"the initial policy solves no prompt of the probe set's {' and '.join(bare)} prompts, so "
            f"that there is no text whose nll is probed; {' and '.join(left)} is probed"
        )
        return [Event(0, "probe", "info", math.nan, math.nan, "left out", text)]

    def due(self, step: int) -> bool:
        """Whether the surface is probed after `step` (0: before training)."""
        return self.schedule.due("surface", step)

    def update_due(self, step: int) -> bool:
        """Whether the critical sharpness is measured in `step`: at the planned places, else in step 1 and at an interval that is set."""
        if "surface" in self.schedule.at:
            return self.spec.critical_sharpness and self.schedule.due("surface", step)
        regular = (
            self.spec.every is not None and self.spec.every > 0 and step % self.spec.every == 0
        )
        return (
            self.spec.critical_sharpness
            and bool(self.schedule.every["surface"])
            and (step == 1 or regular)
        )

    def rows(self, step: int) -> tuple[dict[str, dict[str, Any]], list[Event]]:
        """Columns of the tables `probes` and `probe_prompts`, and an event for each estimate that is not reliable."""
        assert self.probe_set is not None and self.drawer is not None
        estimates: list[Estimate] = []
        events: list[Event] = []
        view = self.view()
        batches = probe_set_batches(
            self.probe_set,
            self.spec,
            self.drawer,
            temperature=self.config.rollout.temperature,
            seed=lambda part: derive(self.spec.probe_set_seed, f"surface:{part}", step) % 2**31,
        )
        known = self.radius
        try:
            found = run(view.model, () if self.refused else batches, self.spec, radius=known)
            for measured in found:
                estimates += measured.estimates
                if measured.radius is not None and math.isfinite(measured.radius.rho):
                    self.radius = measured.radius
        except CheckError as problem:
            self.refused = True
            events.append(refusal(step, "the loss surface", problem))
        # found here, not given
        if known is None and self.radius is not None and self.radius.evaluations:
            note(self.config.run_dir, probe_radius=asdict(self.radius))
        events += [
            Event(step, "probe", "warning", math.nan, math.nan, "warn", text)
            for text in problems(estimates)
        ]
        tables = {"probes": columns(estimates), "probe_prompts": prompt_columns(estimates)}
        return {name: {"step": step, **values} for name, values in tables.items()}, events
