"""Which steps measure what, at fixed intervals, and the time that measuring takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sharpscope.config import RunConfig

CRITICAL = "critical sharpness"
"""Name under which the time of critical sharpness is counted."""
MOST_SPIKES = 8
"""Steps of a run at which a spike is measured."""


class MeasurementSchedule:
    """The intervals of a run's measurements. They depend on the configuration alone, so that runs can be compared."""

    def __init__(self, config: RunConfig) -> None:
        spec = config.recording
        self.last = config.steps
        self.every = {  # interval of each measure [steps]; 0: never
            "shares": spec.token_gradients_every,
            "norms": spec.token_gradients_every,
            "rotation": spec.rotation_every,
            "influence": spec.heldout_influence_every,
            "surface": config.probes.interval(config.steps),
        }
        self.seconds: dict[str, float] = {}  # spent so far by measure
        self.training = 0.0  # time of generation and training so far [s]
        self.spikes: list[int] = []  # steps so far at which a spike was measured
        self.at: dict[str, frozenset[int]] = {}  # measure -> the steps of it, in place of its interval
        self.most_spikes = MOST_SPIKES

    def due(self, measure: str, step: int) -> bool:
        """Whether a measure is made in `step` (0: before training); spikes are not part of the schedule."""
        if measure in self.at:
            return step in self.at[measure]
        every = self.every[measure]
        ends = {"influence": (), "surface": (0, self.last)}.get(measure, (1,))
        return bool(every) and (step % every == 0 or step in ends)

    def spike_allowed(self, step: int) -> bool:
        """Whether a spike in `step` is measured; counts it."""
        if step not in self.spikes and len(self.spikes) < self.most_spikes:
            self.spikes.append(step)
        return step in self.spikes

    def spend(self, measure: str, seconds: float) -> None:
        """Count time spent on a measure [s]."""
        self.seconds[measure] = self.seconds.get(measure, 0.0) + seconds

    def end_step(self, training: float, tables: float) -> None:
        """Count a step's time of generation and training, and that of its tables [s]."""
        self.training += training
        self.spend("tables", tables)

    def state(self) -> dict[str, Any]:
        """What a checkpoint stores, as JSON."""
        return {"seconds": self.seconds, "training": self.training, "spikes": self.spikes}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint."""
        self.seconds, self.training = dict(state["seconds"]), float(state["training"])
        self.spikes = list(state["spikes"])

    def summary(self) -> dict[str, Any]:
        """Share of the run's time spent on measuring (without evaluation), and seconds by measure, for run.json."""
        total = sum(self.seconds.values())
        share = total / (total + self.training) if total else 0.0
        return {"share": round(share, 4), "seconds": {name: round(s, 3) for name, s in self.seconds.items()}}
