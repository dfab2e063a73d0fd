"""The one writer of a step: rows of all tables from a finished step, whichever training made it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from sharpscope.config.run import RecordingSpec
from sharpscope.policy import Head
from sharpscope.recording.live import Tables
from sharpscope.recording.rows import id_columns, rollout_columns, token_columns, update_columns
from sharpscope.recording.step import RolloutBatch, StepResult
from sharpscope.rules.judging import Event
from sharpscope.traces import Row

_CLIPS = ("clip_fraction_low", "clip_fraction_high")
_ABSENT: dict[str, dict[str, tuple[str, ...]]] = {
    "rewards": {"steps": ("reward_mean", "reward_std", "zero_std_groups"), "rollouts": ("reward",)},
    "advantages": {"rollouts": ("advantage",), "tokens": ("advantage",)},
    "correct": {"steps": ("accuracy", "accuracy_completed"), "rollouts": ("correct",)},
    "behavior_logp": {"tokens": ("behavior_logp",)},
    "old_logp": {
        "steps": _CLIPS,
        "updates": (*_CLIPS, "kl_old_k3", "ratio_min", "ratio_max"),
        "tokens": ("ratio", "clipped"),
    },
    "ref_logp": {"steps": ("kl",)},
    "loss": {"steps": ("loss",), "updates": ("loss",)},
    "weights": {"steps": ("weight_mean",), "tokens": ("weight",)},
    "generation": {"steps": ("truncated_fraction", "kl_step"), "rollouts": ("truncated",)},
    "timing": {"steps": ("generation_s",)},
    "groups": {"steps": ("zero_std_groups",), "rollouts": ("group",)},
    "statistics": {
        "tokens": ("logit", "collision", "polarity", "logit_grad_norm", "head_grad_norm"),
    },
    "clipping": {
        "steps": (*_CLIPS, "grad_clipped"),
        "updates": (*_CLIPS, "clip_factor"),
        "tokens": ("clipped",),
        "uses": ("clipped",),
    },
}
"""What a training may not give -> table -> columns that are then null."""
EVERYTHING = frozenset(_ABSENT)
"""All that a training may give."""
OF_MODEL = frozenset({"groups", "statistics", "clipping"})
"""What every recorder that has the model gives."""


@dataclass(frozen=True, kw_only=True)
class FinishedStep:
    """A step whose updates are made, with everything that is known of it."""

    number: int
    batch: RolloutBatch
    result: StepResult
    row: Row  # of the steps table, without its timing columns
    measured: Mapping[str, Tensor] = field(default_factory=dict)
    """Measured columns of the tokens table, (N, T) each, NaN where nothing was measured."""
    by_layer: Mapping[tuple[int, int], Mapping[str, float]] = field(default_factory=dict)
    """Norms by layer of tokens (rollout, position)."""
    written: tuple[Tensor, float] | None = None
    """Rollouts whose tokens are written, (N,) bool, and the share of groups that are; None: all."""
    probes: Iterable[Mapping[str, object]] = ()  # columns of the probes table
    later_uses: Mapping[str, np.ndarray] | None = None  # columns of the table uses, without `step`
    given: frozenset[str] = EVERYTHING  # what the training gives, of EVERYTHING


class StepWriter:
    """Writes finished steps and events to a run's tables.

    `ids` writes the token IDs of completions too. Each function in `listeners` is called with the number of a step and its row
    of the table `steps`, after the step has been written.
    """

    def __init__(
        self,
        tables: Tables,
        spec: RecordingSpec,
        head: Head | None,
        temperature: float,
        *,
        ids: bool = False,
    ) -> None:
        self.tables = tables
        self.spec = spec
        self.head = head
        self.temperature, self.ids = temperature, ids
        self.listeners: list[Callable[[int, Mapping[str, object]], None]] = []

    def events(self, events: Iterable[Event]) -> None:
        """Write events."""
        for event in events:
            self.tables.append("events", event.row())

    def write(self, step: FinishedStep, seconds: Callable[[], Mapping[str, float]]) -> None:
        """Write a step; `seconds`, called when its large tables are written, gives the timing columns of its row."""
        spec, number = self.spec, step.number
        common: Row = {"step": number}
        if spec.rollouts_every and number % spec.rollouts_every == 0:
            ids = id_columns(step.batch.rollouts) if self.ids else {}
            self._append("rollouts", step, rollout_columns(number, step.batch) | ids)
        if step.measured or (spec.tokens_every and number % spec.tokens_every == 0):
            columns = token_columns(
                number,
                step.batch,
                step.result,
                dict(step.measured),
                self.head,
                self.temperature,
                step.by_layer,
                step.written,
            )
            self._append("tokens", step, columns)
            if step.later_uses is not None:
                self._append("uses", step, common | self._written_uses(step))
        for estimates in step.probes:
            self.tables.append("probes", estimates)
        times = seconds()
        self._append("updates", step, update_columns(number, step.result.updates))
        row = self._append("steps", step, step.row | dict(times))
        for listener in self.listeners:
            listener(number, row)

    def _written_uses(self, step: FinishedStep) -> dict[str, np.ndarray]:
        """The later uses of those completions whose tokens are written."""
        assert step.later_uses is not None
        if step.written is None:
            return dict(step.later_uses)
        kept = step.written[0].numpy()[step.later_uses["rollout"]]
        return {name: values[kept] for name, values in step.later_uses.items()}

    def _append(self, table: str, step: FinishedStep, columns: Row) -> Row:
        """Write columns without those that the training does not give; returns them."""
        for what, absent in _ABSENT.items():
            if what not in step.given:
                columns |= dict.fromkeys(absent.get(table, ()))
        self.tables.append(table, columns)
        return columns
