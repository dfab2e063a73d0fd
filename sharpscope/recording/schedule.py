"""Which steps of a training are measured, and what measuring costs.

Measuring a trainer that is recorded costs a bounded share of its training, by count of passes. The unit is a forward pass over the
completions of a step. A pass of training over them costs three (forward and backward), drawing them about one. What a measurement
costs was measured on SmolLM2 and on the embedded policy (docs/trainers/index.md).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sharpscope.config import RunConfig

MOST_SPIKES = 8
"""Steps of a run at which a spike is measured."""
MOST_PLACES, MOST_SHARE = 10, 0.12
"""Steps of a training at which norms, shares and critical sharpness are measured by default, spikes included; and the
largest share of the training's passes that this costs."""
TRAINING, GENERATION = 3, 1
NORMS, EFFECTS, EXACT, CRITICAL, ROTATION = 8, 9, 8, 12, 3
"""Passes of local norms and shares; of effects on KL and entropy; of the exact norms of one large and one random token, divided
by the completions of an update; of a critical sharpness, at most, divided by the updates of an epoch; of a rotation."""


@dataclass(kw_only=True)
class Timetable:
    """The steps at which something is measured, and the time that it has taken so far."""

    name: str  # under which run.json lists the time
    every: int = 0  # interval [steps]; 0: only at the steps of `also`
    also: tuple[int, ...] = ()
    places: frozenset[int] | None = None  # the steps, in place of the interval
    seconds: float = 0.0

    def due(self, step: int) -> bool:
        """Whether it is measured in `step` (0: before training)."""
        if self.places is not None:
            return step in self.places
        return step in self.also or (self.every > 0 and step % self.every == 0)

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Context whose time is counted, unless it ends with an error."""
        started = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - started


@dataclass(kw_only=True)
class SpikeBudget:
    """Steps at which a spike of the gradient norm is measured; at most `most` of them."""

    most: int
    steps: list[int] = field(default_factory=list)

    def take(self, step: int) -> bool:
        """Whether a spike in `step` is measured; counts it."""
        if step not in self.steps and len(self.steps) < self.most:
            self.steps.append(step)
        return step in self.steps


class MeasurementSchedule:
    """The timetables of a run, made from its configuration."""

    def __init__(self, config: RunConfig) -> None:
        spec, probes = config.recording, config.probes
        tokens, surface = spec.token_gradients_every, probes.interval(config.steps)
        self.norms = _interval("norms", tokens, 1)
        self.shares = _interval("shares", tokens, 1)
        # the first step of AdamW is the gradient's sign, on which single tokens have no effect
        self.effects = _interval("effects", tokens, 2)
        self.influence = _interval("influence", spec.heldout_influence_every)
        self.rotation = _interval("rotation", spec.rotation_every, 1)
        self.surface = _interval("surface", surface, 0, config.steps)
        self.critical = Timetable(name="critical sharpness")
        if probes.critical_sharpness:  # in step 1 and those whose surface is probed
            self.critical = _interval("critical sharpness", surface, 1)
        self.entropy = Timetable(name="entropy", every=spec.probe_entropy_every)
        self.tables = Timetable(name="tables")
        self.spikes = SpikeBudget(most=MOST_SPIKES)
        self.training = 0.0  # time of generation and training so far [s]

    @property
    def timetables(self) -> list[Timetable]:
        """All of them."""
        return [each for each in vars(self).values() if isinstance(each, Timetable)]

    def end_step(self, *, training: float, tables: float) -> None:
        """Count a step's time of generation and training, and that of its tables [s]."""
        self.training += training
        self.tables.seconds += tables

    @property
    def seconds(self) -> dict[str, float]:
        """Time spent so far by name [s]."""
        return {each.name: each.seconds for each in self.timetables if each.seconds}

    def state(self) -> dict[str, Any]:
        """What a checkpoint stores, as JSON."""
        return {"seconds": self.seconds, "training": self.training, "spikes": self.spikes.steps}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint."""
        for each in self.timetables:
            each.seconds = state["seconds"].get(each.name, 0.0)
        self.training, self.spikes.steps = float(state["training"]), list(state["spikes"])

    def summary(self) -> dict[str, Any]:
        """Share of the run's time spent on measuring (without evaluation), and seconds by name, for run.json."""
        spent = self.seconds
        total = sum(spent.values())
        share = total / (total + self.training) if total else 0.0
        seconds = {name: round(value, 3) for name, value in spent.items()}
        return {"share": round(share, 4), "seconds": seconds}


def _interval(name: str, every: int, *also: int) -> Timetable:
    """Every so many steps, and at the steps of `also`; never if `every` is 0."""
    return Timetable(name=name, every=every, also=also if every else ())


# -- default places of a recorded training -----------------------------------------------------------------------------


@dataclass(frozen=True)
class StepCost:
    """What a step of a training does, for the price of measuring it."""

    epochs: int = 1  # how often it trains on its completions
    parts: int = 1  # updates in an epoch
    rows: int = 8  # completions of an update
    generated: bool = False  # whether it draws the completions
    reference: bool = False  # whether the loss runs a reference model too


@dataclass(frozen=True, kw_only=True)
class MeasurementPlan:
    """The default places of a training."""

    norms: frozenset[int]  # steps of norms and shares
    effects: frozenset[int]  # those of them with effects, at spikes too; empty: at none
    critical: frozenset[int]  # steps of the critical sharpness
    spikes: int  # how many spikes may be measured besides
    reason: str  # why a set is empty


def measurement_plan(
    steps: int, cost: StepCost, *, critical: bool, rotation: bool = False, exact: int = 1
) -> MeasurementPlan:
    """The first and the last step and others between, as many as the price allows.

    With `steps` 0, the number is not known: the first step is measured although a short training does not pay for it, then
    places are ever further apart. The critical sharpness is left out where it
    does not fit and the others do, and then the effects. `exact` is recording.exact_tokens.
    """
    # all in passes a step
    training = (TRAINING + cost.reference) * cost.epochs + GENERATION * cost.generated
    budget = MOST_SHARE * training
    price = NORMS + EXACT * exact / max(cost.rows, 1) + ROTATION * rotation
    with_effects = price + EFFECTS
    whole = with_effects + critical * CRITICAL * (1 + cost.reference) / cost.parts
    enough = math.ceil(whole / budget)
    effects = not steps or steps >= math.ceil(with_effects / budget)
    critical = critical and (not steps or steps >= enough)
    if effects:
        price = whole if critical else with_effects
    most = min(MOST_PLACES, int(steps * budget / price))
    if not steps:
        most = MOST_PLACES
    spikes = most * 3 // 10
    count = most - spikes
    if steps:
        chosen = frozenset(1 + round(i * (steps - 1) / max(count - 1, 1)) for i in range(count))
    else:
        chosen = frozenset([1, *(enough * 2**power for power in range(MOST_PLACES))])
    return MeasurementPlan(
        norms=chosen,
        effects=chosen if effects else frozenset(),
        critical=chosen if critical else frozenset(),
        spikes=spikes,
        reason=f"{steps} steps are too few for it within {MOST_SHARE:.0%} of the training's time; "
        f"{enough} are enough",
    )
