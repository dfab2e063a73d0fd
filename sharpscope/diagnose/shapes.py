"""Rows of a log in JSON, whatever its shape: lists of rows, columns, series of points, or objects that hold such."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence

from sharpscope.diagnose.tables import DEEPEST, NAME_KEYS, number_of

Row = Mapping[str, object]
Point = tuple[object, object]
"""A step and a value."""

_POINT_KEYS = (
    ("step", "value"),
    ("steps", "values"),
    ("x", "y"),
    ("iter", "value"),
    ("step", "metricValue"),
)
"""Keys of the step and of the value: of a point, or of the two lists of a series."""
_MOST_FAILURES = 200
"""Places at which no object begins after which a broken file is given up."""


def parsed(text: str) -> object:
    """A value from JSON; integers of more digits than Python converts become infinite.

    Raises:
        ValueError, RecursionError: the text is no JSON, or is nested too deeply.
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        raise
    except ValueError:
        return json.loads(text, parse_int=float)


def objects_in(text: str) -> list[object]:
    """The objects of a text that is no JSON as a whole: several values in a row, or one that breaks off."""
    decoder = json.JSONDecoder()
    found: list[object] = []
    failures = 0
    at = text.find("{")
    while at >= 0 and failures < _MOST_FAILURES:
        try:
            value, at = decoder.raw_decode(text, at)
            found.append(value)
        except (ValueError, RecursionError):
            failures += 1
            at += 1
        at = text.find("{", at)
    return found


def rows_of(content: object) -> tuple[Sequence[object], list[int]]:
    """The longest list of rows in a JSON value, and how many rows each other list has.

    Args:
        content: what `parsed` gave: trainer_state.json, a list of rows, columns, series of points, or objects with such.

    Returns:
        The rows, and the lengths of the lists that were not taken.
    """
    if isinstance(content, dict) and isinstance(content.get("log_history"), list):
        return content["log_history"], []
    logs = [log for log in _logs(content, 0) if log]
    logs.sort(key=len, reverse=True)
    if logs:
        return logs[0], [len(log) for log in logs[1:] if len(log) > 1]
    if isinstance(content, dict):
        return [content], []
    return [], []


def _logs(value: object, depth: int) -> Iterator[Sequence[object]]:
    """Every list of rows within a JSON value."""
    if isinstance(value, list):
        yield from _list_of_rows(value)
    elif isinstance(value, dict) and value and depth <= DEEPEST:
        names = value.get("columns")
        data = value.get("data")
        if isinstance(data, list) and _is_header(names):
            yield from _list_of_rows([names, *data])
        elif all(key.isdecimal() and isinstance(row, dict) for key, row in value.items()):
            yield [{"step": int(key), **row} for key, row in value.items()]
        else:
            yield from _logs_of_items(value, depth)


def _list_of_rows(value: list[object]) -> Iterator[Sequence[object]]:
    """A list of objects, or a list of names and lists of as many cells."""
    first = value[0] if value else None
    if isinstance(first, dict):
        yield value
    elif isinstance(first, list) and _is_header(first):
        rows = [row for row in value[1:] if isinstance(row, list)]
        yield [dict(zip(first, row, strict=False)) for row in rows]


def _logs_of_items(value: Row, depth: int) -> Iterator[Sequence[object]]:
    """Of an object its series of points together, its columns together, and the lists within its other items."""
    series: list[Row] = []
    columns: dict[str, list[object]] = {}
    for key, item in value.items():
        points = _points(item)
        if points:
            series.extend({"step": step, key: number} for step, number in points)
        elif isinstance(item, list) and len(item) > 1 and not isinstance(item[0], dict | list):
            columns[key] = item
        else:
            yield from _logs(item, depth + 1)
    yield series
    if len(columns) > 1:
        rows = itertools.zip_longest(*columns.values())
        yield [dict(zip(columns, row, strict=True)) for row in rows]


def _is_header(value: object) -> bool:
    return isinstance(value, list) and len(value) > 1 and all(isinstance(v, str) for v in value)


def _points(value: object) -> Sequence[Point]:
    """The points of a series; empty if a value is none."""
    if isinstance(value, dict):
        return _points_of_object(value)
    if not isinstance(value, list) or not value:
        return []
    first = value[0]
    if isinstance(first, dict) and NAME_KEYS.isdisjoint(first) and len(first) <= 4:
        for step, number in _POINT_KEYS:
            if step in first and number in first:
                rows = [row for row in value if isinstance(row, dict)]
                return [(row.get(step), row.get(number)) for row in rows]
        return []
    if isinstance(first, list):  # [step, value], or TensorBoard's [time, step, value]
        pairs = [row[-2:] for row in value if isinstance(row, list) and len(row) in (2, 3)]
        return [(step, number) for step, number in pairs if _is_number(step)]
    return []


def _points_of_object(value: Row) -> Sequence[Point]:
    """The points of a list of steps and a list of values, or of an object with steps as keys."""
    for step, number in _POINT_KEYS:
        steps = value.get(step)
        numbers = value.get(number)
        if isinstance(steps, list) and isinstance(numbers, list):
            return list(zip(steps, numbers, strict=False))
    if all(key.isdecimal() and _is_number(number) for key, number in value.items()):
        return [(int(key), number) for key, number in value.items()]
    return []


def _is_number(value: object) -> bool:
    if isinstance(value, str):
        return number_of(value) is not None
    return isinstance(value, int | float)
