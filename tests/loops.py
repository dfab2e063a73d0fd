"""Loops that assert: an empty one would pass whatever the code does."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")


def some(values: Iterable[T], least: int = 1) -> list[T]:
    """The values, of which there must be `least` or more."""
    found = list(values)
    assert len(found) >= least, f"{len(found)} values, where the test needs {least}"
    return found
