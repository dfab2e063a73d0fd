"""Weightings as configured."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from sharpscope.config.token_weights import (
    LinearWeight,
    ShuffledWeight,
    SigmoidWeight,
)
from sharpscope.objective import (
    Method,
    Schedule,
    named_method,
)


def test_schedules_are_resolved_everywhere_and_checked_at_both_ends():
    holder = named_method("holder")
    assert [holder.at(p).ratio.p for p in (0.0, 0.25, 1.0)] == [2.0, 1.0, -2.0]
    assert named_method("grpo").at(0.5) is not None
    deep = Method(name="x", weight=ShuffledWeight(of=LinearWeight(alpha=Schedule(start=0.0, end=1.0))))
    assert deep.at(0.5).weight.of.alpha == 0.5
    for ends in ((0.0, 1.5), (-0.5, 1.0)):
        with pytest.raises(ValidationError):
            Method(name="x", weight=LinearWeight(alpha=Schedule(start=ends[0], end=ends[1])))
    with pytest.raises(ValidationError, match="below"):
        Method(name="x", weight=SigmoidWeight(alpha=2.0, L=Schedule(start=0.5, end=2.0)))
