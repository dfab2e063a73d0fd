"""The probe set of a run, fixed prompts shared by all methods and seeds of a study, and the probes of the loss surface on it."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sharpscope import distributed
from sharpscope.errors import CheckError, UserError
from sharpscope.policy import Policy, draw_scored, load_policy, render_prompts
from sharpscope.policy.directions import length
from sharpscope.policy.sharding import ModelView
from sharpscope.recording.health import refusal
from sharpscope.recording.run_folder import note
from sharpscope.rules.judging import Event
from sharpscope.seeds import derive
from sharpscope.surface import (
    Drawn,
    Estimate,
    Objective,
    ProbeSet,
    Radius,
    build_probe_set,
    columns,
    critical_sharpness,
    labeled,
    limited_surface,
    probe_set_batches,
    problems,
    prompt_columns,
    run,
)
from sharpscope.surface.algorithms import quadratic_form
from sharpscope.surface.estimate import with_prompts
from sharpscope.surface.operators import flatten
from sharpscope.tasks import Example, Task
from sharpscope.traces import Row

if TYPE_CHECKING:
    from sharpscope.config import RunConfig
    from sharpscope.recording.schedule import Timetable


ENOUGH = 200
"""Prompts below which a run says that its SAM sharpness is too high; docs/explanations/sharpness.md has the bias."""
SHARE = 1 / 8
FEWEST = 24
"""Largest part of a training's passes that probes at the default places cost, and the fewest prompts that they are given."""
NLL_PASSES, SAMPLE_PASSES = 15, 9
"""Passes of one text of `nll` at a point: two gradients, SAM and its cross-fit 8, the relative critical sharpness 7; of one completion
of the expected failure: drawing it 1, the others 8."""


def affordable_prompts(config: RunConfig) -> int:
    """Prompts of the probe set on which a run's surface is probed: all, but where the places are ours as many as `SHARE` pays for."""
    spec, update = config.probes, config.update
    if spec.every is not None:
        return spec.prompts
    passes = 1 + (3 + (config.method.kl is not None)) * update.inner_epochs
    completions = config.rollout.prompts_per_step * config.rollout.group_size
    price = NLL_PASSES * ("nll" in spec.functionals)
    price += SAMPLE_PASSES * spec.samples * ("expected_failure" in spec.functionals)
    points = 1 + math.ceil(config.steps / max(spec.interval(config.steps), 1))
    paid = int(SHARE * config.steps * completions * passes / (points * max(price, 1)))
    return min(spec.prompts, max(FEWEST, paid))


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
        times: Timetable,
    ) -> None:
        self.config = config
        self.view = view
        self.drawer = drawer
        self.spec = config.probes
        self.times = times  # of the surface
        self.probe_set: ProbeSet | None = None
        # of the perturbations, found at the first probe and kept in run.json
        self.radius: Radius | None = None
        # learning rate of the relative critical sharpness found last, from which the next search starts
        self.relative_lr: float | None = None
        self.refused = False  # whether the probed loss differed from the policy's own

    def start(self, probe_set: ProbeSet, info: dict[str, Any]) -> list[Event]:
        """Take the run's probe set and, in a resumed run, its radius.

        Without solutions there is no `nll`: an event says so, and without another loss the expected failure takes its place.
        """
        few = affordable_prompts(self.config)
        self.probe_set = probe_set.first(few)
        if info.get("probe_radius"):
            self.radius = Radius(**info["probe_radius"])
        events = []
        if self.times.every and self.spec.functionals:
            events = self._few_prompts(few, probe_set)
        bare = [
            split
            for split in probe_set.splits
            if split in self.spec.splits
            and not any(item.solution for item in probe_set.split(split))
        ]
        if not self.times.every or "nll" not in self.spec.functionals or not bare:
            return events
        left = tuple(name for name in self.spec.functionals if name != "nll") or (
            "expected_failure",
        )
        self.spec = self.spec.model_copy(update={"functionals": left})
        text = (
            f"the initial policy solves no prompt of the probe set's {' and '.join(bare)} prompts, so "
            f"that there is no text whose nll is probed; {' and '.join(left)} is probed"
        )
        return [*events, Event(0, "probe", "info", math.nan, math.nan, "left out", text)]

    def _few_prompts(self, few: int, probe_set: ProbeSet) -> list[Event]:
        """An event where sharpness is probed on fewer than `ENOUGH` prompts, and why."""
        count = len(probe_set.first(few).split("train"))
        if count >= ENOUGH:
            return []
        why = f"the probe set has {count}"
        if few < len(probe_set.split("train")):
            why = f"more would cost over {SHARE:.0%} of the training; probes.every=N probes on all"
        text = f"sharpness is probed on {count} prompts, where SAM sharpness is too high ({why})"
        return [Event(0, "probe", "info", float(count), float(ENOUGH), "none", text)]

    def due(self, step: int) -> bool:
        """Whether the surface is probed after `step` (0: before training)."""
        return self.times.due(step)

    def along_update(
        self, model: nn.Module, direction: Sequence[Tensor | None], guess: float
    ) -> list[Estimate]:
        """What an update does to the `nll` of the probe set's solutions, which it does not train on; nothing without solutions.

        `relative_critical_sharpness` is 2/η of the smallest η at which the step θ − η·Δ raises it (arXiv 2601.16979), and where
        curvature is probed `along_update` is ΔᵀHΔ/ΔᵀΔ on the same prompts as the largest eigenvalue.
        """
        if self.probe_set is None or "nll" not in self.spec.functionals:
            return []
        temperature = self.config.rollout.temperature
        objective = Objective("nll", self.probe_set.solutions("train"), temperature)
        rows = []
        with limited_surface(model, objective, self.spec) as surface:
            # With the slope, an update that raises this loss at once is known without a search.
            _, gradient, base = surface.gradient_by_prompt()
            flat = flatten(direction, surface.parameters)
            found = critical_sharpness(
                surface.by_prompt,
                model,
                direction,
                guess=self.relative_lr or guess,
                slope=float(gradient @ flat),
                start=base,
                tolerance=0.25,
                max_evaluations=16,
            )
            if found.outcome == "found":
                self.relative_lr = found.lr
            relative = replace(found.estimates()[0], quantity="relative_critical_sharpness")
            rows.append(replace(relative, prompts=len(objective.prompt_weight)))
            if self.spec.curvature_prompts:
                prompts = torch.tensor(objective.batch.prompts)
                few = surface.prompts(prompts < self.spec.curvature_prompts)
                along = Estimate("curvature", "along_update", quadratic_form(few.operator(), flat))
                rows.append(with_prompts(along, few.curvature_by_prompt(flat / length(flat))))
        return labeled(rows, functional="nll", probe_set=self.probe_set.name("train"))

    def rows(self, step: int) -> tuple[dict[str, Row], list[Event]]:
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
