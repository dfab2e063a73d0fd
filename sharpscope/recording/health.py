"""The health rules in a training: quantities of a step from its tensors, and what follows when a rule applies."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sharpscope import distributed
from sharpscope.config.run import HealthSpec
from sharpscope.diagnose.logs import own_values
from sharpscope.errors import CheckError, UserError
from sharpscope.memory import memory_share
from sharpscope.methods import Method
from sharpscope.methods.loss import gradient_mass
from sharpscope.methods.plan import summarize_weights
from sharpscope.policy import TokenStats
from sharpscope.recording.rows import clipped_weight_share
from sharpscope.recording.step import RolloutBatch
from sharpscope.rules.judging import Event, judge, sampler_values

UNIFORM = 0.9
"""Share of ln V from which a token's entropy counts as that of noise."""


def refusal(step: int, what: str, problem: UserError) -> Event:
    """The event that says why `what` is not measured for the rest of a run."""
    error, limit = (
        (problem.error, problem.tolerance)
        if isinstance(problem, CheckError)
        else (math.nan, math.nan)
    )
    return Event(
        step,
        "self_check",
        "warning",
        error,
        limit,
        "left out",
        f"{what} is left out from here on: {problem}",
    )


def not_finite(spec: HealthSpec, step: int, what: str, value: float, broken: bool = False) -> Event:
    """The event that a value is not finite; where the weights themselves are `broken` the run stops."""
    text = f"{what}; lower optimizer.lr, or look at this step's rollouts and tokens"
    return Event(
        step, "non_finite", "error", value, math.nan, "stop" if broken else spec.non_finite, text
    )


class Quantities:
    """Canonical quantities of a run's steps (`sharpscope.diagnose.logs`), which the health rules compare a step with."""

    def __init__(self, rows: Sequence[Mapping[str, float]] = ()) -> None:
        # of the finished steps, as a checkpoint stores them
        self.rows: list[Mapping[str, float]] = []
        self._columns: dict[str, np.ndarray] = {}
        for row in rows:
            self.history(row)
            self.rows.append(row)

    def history(self, row: Mapping[str, float]) -> dict[str, np.ndarray]:
        """The quantities of `row`, the step in progress, at all steps up to it; NaN where one is not known."""
        at = len(self.rows)
        for name, value in row.items():
            column = self._columns.get(name, np.empty(0))
            if at >= len(column):
                column = np.append(column, np.full(2 * at + 64 - len(column), math.nan))
                self._columns[name] = column
            column[at] = value
        return {name: self._columns[name][: at + 1] for name in row}


@dataclass
class StepHealth:
    """The health rules of one step."""

    spec: HealthSpec
    step: int
    batch: RolloutBatch
    method: Method
    progress: float  # share of the run done
    device: torch.device  # of the model
    vocabulary: int | None = None  # tokens that the policy can draw
    # of the steps so far; `values` are added at its end
    quantities: Quantities = field(default_factory=Quantities)
    trainer: str = "sharpscope"  # whose names of the settings messages use, a key of `sharpscope.rules.table.FIELDS`
    lr: float | None = None  # of the step
    checkpoint: str | None = None  # the newest, by name
    # canonical quantities of the step
    values: dict[str, float] = field(init=False, default_factory=dict)
    # of the rules that applied so far
    events: list[Event] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        reward = self.batch.rollouts.reward
        for value in reward[~torch.isfinite(reward)].tolist()[:1]:
            self.events.append(not_finite(self.spec, self.step, "a reward is not finite", value))

    def _judge(self, values: Mapping[str, float | None], known: str) -> None:
        """Add quantities of the step, and the events of the rules that are known then."""
        self.values |= {name: value for name, value in values.items() if value is not None}
        history = self.quantities.history(self.values)
        said = (self.trainer, self.lr, self.checkpoint)
        self.events += judge(self.step, history, self.spec.limits, *said, known=known)

    def allows_updates(self, stats: TokenStats, weight: Tensor) -> bool:
        """`before_updates`, decided by the first process: memory differs between processes, and every one must call it."""
        return distributed.broadcast(self.before_updates(stats, weight))

    def before_updates(self, stats: TokenStats, weight: Tensor) -> bool:
        """Check π_old's statistics and the token weights (N, T); False if an event leaves the step's updates out.

        A reward that is not finite leaves its group out only.
        """
        rollouts = self.batch.rollouts
        mask = rollouts.completion_mask.bool().cpu()
        entropy = stats.entropy.cpu()[mask].double()
        mass = gradient_mass(
            self.method, mask, self.batch.advantage.cpu(), stats.logit_grad_norm.cpu()
        )
        weights = summarize_weights(
            self.method.weight, weight.cpu(), mask, progress=self.progress, mass=mass
        )
        # A completion that was cut and is right all the same says that the limit does no harm.
        cut = rollouts.truncated.cpu().tolist()
        harmless = any(
            reward.correct and short for reward, short in zip(self.batch.rewards, cut, strict=True)
        )
        values: dict[str, float | None] = {
            "truncated": None if harmless else sum(cut) / len(cut),
            "reward": float(rollouts.reward.double().mean()),
            "saturation": max(weights.saturation_low or 0.0, weights.saturation_high or 0.0),
            "clipped_weights": clipped_weight_share(
                self.method, weight.cpu(), self.batch.advantage.cpu(), mask
            ),
            "memory": memory_share(self.device),
            **sampler_values(
                stats.logp.cpu()[mask].numpy(), rollouts.behavior_logp.cpu()[mask].numpy()
            ),
        }
        if entropy.numel():
            if self.vocabulary:
                values["near_uniform"] = float(
                    (entropy > UNIFORM * math.log(self.vocabulary)).double().mean()
                )
            values |= {"entropy": float(entropy.mean()), "dead_groups": self.batch.idle_share}
        self._judge(values, "before")
        found = {(event.rule, event.action) for event in self.events} - {
            ("non_finite", "skip_step")
        }
        return not any(action in ("skip_step", "stop") for _, action in found)

    def after_updates(self, row: Mapping[str, object]) -> None:
        """Check what the step's row says of its updates."""
        self._judge(own_values(row), "after")


def temperature_gap(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Largest |accuracy at T = 0 − at T = 1| over splits and levels of an evaluation's rows; None if it has not both."""
    by_cell: dict[tuple[str, str], dict[float, float]] = {}
    for row in rows:
        by_cell.setdefault((row["split"], row["level"]), {})[float(row["temperature"])] = row[
            "accuracy"
        ]
    return max(
        (abs(of[0.0] - of[1.0]) for of in by_cell.values() if 0.0 in of and 1.0 in of), default=None
    )
