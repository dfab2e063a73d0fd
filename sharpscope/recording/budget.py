"""What a step measures besides its tables: at set intervals, or within a share of the run's time.

`recording.budget` limits the time of everything that is recorded, as a share of the run's time without evaluation. The first
and the last step and spikes are always measured. At other steps a measure whose interval is not set is made at
multiples of its default interval, doubled until the remaining time suffices, so that the steps measured in different
runs coincide as far as their budgets allow. Time is kept for the spikes to come, of which one is expected in a run. Of the rest
the surface probes, which come ten times in a run, may take all, and the shares of the gradient half of what they leave; what
remains is divided equally among the other measures, and time that one does not need goes to those after it in `MEASURES`.

Measuring changes nothing that training sees, so these decisions, which depend on the clock, do not change a run. The
column `scheduled` of the table `steps` stores them; a resumed run repeats those of steps that were recorded before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import pandas as pd

from sharpscope import distributed
from sharpscope.config.training import DEFAULT_INTERVALS

if TYPE_CHECKING:
    from sharpscope.config import RunConfig

MEASURES = ("surface", "shares", "norms", "rotation", "influence")
"""In the order in which they get time."""
TABLES = "tables"
"""Name under which the time of writing the tables is counted."""
SPIKE = "spike"
"""Name under which the cost of a spike is kept: norms and shares of all groups of an update."""
CRITICAL = "critical sharpness"
"""Name under which the time of critical sharpness is counted; it is measured with the surface."""


@dataclass
class Spent:
    """Time of a run so far [s]; a checkpoint stores it.

    Attributes:
        steps: number of steps.
        training: their time of generation and training.
        measuring: time by measure, that of the tables included.
        cost: time of the newest scheduled measurement of each measure, and of the newest spike, with the step of each.
        searches: number of line searches for the critical sharpness, whose time varies with the number of evaluations.
    """

    steps: int = 0
    training: float = 0.0
    measuring: dict[str, float] = field(default_factory=dict)
    cost: dict[str, tuple[int, float]] = field(default_factory=dict)
    searches: int = 0

    def summary(self) -> dict[str, Any]:
        """Share of the run's time spent on measuring (without evaluation), and seconds by measure, for run.json."""
        total = sum(self.measuring.values())
        share = total / (total + self.training) if total else 0.0
        return {"share": round(share, 4), "seconds": {name: round(s, 3) for name, s in self.measuring.items()}}


class Budget:
    """Decides what each step measures. Every process asks for the same steps in the same order.

    Attributes:
        every: interval of each measure [steps]; 0: never.
        flexible: measures whose interval follows from the budget.
        spent: time of the run so far.
    """

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        spec = config.recording
        own = {
            "shares": spec.token_gradients_every,
            "norms": spec.token_gradients_every,
            "rotation": spec.rotation_every,
            "influence": spec.heldout_influence_every,
            "surface": config.probes.every,
        }
        default = DEFAULT_INTERVALS
        self.every = {
            "shares": _or(own["shares"], default["token_gradients_every"]),
            "norms": _or(own["norms"], default["token_gradients_every"]),
            "rotation": _or(own["rotation"], default["rotation_every"]),
            "influence": _or(own["influence"], default["heldout_influence_every"]),
            "surface": config.probes.interval(config.steps),
        }
        self.flexible = {name for name, every in own.items() if every is None and spec.budget is not None}
        self.spent = Spent()
        self._recorded: dict[int, frozenset[str]] = {}
        self._plan: tuple[int, frozenset[str]] = -1, frozenset()

    def due(self, measure: str, step: int) -> bool:
        """Whether the schedule makes a measure in `step` (0: before training); spikes are not part of it."""
        every = self.every[measure]
        if not every:
            return False
        if measure in self.flexible:
            return measure in self._planned(step)
        ends = {"rotation": (1,), "influence": (), "surface": (0, self.config.steps)}
        return step % every == 0 or step in ends.get(measure, (1, self.config.steps))

    def scheduled(self, step: int) -> str | None:
        """What the budget chose for a step, for the table `steps`; None if no interval follows from a budget."""
        plan = self._planned(step)
        return " ".join(name for name in MEASURES if name in plan) if self.flexible else None

    def spend(self, measure: str, step: int, seconds: float, *, spike: bool = False) -> None:
        """Count time spent on a measure in `step` [s], at a spike or as scheduled."""
        spent = self.spent
        spent.measuring[measure] = spent.measuring.get(measure, 0.0) + seconds
        spent.searches += measure == CRITICAL
        kind = SPIKE if spike else measure
        newest, cost = spent.cost.get(kind, (step, 0.0))
        spent.cost[kind] = (step, seconds + (cost if newest == step else 0.0))

    def end_step(self, step: int, training: float, tables: float) -> None:
        """Count a step's time of generation and training, and that of its tables [s]."""
        self.spent.steps += 1
        self.spent.training += training
        self.spend(TABLES, step, tables)

    # -- resuming ------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """The time spent so far, as JSON."""
        return asdict(self.spent)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint; one of version 0.1 has no state, and counting starts again."""
        if state:
            cost = {name: (int(step), float(seconds)) for name, (step, seconds) in state["cost"].items()}
            self.spent = Spent(**{**state, "cost": cost})

    def repeat(self, steps: pd.DataFrame) -> None:
        """Repeat the decisions that the table `steps` of the interrupted run stores."""
        for row in steps[["step", "scheduled"]].dropna().to_dict("records"):
            self._recorded[int(row["step"])] = frozenset(row["scheduled"].split())

    # -- decisions -----------------------------------------------------------------------------------------------------

    def _planned(self, step: int) -> frozenset[str]:
        if self._plan[0] != step:
            # Clocks of processes differ; their decisions must not.
            self._plan = step, distributed.broadcast(self._choose(step)) if self.flexible else frozenset()
        return self._plan[1]

    def _choose(self, step: int) -> frozenset[str]:
        """The flexible measures of a step."""
        if step in self._recorded:
            return self._recorded[step]
        spent, last = self.spent, self.config.steps
        if step in (0, 1, last):
            ends = {"surface"} if step == 0 else {"shares", "norms", "rotation", "surface"}
            return frozenset(self.flexible & ends - ({"surface"} if step == 1 < last else set()))
        if not spent.steps:
            return frozenset()
        mean = spent.training / spent.steps
        left = self._remaining(mean, last - step + 1)
        chosen = set()
        names = [name for name in MEASURES if name in self.flexible and self.every[name]]
        for later, name in zip(range(len(names), 0, -1), names, strict=True):
            cost, stride = self._cost(name, mean), self.every[name]
            grant = max(left / {"surface": 1, "shares": 2}.get(name, later), 0.0)
            while _multiples(stride, step, last) * cost > grant:
                stride *= 2
            left -= _multiples(stride, step, last) * cost
            if step % stride == 0:
                chosen.add(name)
        return frozenset(chosen)

    def _remaining(self, mean: float, steps: int) -> float:
        """Time that is left for flexible measures of the `steps` steps to come, except those of the last step [s]."""
        spent, budget = self.spent, self.config.recording.budget
        assert budget is not None
        expected = spent.measuring.get(TABLES, 0.0) / spent.steps * steps
        for name in MEASURES:
            if name in self.flexible and self.every[name] and name != "influence":
                expected += self._cost(name, mean)  # of the last step
        if self.config.recording.spike_z is not None:  # one spike is expected in a run
            # Until there is one: all groups of one update take about as long as a sample of each update's.
            usual = self._cost("norms", mean) + self._cost("shares", mean)
            expected += spent.cost.get(SPIKE, (0, usual))[1] * steps / self.config.steps
        # Of recording and training together, so that the share of training is larger.
        allowed = budget / (1 - budget) * (spent.training + mean * steps)
        return allowed - sum(spent.measuring.values()) - expected

    def _cost(self, measure: str, mean: float) -> float:
        """Expected time of a measurement [s], where a step's generation and training take `mean`."""
        known = self.spent.cost
        if measure == "surface":
            critical = self.spent.measuring.get(CRITICAL, 0.0) / max(self.spent.searches, 1)
            return critical + (known["surface"][1] if "surface" in known else 0.0)
        if measure in known:
            return known[measure][1]
        if measure != "influence":
            return 0.0  # the first step measures it, unless its probe refuses the policy
        # Each update draws completions of the held-out prompts and takes their gradient, which a step does with its own.
        config = self.config
        own = config.rollout.prompts_per_step * config.rollout.group_size
        drawn = config.probes.heldout_prompts * config.recording.heldout_samples
        return config.update.mini_batches * drawn / own * mean + self._cost("shares", mean)


def _or(value: int | None, default: int) -> int:
    return default if value is None else value


def _multiples(every: int, first: int, last: int) -> int:
    """Number of multiples of `every` from `first` to `last` − 1."""
    return (last - 1) // every - (first - 1) // every


def sampled_share(config: RunConfig) -> float:
    """Share of an update's groups whose tokens are measured at scheduled steps."""
    spec = config.recording
    if spec.group_share is not None:
        return spec.group_share
    return 1.0 if spec.budget is None or spec.token_gradients_every is not None else 0.25
