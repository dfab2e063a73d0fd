"""Loss-surface probes during training: when they are due, and their rows in the tables `probes` and `probe_prompts`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from sharpscope.errors import CheckError
from sharpscope.policy.sharding import ModelView
from sharpscope.probes import Estimate, ProbeSet, Radius, columns, probe_set_batches, problems, prompt_columns, run
from sharpscope.recording.health import refusal
from sharpscope.recording.probe_sets import Drawer
from sharpscope.recording.run_folder import note
from sharpscope.recording.schedule import MeasurementSchedule
from sharpscope.rules.judging import Event
from sharpscope.seeds import derive

if TYPE_CHECKING:
    from sharpscope.config import RunConfig


class SurfaceProbes:
    """Probes the loss surface at scheduled steps."""

    def __init__(
        self,
        config: RunConfig,
        view: Callable[[], ModelView],
        drawer: Drawer | None,
        schedule: MeasurementSchedule | None = None,
    ) -> None:
        self.config, self.view, self.drawer = config, view, drawer
        self.spec = config.probes
        self.schedule = MeasurementSchedule(config) if schedule is None else schedule
        self.probe_set: ProbeSet | None = None
        self.radius: Radius | None = None  # of the perturbations, found at the first probe and kept in run.json
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
            if split in self.spec.splits and not any(item.solution for item in probe_set.split(split))
        ]
        if not self.schedule.every["surface"] or "nll" not in self.spec.functionals or not bare:
            return []
        left = tuple(name for name in self.spec.functionals if name != "nll") or ("expected_failure",)
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
        regular = self.spec.every is not None and self.spec.every > 0 and step % self.spec.every == 0
        return self.spec.critical_sharpness and bool(self.schedule.every["surface"]) and (step == 1 or regular)

    def rows(self, step: int) -> tuple[dict[str, dict[str, Any]], list[Event]]:
        """Columns of the tables `probes` and `probe_prompts`, and an event for each estimate that is not reliable.

        If the probed loss differs from the policy's own, the loss surface is left out for the rest of the run.
        """
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
        optimizer = view.optimizer if view.optimizer.state else None
        known = self.radius
        try:
            found = run(view.model, () if self.refused else batches, self.spec, radius=known, optimizer=optimizer)
            for measured in found:
                estimates += measured.estimates
                if measured.radius is not None and math.isfinite(measured.radius.rho):
                    self.radius = measured.radius
        except CheckError as problem:
            self.refused = True
            events.append(refusal(step, "the loss surface", problem))
        if known is None and self.radius is not None and self.radius.evaluations:  # found here, not given
            note(self.config.run_dir, probe_radius=asdict(self.radius))
        events += [Event(step, "probe", "warning", math.nan, math.nan, "warn", text) for text in problems(estimates)]
        tables = {"probes": columns(estimates), "probe_prompts": prompt_columns(estimates)}
        return {name: {"step": step, **values} for name, values in tables.items()}, events
