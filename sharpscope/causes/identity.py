"""An identity: a number that recorded columns must give in a healthy training, and what was found."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, SupportsFloat

import numpy as np
import pandas as pd

from sharpscope.causes.recorded import Recorded
from sharpscope.packaged import package_yaml

ERRORS = 5.0
"""Standard errors by which a mean may be off before it counts."""

Facts = Mapping[str, Any]
"""Where an identity is violated: steps, rows, positions, layers, names and numbers that a sentence uses."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The value of an identity, and where it comes from."""

    value: float
    facts: Facts


def measured(value: SupportsFloat, /, **facts: object) -> Measured:
    """The value of an identity with its facts, in which numpy's scalars become Python's."""
    plain = {
        name: fact.item() if isinstance(fact, np.generic) else fact for name, fact in facts.items()
    }
    return Measured(value=float(value), facts=plain)


@dataclass(frozen=True, kw_only=True)
class Healthy:
    """Values of an identity in the healthy runs that its threshold was set on."""

    runs: int
    median: float
    largest: float


@dataclass(frozen=True, kw_only=True)
class Identity:
    """A number that is small in a healthy training.

    Attributes:
        name: of the function that measures it.
        statement: what must hold.
        unit: of the value.
        threshold: values above it violate the identity.
        healthy: its distribution over healthy runs.
        measure: gives the value, or None where the columns were not recorded or hold too few rows.
    """

    name: str
    statement: str
    unit: str
    threshold: float
    healthy: Healthy
    measure: Callable[[Recorded], Measured | None]


@dataclass(frozen=True, kw_only=True)
class Result:
    """An identity checked on a run."""

    identity: Identity
    value: float
    facts: Facts

    @property
    def holds(self) -> bool:
        """Whether the value is at most the threshold."""
        return self.value <= self.identity.threshold


REGISTRY: dict[str, Identity] = {}
"""Name -> identity, in the order in which they are checked."""
_TEXTS = package_yaml("sharpscope.causes", "identities.yaml")


def identity(
    measure: Callable[[Recorded], Measured | None],
) -> Callable[[Recorded], Measured | None]:
    """Register a function as an identity; its text, unit and threshold are in identities.yaml."""
    entry = dict(_TEXTS[measure.__name__])
    healthy = Healthy(**entry.pop("healthy"))
    REGISTRY[measure.__name__] = Identity(
        name=measure.__name__,
        measure=measure,
        healthy=healthy,
        **entry,
    )
    return measure


def check_recorded(recorded: Recorded, without: frozenset[str] = frozenset()) -> dict[str, Result]:
    """Name -> result of each identity whose columns were recorded, but of those in `without`."""
    results = {}
    for name, one in REGISTRY.items():
        measured = None if name in without else one.measure(recorded)
        if measured is not None and not math.isnan(measured.value):
            results[name] = Result(identity=one, value=measured.value, facts=measured.facts)
    return results


def beyond_chance(values: np.ndarray) -> float:
    """By how much |mean| of independent values exceeds `ERRORS` standard errors; 0 if it does not or there are under 8."""
    if len(values) < 8:
        return 0.0
    error = float(values.std(ddof=1)) / math.sqrt(len(values))
    return max(0.0, abs(float(values.mean())) - ERRORS * error)


def spans(numbers: list[int]) -> str:
    """Integers as text, such as "3, 16 to 31"."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(f"{p[0]}" if len(p) == 1 else f"{p[0]} to {p[-1]}" for p in parts)


def first_step(frame: pd.DataFrame) -> int:
    """The first step of rows, 0 without rows."""
    return int(frame["step"].min()) if len(frame) else 0
