"""Checks of values in the files of other trainers: each returns the value, or raises a UserError with place, name and fix."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TypeGuard

from sharpscope.errors import UserError

Values = Mapping[str, object]
"""An object in a file."""


def number(value: object, name: str, where: str) -> float | None:
    """A finite number or null; NaN is null."""
    if value is None or value != value:  # noqa: PLR0124 - NaN
        return None
    if isinstance(value, int | float) and abs(value) <= sys.float_info.max:
        return float(value)
    raise UserError(
        f"{where}: {name} = {str(value)[:40]!r} is not a finite number; write a number or null"
    )


def is_whole(value: object) -> TypeGuard[int]:
    """Whether a value is a whole number from 0 that fits in 32 bits."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def whole(value: object, name: str, where: str) -> int:
    """A whole number from 0."""
    if not is_whole(value):
        wrong = f"{name} = {str(value)[:40]!r} is not a whole number from 0"
        raise UserError(f"{where}: {wrong}; write one")
    return value


def integers(value: object, name: str, where: str) -> list[int]:
    """A list of whole numbers from 0."""
    if not isinstance(value, list) or not all(map(is_whole, value)):
        raise UserError(
            f"{where}: {name} is not made of whole numbers from 0; write a list of them"
        )
    return value


def flags(value: object, count: int, name: str, where: str) -> list[int]:
    """0 or 1 for each of `count` token IDs."""
    if (
        not isinstance(value, list)
        or len(value) != count
        or not all(isinstance(keep, int | float) for keep in value)
    ):
        raise UserError(
            f"{where}: {name} has not one value for each of the {count} token IDs; write 0 or 1 for each"
        )
    return [int(bool(keep)) for keep in value]


def text(value: object, name: str, where: str) -> str | None:
    """A text or null."""
    if not isinstance(value, str | None):
        raise UserError(f"{where}: {name} is a {type(value).__name__}; write a text")
    return value


def object_of(value: object, name: str, where: str) -> Values:
    """An object; null is an empty one."""
    if not isinstance(value, dict | None):
        raise UserError(f"{where}: {name} is a {type(value).__name__}, not an object; write one")
    return value or {}


def objects_of(value: object, name: str, where: str) -> list[Values]:
    """A list of objects; null is an empty one."""
    if not isinstance(value, list | None):
        raise UserError(f"{where}: {name} is a {type(value).__name__}, not a list; write one")
    return [object_of(item, f"{name}[{index}]", where) for index, item in enumerate(value or [])]
