"""Loss-surface probes during training: their schedule, their cost and their rows in the probes table."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sharpscope import distributed
from sharpscope.errors import CheckError
from sharpscope.policy.sharding import ModelView
from sharpscope.probes import (
    Estimate,
    ProbeSet,
    columns,
    measured_cost,
    probe_set_batches,
    problems,
    prompt_columns,
    run,
)
from sharpscope.recording.budget import Budget
from sharpscope.recording.health import Event, refusal
from sharpscope.recording.probe_sets import Drawer
from sharpscope.recording.run_folder import note
from sharpscope.seeds import derive

if TYPE_CHECKING:
    from sharpscope.config import RunConfig


class SurfaceProbes:
    """Probes the loss surface at scheduled steps.

    Attributes:
        vectors: (k, P) top eigenvectors of the newest probed training loss whose curvature converged, or None.
        refused: whether the probed loss differed from the policy's own; the surface is then left out of the run.
    """

    def __init__(
        self,
        config: RunConfig,
        view: Callable[[], ModelView],
        drawer: Drawer | None,
        budget: Budget | None = None,
    ) -> None:
        self.config, self.view, self.drawer = config, view, drawer
        self.spec = config.probes
        self.budget = Budget(config) if budget is None else budget
        self.vectors: Tensor | None = None
        self.probe_set: ProbeSet | None = None
        self.refused = False

    def start(self, probe_set: ProbeSet, info: dict[str, Any]) -> list[Event]:
        """Fix the schedule. The cost is measured once per run and saved, so that a resumed run probes the same steps."""
        self.probe_set = probe_set
        every = self.budget.every
        if not every["surface"]:
            return []
        events = self._without_solutions(probe_set)
        if self.spec.budget is None or not self.spec.functionals:
            return events
        assert self.drawer is not None
        cost = info.get("probe_cost")
        if cost is None:
            first = next(probe_set_batches(probe_set, self.spec, self.drawer))
            # Timings differ between processes, the schedule must not.
            cost = distributed.broadcast(measured_cost(self.view().model, first.objectives[0], self.spec))
            note(self.config.run_dir, probe_cost=cost)
        product = max(cost["product_s"], 1e-9)
        products = self.spec.cost(gradient=cost["gradient_s"] / product, value=cost["value_s"] / product)
        planned, every["surface"] = every["surface"], self.spec.interval(self.config.steps, products)
        if every["surface"] == planned:
            return events
        text = (
            f"a round of probes may cost {products:.0f} vector products; within {self.spec.budget:g} a step they run every "
            f"{every['surface']} steps instead of {planned}"
        )
        return [*events, Event(0, "probe_budget", "info", products, float(self.spec.budget), "thinned", text)]

    def _without_solutions(self, probe_set: ProbeSet) -> list[Event]:
        """Leave `nll` out of the run if a probed split has no verified solution; an event says so."""
        bare = [
            split
            for split in probe_set.splits
            if split in self.spec.splits and not any(item.solution for item in probe_set.split(split))
        ]
        if "nll" not in self.spec.functionals or not bare:
            return []
        left = tuple(name for name in self.spec.functionals if name != "nll")
        self.spec = self.spec.model_copy(update={"functionals": left})
        text = (
            f"no prompt of the probe set's {' and '.join(bare)} prompts has a verified solution of the initial policy, so its nll is "
            "not probed; probes.functionals=[expected_failure] needs none"
        )
        return [Event(0, "probe", "warning", math.nan, math.nan, "left out", text)]

    def due(self, step: int) -> bool:
        """Whether the surface is probed after `step` (0: before training)."""
        return self.budget.due("surface", step)

    def update_due(self, step: int) -> bool:
        """Whether the critical sharpness is measured in `step`: where the surface is probed after it, and in step 1."""
        return self.spec.critical_sharpness and (self.due(step) or (step == 1 and bool(self.budget.every["surface"])))

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
        try:
            for measured in run(view.model, () if self.refused else batches, self.spec, optimizer=optimizer):
                estimates += measured.estimates
                train = measured.batch.name == self.probe_set.name("train")
                if train and measured.curvature is not None and measured.curvature.converged:
                    self.vectors = measured.curvature.vectors
        except CheckError as problem:
            self.refused = True
            events.append(refusal(step, "the loss surface", problem))
        except torch.OutOfMemoryError as problem:
            self.refused = True
            text = f"the loss surface is left out of the run: {str(problem).splitlines()[0]}; lower probes.microbatch_tokens"
            events.append(Event(step, "probe", "warning", math.nan, math.nan, "left out", text))
        events += [Event(step, "probe", "warning", math.nan, math.nan, "warn", text) for text in problems(estimates)]
        tables = {"probes": columns(estimates), "probe_prompts": prompt_columns(estimates)}
        return {name: {"step": step, **values} for name, values in tables.items()}, events
