"""The observers of a run: which measurements are made of each update, at spikes of the gradient norm, and between steps.

At the steps of `MeasurementSchedule` the tokens of a random sample of each update's groups are measured, at a spike of the
gradient norm those of all groups. What is measured is the list `Observers.measurements`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from sharpscope.memory import require_memory
from sharpscope.policy import Policy, Rollouts, completions_of
from sharpscope.policy.forward import Scorer
from sharpscope.policy.sharding import ModelView, copy_bytes, is_sharded
from sharpscope.recording.effects import TokenEffects
from sharpscope.recording.measurements import (
    ClippedUpdate,
    CriticalSharpness,
    HeldoutInfluence,
    MeasuredRun,
    MeasuredUpdate,
    Measurement,
    ScoreNorms,
    Shares,
    StepValues,
)
from sharpscope.recording.probe_sets import Drawer, SurfaceProbes, needs_probe_set, run_probe_set
from sharpscope.recording.schedule import MOST_SHARE, MeasurementSchedule, affordable_effects
from sharpscope.recording.step import PendingUpdate
from sharpscope.rules.judging import Event
from sharpscope.surface import Estimate, ProbeSet, columns
from sharpscope.tasks import Task
from sharpscope.tokens.sharded import ShardedProbes
from sharpscope.traces import Row, robust_z

if TYPE_CHECKING:
    from sharpscope.config import RunConfig


class Observers:
    """The measurements of a run: a `StepObserver` observes the updates of a step, `surface` the weights between steps.

    `view` gives the present model, gradients and optimizer; every process must call it, in the same order.
    """

    def __init__(
        self,
        config: RunConfig,
        policy: Policy,
        view: Callable[[], ModelView],
        drawer: Drawer | None = None,
    ) -> None:
        self.schedule = schedule = MeasurementSchedule(config)
        size = sum(p.numel() for p in policy.model.parameters())
        schedule.with_effects.most = affordable_effects(config, size)
        sharded = ShardedProbes(policy.model) if is_sharded(policy.model) else None
        self.run = MeasuredRun(
            config=config,
            policy=policy,
            view=view,
            drawer=drawer,
            schedule=schedule,
            sharded=sharded,
        )
        self.measurements: list[Measurement] = [
            ScoreNorms(schedule.norms),
            Shares(schedule.shares),
            HeldoutInfluence(schedule.influence),
        ]
        self.surface = SurfaceProbes(config, view, drawer, schedule.surface)
        self.measurements.append(
            TokenEffects(schedule.effects, self.surface, schedule.with_effects)
        )
        self.critical = CriticalSharpness(schedule.critical, self.surface)
        # solutions of the probe set, for the entropy at fixed tokens
        self.fixed: Rollouts | None = None
        if sharded is not None:
            self._require_copies()

    def _require_copies(self) -> None:
        """Refuse measurements that need a whole copy of a sharded model where it does not fit."""
        schedule = self.schedule
        policy = self.run.policy
        gathering = {
            "recording.heldout_influence_every=0": schedule.influence.every,
            "probes.preset=off": schedule.surface.every and self.run.config.probes.functionals,
            "recording.rotation_every=0": schedule.rotation.every,
        }
        for setting, due in gathering.items():
            if due:
                text = "a copy of all weights and gradients on each process"
                require_memory(copy_bytes(policy.model, 2), policy.device, text, f"set {setting}")

    @property
    def probe_set(self) -> ProbeSet | None:
        """The fixed prompts that are probed, once `start` has been called."""
        return self.run.probe_set

    def state(self) -> Row:
        """State for a checkpoint, as JSON."""
        passed = sorted(name for name in self.run.checked if name.startswith("effect_"))
        return self.schedule.state() | {
            "critical_lr": self.run.critical_lr,
            "checked_effects": passed,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint."""
        self.run.critical_lr = state["critical_lr"]
        self.run.checked |= set(state.get("checked_effects", ()))
        self.schedule.restore(state)

    def start(self, task: Task, info: Row) -> list[Event]:
        """Load or build the probe set, where a schedule needs one; `info` is run.json."""
        config = self.run.config
        events = self._few_effects()
        if not needs_probe_set(config):
            return events
        probe_set = self.run.probe_set = run_probe_set(config, task)
        if config.recording.probe_entropy_every:
            probe_set.solutions("train")
            solved = [item for item in probe_set.split("train") if item.solution]
            fixed = completions_of(
                [item.prompt_ids for item in solved],
                [item.solution for item in solved],
                device=self.run.policy.device,
            )
            self.fixed = fixed.with_reward(torch.zeros(len(solved)))
        return [*events, *self.surface.start(probe_set, info)]

    def _few_effects(self) -> list[Event]:
        """An event where the price of effects limits how often they are measured, or forbids it."""
        most, choice = self.schedule.with_effects.most, self.run.config.recording.effects
        if most is None or choice == "never" or not self.schedule.effects.every:
            return []
        text = (
            f"effects of tokens are measured at {most} updates at most: more would cost over {MOST_SHARE:.0%} of the training's passes; "
            "recording.effects=always measures them at every spike"
        )
        return [Event(0, "probe", "info", float(most), math.nan, "none", text)]

    def entropy_row(self, step: int, scorer: Scorer) -> Row | None:
        """The row of the probes table with the mean entropy after `step` at the fixed tokens [nats]; None where it is not due."""
        times = self.schedule.entropy
        if self.fixed is None or self.probe_set is None or not times.due(step):
            return None
        started = time.perf_counter()
        entropy = scorer.statistics(self.fixed).entropy.double()
        mean = float(entropy[self.fixed.completion_mask.bool()].mean())
        seconds = time.perf_counter() - started
        times.seconds += seconds
        row = Estimate("entropy", "entropy", mean, functional="nll", prompts=len(self.fixed))
        name = self.probe_set.name("train")
        return {"step": step, **columns([replace(row, probe_set=name, seconds=seconds)])}

    def critical_due(self, step: int) -> bool:
        """Whether `StepObserver.critical` measures the first update of a step."""
        return self.critical.due(self.run, step)


class StepObserver(StepValues):
    """Called with each update of a step between its gradient and the optimizer's step."""

    def __init__(
        self, observers: Observers, step: int, rollouts: Rollouts, recent: Sequence[float]
    ) -> None:
        super().__init__(observers.run, step, rollouts)
        self.observers, self.recent = observers, recent  # log gradient norms of the last steps
        self.seconds = 0.0
        # whether an update's gradient norm was one, at which all is measured and written
        self.spike = False

    def __call__(self, update: PendingUpdate) -> None:
        """Run the measurements that are due."""
        if update.index == 0:
            self.coefficients = float(update.loss_coef.abs().sum())
        if not bool(update.first_use.any()):
            return  # a row of the tokens table belongs to the first update that used its token
        started = time.perf_counter()
        spike = self._is_spike(update)
        due = [each for each in self.observers.measurements if each.due(self.step, spike)]
        if spike:
            self.spike, self.written = True, (torch.ones_like(self.written[0]), 1.0)
        if due:
            measured = MeasuredUpdate(self, update, sampled=not spike)
            if len(measured.rows):
                for each in due:
                    with each.times.timed():
                        each.run(measured)
            self.seconds += time.perf_counter() - started

    def _is_spike(self, update: PendingUpdate) -> bool:
        """Whether the gradient norm stands out from those of the last steps, and a spike may be measured."""
        limit = self.run.config.recording.spike_z
        if limit is None or not update.grad_norm > 0:
            return False
        height = robust_z(self.recent, math.log(update.grad_norm))
        return height >= limit and self.observers.schedule.spikes.take(self.step)

    def critical(self, update: ClippedUpdate) -> None:
        """Measure the critical sharpness of a step's first update, after clipping, if it is due. Every process must call it."""
        measurement = self.observers.critical
        if measurement.due(self.run, self.step):
            started = time.perf_counter()
            with measurement.times.timed():
                measurement.run(self, update)
            self.seconds += time.perf_counter() - started
