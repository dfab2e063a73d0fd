"""At which steps a recorded training is measured, so that measuring costs a bounded share of it, by count of passes.

The unit is a forward pass over the completions of a step. A pass of training over them costs three (forward and backward),
drawing them about one. What a measurement costs was measured on SmolLM2 and on the embedded policy (docs/trainers/index.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

MOST_PLACES, MOST_SHARE = 10, 0.12
"""Steps of a training at which norms, shares and critical sharpness are measured by default, spikes included; and the largest share of the
training's passes that this costs."""
TRAINING, GENERATION = 3, 1
NORMS, EXACT, CRITICAL, ROTATION = 8, 8, 12, 3
"""Passes of local norms and shares; of the exact norms of one large and one random token, divided by the completions of an update;
of a critical sharpness, at most, divided by the updates of an epoch; of a rotation."""


class Places(NamedTuple):
    """Steps of norms and shares, those of the critical sharpness, how many spikes may be measured besides, and why a set is empty."""

    norms: frozenset[int]
    critical: frozenset[int]
    spikes: int
    reason: str


@dataclass(frozen=True)
class Work:
    """What a step of a training does.

    Attributes:
        epochs: how often it trains on its completions.
        parts: updates in an epoch.
        rows: completions of an update.
        generated: whether it draws the completions.
        reference: whether the loss runs a reference model too.
    """

    epochs: int = 1
    parts: int = 1
    rows: int = 8
    generated: bool = False
    reference: bool = False


def places(steps: int, work: Work, *, critical: bool, rotation: bool = False, exact: int = 1) -> Places:
    """The default places of a training: the first and the last step and others between, as many as the price allows.

    Args:
        steps: of the training; 0: not known, then ever further apart.
        work: of a step.
        critical: whether the critical sharpness is measured; it is left out where it does not fit and the others do.
        rotation: whether the rotation by token weights is.
        exact: recording.exact_tokens.
    """
    budget = MOST_SHARE * ((TRAINING + work.reference) * work.epochs + GENERATION * work.generated)  # passes a step
    cost = NORMS + EXACT * exact / max(work.rows, 1) + ROTATION * rotation
    both = cost + critical * CRITICAL * (1 + work.reference) / work.parts
    enough = math.ceil(both / budget)
    reason = f"{steps} steps are too few for it within {MOST_SHARE:.0%} of the training's time; {enough} are enough"
    if not steps or steps >= enough:
        cost = both
    else:
        critical = False
    most = min(MOST_PLACES, int(steps * budget / cost))
    spikes = most * 3 // 10
    count = most - spikes
    if not steps:
        chosen = frozenset(enough * 2**power for power in range(MOST_PLACES))
    else:
        chosen = frozenset(1 + round(i * (steps - 1) / max(count - 1, 1)) for i in range(count))
    return Places(chosen, chosen if critical else frozenset(), spikes, reason)
