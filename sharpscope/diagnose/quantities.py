"""Canonical quantities of a training log, and the keys under which each trainer writes them.

Trainers use one word for different things: "kl" is to the reference in TRL and between sampler and trainer in AsyncGRPO;
"entropy" is that of the full distribution in TRL and verl and a sampled estimate in Tinker. A key stands here only where its
meaning was read in the trainer's source.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from sharpscope.packaged import package_yaml


@dataclass(frozen=True)
class Quantity:
    """One canonical quantity.

    Attributes:
        name: its name here, in `--map` and in the JSON output.
        title: what a reader calls it.
        unit: unit of its values; empty if dimensionless.
        log: whether it is positive and varies by factors, so that it is judged on a logarithmic scale.
        keys: trainer -> regular expressions of keys, all of whose values are added up (accuracies: averaged). The first expression
            that fits counts; "1-" in front of one means one minus the value.
    """

    name: str
    title: str
    unit: str = ""
    log: bool = False
    keys: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def _quantity(name: str, entry: dict[str, Any]) -> Quantity:
    keys = {trainer: tuple(keys) for trainer, keys in entry["keys"].items()}
    return Quantity(**entry | {"name": name, "keys": keys})


_ENTRIES = package_yaml("sharpscope.diagnose", "quantities.yaml")
BY_NAME: dict[str, Quantity] = {name: _quantity(name, entry) for name, entry in _ENTRIES.items()}
QUANTITIES: tuple[Quantity, ...] = tuple(BY_NAME.values())
_SIGNATURES = package_yaml("sharpscope.diagnose", "trainers.yaml")
LIKE = {"unsloth": "TRL"}
"""Trainers that write the keys of another: unsloth adds completion_length to TRL's, without its entropy."""


def framework_of(keys: Iterable[str]) -> str | None:
    """Name of the trainer that writes such keys; None if none is known to."""
    known = list(keys)
    for name, expressions in _SIGNATURES.items():
        if all(any(re.fullmatch(expression, key) for key in known) for expression in expressions):
            return name
    return None


def keys_of(quantity: Quantity, framework: str | None, keys: Iterable[str]) -> tuple[bool, tuple[str, ...]]:
    """The keys of a log that hold a quantity, whose values are added up, and whether one minus their sum is meant.

    Without a known trainer a key counts if it, or its part after the last "/", is the name of the quantity.
    """
    known = list(keys)
    for expression in quantity.keys.get(LIKE.get(framework or "", framework or ""), ()):
        complement, pattern = expression.startswith("1-"), expression.removeprefix("1-")
        found = tuple(key for key in known if re.fullmatch(pattern, key))
        if found:
            return complement, found
    if framework is None:
        for key in known:
            if quantity.name in (key, key.rsplit("/", 1)[-1]):
                return False, (key,)
    return False, ()


def own_values(row: Mapping[str, Any]) -> dict[str, float]:
    """Canonical quantities of a row of our steps table, without those that it lacks."""
    found = {}
    for name, keys in _own_keys(tuple(row)).items():
        values = [float(row[key]) for key in keys if row[key] is not None]
        if values:
            found[name] = sum(values)
    return found


@cache
def _own_keys(columns: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """Of each quantity, the columns of our steps table that hold it."""
    return {quantity.name: keys_of(quantity, "sharpscope", columns)[1] for quantity in QUANTITIES}
