"""Which rules apply at a step and what they say, and what a step's log-probabilities show of its sampler."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from sharpscope.rules.measures import SPIKE_LEAST, SPIKE_WINDOW, History, OfLastStep
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

    def row(self) -> dict[str, object]:
        """The event as one row of the events table."""
        return dict(vars(self))


def applies(rule: Rule, measured: np.ndarray, threshold: float | None = None) -> np.ndarray:
    """Whether a rule applies at each step (n,), from its measure (n,); where that is NaN it does not.

    Args:
        rule: the rule.
        measured: its measure (n,).
        threshold: in place of the rule's own.
    """
    limit = rule.threshold if threshold is None else threshold
    return measured <= limit if rule.below else measured >= limit


def advise(
    rule: Rule, trainer: str = "", lr: float | None = None, checkpoint: str | None = None
) -> tuple[str, str]:
    """A rule's meaning and advice, with the trainer's names of the settings (FIELDS)."""
    names = {
        **FIELDS.get(trainer, FIELDS[""]),
        "lr_value": "" if lr is None else f" (now {lr:g})",
        "restart": f"go back to {checkpoint}"
        if checkpoint
        else "start again, since there is no checkpoint before",
    }
    return rule.meaning.format_map(names), rule.advice.format_map(names)


class Limited(Protocol):
    """`health.<rule>`."""

    @property
    def threshold(self) -> float:
        """From which the rule applies."""

    @property
    def action(self) -> str:
        """What follows: off, warn, skip_step or stop."""


def judge(
    step: int,
    history: Mapping[str, float | None] | History,
    limits: Mapping[str, Limited],
    trainer: str = "sharpscope",
    lr: float | None = None,
    checkpoint: str | None = None,
    known: str | None = None,
) -> list[Event]:
    """Events of the rules that apply at the last step of a history, number `step`.

    `history` has values by canonical quantity, of the steps so far or of this step alone: a rule whose quantities are
    missing, None or NaN does not apply. `limits` has, by rule, `threshold` and `action` of `health.<rule>`. With `known`
    only such rules are judged (`Rule.known`). `trainer`, `lr` and `checkpoint` are for the text.
    """
    arrays = OfLastStep(
        (name, np.atleast_1d(np.asarray(values, dtype=np.float64)))
        for name, values in history.items()
    )
    events = []
    for name, limit in limits.items():
        rule = RULES[name]
        if (
            limit.action == "off"
            or known not in (None, rule.known)
            or not set(rule.quantities) & set(arrays)
        ):
            continue
        measured = rule.measure(arrays)[-1:]
        if applies(rule, measured, limit.threshold).any():
            meaning, advice = advise(
                rule,
                trainer,
                lr,
                checkpoint,
            )
            value = float(measured[-1])
            mild = limit.action == "warn" and rule.level(value) == "info"
            severity = "error" if limit.action == "stop" else "info" if mild else "warning"
            text = f"{rule.statistic}: {meaning}; {advice}"
            events.append(
                Event(
                    step,
                    name,
                    severity,
                    value,
                    limit.threshold,
                    limit.action,
                    text,
                )
            )
    return events


# -- spikes in a running training, and the sampler's log-probabilities: with r = π/μ, of the trainer's to the sampler's
# -- probability, KL(μ‖π) is estimated by k1 = −ln r, k2 = (ln r)²/2 and k3 = r − 1 − ln r

BAND = (0.9, 1.1)
"""Ratios π/μ outside are counted."""
QUANTITIES = ("outside", "k1", "k2", "k3")
POSITIVE = 1e-4
"""Rounding that a log-probability of 0 may have [nats]."""
CERTAIN = -0.1
"""Where the trainer's log-probability is below this, a sampler's of exactly 0 is wrong [nats]."""
FEWEST = 16
"""Tokens from which on equal log-probabilities are no coincidence."""


def robust_z(history: Sequence[float], value: float) -> float:
    """Robust z-score (value − median)/(1.4826·MAD) against the last `SPIKE_WINDOW` values of `history`.

    NaN with fewer than `SPIKE_LEAST` finite values. If the MAD is zero, 0 at the median and ±inf otherwise.

    Args:
        history: earlier values, oldest first.
        value: the present one.
    """
    recent = [v for v in history[-SPIKE_WINDOW:] if math.isfinite(v)]
    if len(recent) < SPIKE_LEAST or not math.isfinite(value):
        return math.nan
    median = float(np.median(recent))
    scale = 1.4826 * float(np.median(np.abs(np.array(recent) - median)))
    if scale == 0:
        return 0.0 if value == median else math.copysign(math.inf, value - median)
    return (value - median) / scale


def mismatch(
    logp: NDArray[np.floating], sampler: NDArray[np.floating]
) -> dict[str, NDArray[np.float64]]:
    """QUANTITIES of each token (n,): `outside` (0 or 1), k1, k2, k3 [nats].

    Args:
        logp: the trainer's log-probabilities (n,) [nats].
        sampler: the sampler's (n,) [nats].
    """
    x = np.asarray(logp, dtype=np.float64) - np.asarray(sampler, dtype=np.float64)
    ratio = np.exp(x)
    outside = (ratio < BAND[0]) | (ratio > BAND[1])
    return {"outside": outside.astype(float), "k1": -x, "k2": x * x / 2, "k3": np.expm1(x) - x}


def sampler_values(logp: NDArray[np.floating], sampler: NDArray[np.floating]) -> dict[str, float]:
    """What the health rules judge of a step's log-probabilities (n,) [nats], where both are known; empty without any.

    Impossible are a sampler's above 0, of 0 where the trainer's is below CERTAIN, and equal ones where the trainer's differ.
    """
    known = np.isfinite(logp) & ~np.isnan(sampler)
    if not known.any():
        return {}
    logp, sampler = logp[known], sampler[known]
    gap, outside = np.abs(logp - sampler), mismatch(logp, sampler)["outside"].mean()
    impossible = (sampler > POSITIVE) | ((sampler == 0) & (logp < CERTAIN))
    if len(sampler) >= FEWEST and np.ptp(sampler) == 0 and np.ptp(logp) > 0:
        impossible[:] = True
    return {
        "sampler_impossible": float(impossible.mean()),
        "sampler_outside": float(outside),
        "mismatch": float(gap.mean()),
        "ratio_max": float(np.exp(np.minimum(gap.max(), 700))),
    }
