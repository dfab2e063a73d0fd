"""Which keys each trainer writes for a quantity, and by which keys its logs are recognized: `trainers.yaml`.

Keys are compared by `normal`: words and numbers joined by "/", so that "completions / mean_length" of a notebook's table and
"completions_mean_length" of a database are the key "completions/mean_length". "*" stands for any words.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache

from sharpscope.packaged import package_yaml

Keys = Mapping[str, tuple[tuple[str, ...], ...]]
"""Quantity -> alternatives, of which the first that a log has counts; the values of its keys are added up."""


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """What one trainer writes."""

    name: str
    source: str  # version and file in which the keys were read
    signature: tuple[tuple[str, ...], ...]  # of each group of keys its logs have at least one
    keys: Keys
    # quantity -> key of one minus it
    complements: Mapping[str, str] = field(default_factory=dict)


def normal(key: str) -> str:
    """A key as trainers' keys are compared: lower-case words and numbers joined by "/"."""
    return re.sub(r"[^a-z0-9*]+", "/", key.lower()).strip("/")


@cache
def _pattern(key: str) -> re.Pattern[str] | None:
    """The expression of a key with "*"; None for one without."""
    return re.compile(re.escape(normal(key)).replace(r"\*", ".+")) if "*" in key else None


def matching(key: str, logged: Mapping[str, str]) -> list[str]:
    """Keys of a log that a trainer's key means.

    Args:
        key: of a trainer, with "*" for any words.
        logged: normal form -> key of the log (`forms`).
    """
    pattern = _pattern(key)
    if pattern is not None:
        return [name for form, name in logged.items() if pattern.fullmatch(form)]
    found = logged.get(normal(key))
    return [] if found is None else [found]


def trainer_of(logged: Mapping[str, str]) -> Trainer | None:
    """The trainer that writes such keys (normal form -> key); None if none is known to."""
    for trainer in BY_TRAINER.values():
        if trainer.signature and all(
            any(matching(key, logged) for key in group) for group in trainer.signature
        ):
            return trainer
    return None


def keys_of(trainer: Trainer, quantity: str, logged: Mapping[str, str]) -> tuple[str, ...]:
    """The keys of a log that hold a quantity of a trainer, whose values are added up; empty if there are none.

    Args:
        trainer: who wrote the log.
        quantity: canonical quantity.
        logged: normal form -> key of the log (`forms`).
    """
    for alternative in trainer.keys.get(quantity, ()):
        found = [key for written in alternative for key in matching(written, logged)]
        if found:
            return tuple(found)
    complement = trainer.complements.get(quantity)
    return tuple(matching(complement, logged)) if complement else ()


def forms(keys: Iterable[str]) -> dict[str, str]:
    """Normal form -> key; of keys with one form the first."""
    found: dict[str, str] = {}
    for key in keys:
        found.setdefault(normal(key), key)
    return found


def _alternatives(written: str | list[str | list[str]]) -> tuple[tuple[str, ...], ...]:
    """A key, or alternatives of which each is a key or a list of keys."""
    listed = [written] if isinstance(written, str) else written
    return tuple((keys,) if isinstance(keys, str) else tuple(keys) for keys in listed)


def _read() -> dict[str, Trainer]:
    found = {}
    for name, written in package_yaml("sharpscope.diagnose", "trainers.yaml").items():
        found[name] = Trainer(
            name=name,
            source=written["source"],
            signature=tuple(map(tuple, written.get("signature", ()))),
            keys={quantity: _alternatives(keys) for quantity, keys in written["keys"].items()},
            complements=written.get("complements", {}),
        )
    return found


BY_TRAINER: Mapping[str, Trainer] = _read()
"""Trainers by name, in the order in which their signatures are tried."""
SHARPSCOPE = BY_TRAINER["sharpscope"]
