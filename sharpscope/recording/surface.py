"""Curvature and perturbation probes while training: which steps, what it costs, rows of the probes table."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from sharpscope import distributed
from sharpscope.errors import CheckError
from sharpscope.policy.sharding import ModelView
from sharpscope.probes import ProbeSet, measure, measured_cost, probe_functionals, squared_gradient_norm
from sharpscope.probes.estimate import Estimate, columns, labelled
from sharpscope.probes.functionals import Functional
from sharpscope.probes.survey import Measured, problems
from sharpscope.recording.health import Event, refusal
from sharpscope.recording.probe_sets import Drawer
from sharpscope.recording.run_folder import note
from sharpscope.seeds import derive

if TYPE_CHECKING:
    from sharpscope.config import RunConfig


class SurfaceProbes:
    """Measures the loss surface at scheduled steps. `vectors` (k, P): the span of the newest top eigenvectors, or None."""

    def __init__(self, config: RunConfig, view: Callable[[], ModelView], drawer: Drawer | None) -> None:
        self.config, self.view, self.drawer = config, view, drawer
        self.spec = config.probes
        self.every = self.spec.every
        self.vectors: Tensor | None = None
        self.probe_set: ProbeSet | None = None
        self.refused = False  # whether the surface is left out for the rest of the run

    def start(self, probe_set: ProbeSet, info: dict[str, Any]) -> list[Event]:
        """Fix the schedule. The cost is measured once in a run's life and saved, so that a resumed run probes the same steps."""
        self.probe_set = probe_set
        if not self.spec.every:
            return []
        assert self.drawer is not None
        cost = info.get("probe_cost")
        if cost is None:
            functional = next(
                iter(probe_functionals(probe_set, probe_set.splits[0], self.spec, self.drawer, seed=0).values())
            )
            # Timings differ between processes, the schedule must not.
            cost = distributed.broadcast(measured_cost(self.view().model, functional, self.spec))
            note(self.config.run_dir, probe_cost=cost)
        product = max(cost["product_s"], 1e-9)
        products = self.spec.cost(gradient=cost["gradient_s"] / product, value=cost["value_s"] / product)
        self.every = self.spec.interval(products)
        if self.every == self.spec.every:
            return []
        text = (
            f"a round of probes may cost {products:.0f} vector products; within {self.spec.budget:g} a step they run every "
            f"{self.every} steps instead of {self.spec.every}"
        )
        return [Event(0, "probe_budget", "info", products, float(self.spec.budget or 0), "thinned", text)]

    def due(self, step: int) -> bool:
        """Whether the surface is probed after `step` (0: before training)."""
        return bool(self.every) and (step % self.every == 0 or step == self.config.steps)

    def rows(self, step: int) -> tuple[dict[str, Any], list[Event]]:
        """Columns of the probes table, and an event for each estimate that is not reliable."""
        assert self.probe_set is not None and self.drawer is not None
        found: list[Estimate] = []
        events: list[Event] = []
        view = self.view()
        for split in self.probe_set.splits:
            seed = derive(self.config.probes.probe_set_seed, f"surface:{split}", step) % 2**31
            functionals = probe_functionals(
                self.probe_set, split, self.spec, self.drawer, temperature=self.config.rollout.temperature, seed=seed
            )
            for functional in functionals.values():
                measured = self._measured(
                    view.model, step, events, functional, seed=seed, probe_set=self.probe_set.name(split),
                    optimizer=view.optimizer if view.optimizer.state else None,
                    slices=self.spec.slices and split == "train",
                )  # fmt: skip
                if measured is None:
                    continue
                found += measured.estimates
                if split == "train" and measured.curvature is not None and measured.curvature.converged:
                    self.vectors = measured.curvature.vectors
        if self.spec.gradient_samples and not self.refused:
            found += self._two_batches(view.model, step)
        events += [Event(step, "probe", "warning", math.nan, math.nan, "warn", text) for text in problems(found)]
        return {"step": step, **columns(found)}, events

    def _measured(
        self, model: nn.Module, step: int, events: list[Event], functional: Functional, **options: Any
    ) -> Measured | None:
        """`measure`; None once the surface has differed from the policy's own, for the rest of the run."""
        if self.refused:
            return None
        try:
            return measure(model, functional, self.spec, **options)
        except CheckError as problem:
            self.refused = True
            events.append(refusal(step, "the loss surface", problem))
            return None

    def _two_batches(self, model: nn.Module, step: int) -> list[Estimate]:
        """‖∇J‖² without a batch's noise, on the training prompts; from completions of their own, so that it is unbiased."""
        assert self.probe_set is not None and self.drawer is not None
        split = self.probe_set.splits[0]
        seed = derive(self.config.probes.probe_set_seed, "surface:two batches", step) % 2**31
        if len(self.probe_set.split(split)) < 2:
            return []
        drawn = self.probe_set.draw(split, self.spec.gradient_samples, self.drawer, seed)
        rows = squared_gradient_norm(
            model, drawn, temperature=self.config.rollout.temperature, seed=seed,
            microbatch_tokens=self.spec.microbatch_tokens, head_mb=self.spec.head_mb, memory_mb=self.spec.basis_mb,
            check=self.spec.check,
        )  # fmt: skip
        return labelled(rows, probe_set=self.probe_set.name(split))
