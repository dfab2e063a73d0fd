"""The quantities that `diagnose` knows: what each is, which values it can have, and what people call it.

Trainers use one word for different things: "kl" is to the reference in TRL and between sampler and trainer in AsyncGRPO;
"entropy" is that of the full distribution in TRL and verl and a sampled estimate in Tinker. Keys whose meaning was read in a
trainer's source stand in `trainers`; the spellings here are for keys of no known trainer, and every use of one is reported.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from sharpscope.packaged import package_yaml

Gather = Literal["mean", "last", "max", "min"]
"""How several values of one step become one."""


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """One canonical quantity."""

    name: str  # here, in `--map` and in the JSON output
    title: str  # what a reader calls it
    unit: str = ""  # empty if dimensionless
    log: bool = False  # whether it is judged on a logarithmic scale
    lowest: float = -math.inf  # values that it can have
    highest: float = math.inf
    gather: Gather = "mean"
    # words of keys that name it, in any order; words of `names.NOISE` may stand beside them
    spellings: tuple[str, ...] = ()
    held_out: bool = False  # whether it is of an evaluation


def listed(*parts: str) -> tuple[str, ...]:
    """The parts of texts with commas between them."""
    return tuple(word for part in parts for word in part.split(", "))


def _read() -> tuple[Quantity, ...]:
    found = []
    for name, row in package_yaml("sharpscope.diagnose", "quantities.yaml").items():
        spellings = row.pop("spellings", "")
        words = listed(spellings) if spellings else ()
        found.append(Quantity(name=name, spellings=words, **row))
    return tuple(found)


QUANTITIES: tuple[Quantity, ...] = _read()
"""All quantities; the first spellings that fit count."""

BY_NAME: Mapping[str, Quantity] = {quantity.name: quantity for quantity in QUANTITIES}
