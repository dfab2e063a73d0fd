"""Which rules apply at a step, and what they say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from sharpscope.rules.measures import History, OfLastStep
from sharpscope.rules.table import FIELDS, RULES, Rule


@dataclass(frozen=True)
class Event:
    """A row of the events table: something that a user should know."""

    step: int
    rule: str
    severity: str  # info | warning | error
    value: float
    threshold: float
    action: str
    message: str

    def row(self) -> dict[str, Any]:
        """The event as one row of the events table."""
        return dict(vars(self))


class RuleLimit(Protocol):
    """A rule's threshold and what follows, as `health.<rule>` sets them."""

    @property
    def threshold(self) -> float:
        """See `Rule.threshold`."""

    @property
    def action(self) -> str:
        """`off`, `warn`, `skip_step` or `stop`."""


def applies(rule: Rule, measured: np.ndarray, threshold: float | None = None) -> np.ndarray:
    """Whether a rule applies at each step (n,), from its measure (n,); where that is NaN it does not."""
    limit = rule.threshold if threshold is None else threshold
    return measured <= limit if rule.below else measured >= limit


def advise(rule: Rule, trainer: str = "", lr: float | None = None, checkpoint: str | None = None) -> tuple[str, str]:
    """A rule's meaning and advice, with the trainer's names of the settings.

    Args:
        rule: row of the table.
        trainer: key of FIELDS.
        lr: learning rate of the step.
        checkpoint: what to go back to, by name.
    """
    names = {
        **FIELDS.get(trainer, FIELDS[""]),
        "lr_value": "" if lr is None else f" = {lr:g}",
        "restart": f"go back to {checkpoint}" if checkpoint else "start again, since there is no checkpoint before",
    }
    return rule.meaning.format_map(names), rule.advice.format_map(names)


def judge(
    step: int,
    history: Mapping[str, float | None] | History,
    limits: Mapping[str, RuleLimit],
    trainer: str = "sharpscope",
    lr: float | None = None,
    checkpoint: str | None = None,
    known: str | None = None,
) -> list[Event]:
    """Events of the rules that apply at the last step of a history.

    Args:
        step: number of that step.
        history: values by canonical quantity, of the steps so far or of this step alone; a rule whose quantities are missing, None
            or NaN at the step does not apply.
        limits: threshold and action by rule; rules without one are left out.
        trainer: whose names of the settings are used, a key of FIELDS.
        lr: learning rate of the step.
        checkpoint: the newest one, by name.
        known: judge only the rules that are known then, see `Rule.known`.
    """
    arrays = OfLastStep((name, np.atleast_1d(np.asarray(values, dtype=np.float64))) for name, values in history.items())
    events = []
    for name, limit in limits.items():
        rule = RULES[name]
        if limit.action == "off" or known not in (None, rule.known) or not set(rule.quantities) & set(arrays):
            continue
        measured = rule.measure(arrays)[-1:]
        if applies(rule, measured, limit.threshold).any():
            meaning, advice = advise(rule, trainer, lr, checkpoint)
            value = float(measured[-1])
            mild = limit.action == "warn" and rule.level(value) == "info"
            severity = "error" if limit.action == "stop" else "info" if mild else "warning"
            text = f"{rule.statistic}: {meaning}; {advice}"
            events.append(Event(step, name, severity, value, limit.threshold, limit.action, text))
    return events
