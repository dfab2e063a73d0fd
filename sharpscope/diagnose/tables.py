"""Rows of a log as columns that hold only what was logged, so that a file with 100,000 keys or 1,000,000 rows stays small."""

from __future__ import annotations

import math
import re
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from sharpscope.rules.measures import Flags, Values

Positions = NDArray[np.int64]

NOT_FINITE = math.inf
"""What stands for a logged value that is not finite; NaN means that nothing was logged."""
LARGEST = 1e150
"""Values beyond overflow when they are squared: they count as not finite."""
DEEPEST = 8
"""Levels of nested objects that are read."""

RUN_KEYS = frozenset({"run", "run_name", "run_id", "run name", "run id", "experiment", "trial"})
"""Keys whose text says which run a row belongs to, in lower case."""
TEXT_KEYS = frozenset({"prompt", "completion", "input", "output", "response", "generation", "text"})
"""Keys of prompts and completions: a file of such rows is a dump of completions."""

NAME_KEYS = frozenset({"name", "metric", "metric_name", "metricName", "key", "tag", "variable"})
"""Keys that name the quantity of a row that has one value."""
_VALUES = frozenset({"value", "metricValue", "metric_value", "Value"})
"""Keys of that value."""
_FRACTION = re.compile(r"\s*(\d+)\s*/\s*(\d+)\s*")
_WRITTEN = re.compile(
    r"([-+−]?)(?:([1-9]\d{0,2}(?:,\d{3})+(?:\.\d*)?)|(\d*[.,]?\d+(?:[eE][-+]?\d+)?))\s?([%kKMBG]?)"
)
_UNITS = {
    "": 1.0,
    "%": 0.01,
    "k": 1e3,
    "K": 1e3,
    "M": 1e6,
    "B": 1e9,
    "G": 1e9,
}


def number_of(text: str) -> float | None:
    """The number that a text shows, such as "0.5", "1,234.5", "0,5", "12 %" (0.12) or "1.2k"; None if it shows none."""
    try:
        return float(text)
    except ValueError:
        found = _WRITTEN.fullmatch(text.strip())
    if found is None:
        return None
    sign, grouped, plain, unit = found.groups("")
    number = float(grouped.replace(",", "") or plain.replace(",", "."))
    return (-number if sign in ("-", "−") else number) * _UNITS[unit]


def _widened(row: Mapping[str, object]) -> Mapping[str, object]:
    """A row whose value stands under the name that the row has for it, if it has one."""
    name = next((row[key] for key in NAME_KEYS & row.keys() if isinstance(row[key], str)), None)
    if name is None:
        return row
    (value, *_) = [row[key] for key in _VALUES & row.keys()]
    return {**{k: v for k, v in row.items() if k not in _VALUES | NAME_KEYS}, str(name): value}


@dataclass
class Column:
    """The values that one key has: of the rows `positions` (m,), ascending."""

    positions: array[int] = field(default_factory=lambda: array("I"))
    values: array[float] = field(default_factory=lambda: array("d"))

    def numbers(self) -> Values:
        """The logged values (m,)."""
        return np.array(self.values, dtype=np.float64)

    def rows(self) -> Positions:
        """The rows that have a value (m,)."""
        return np.array(self.positions, dtype=np.int64)


@dataclass
class Table:
    """The rows of one run, by key."""

    count: int = 0  # rows
    columns: dict[str, Column] = field(default_factory=dict)
    texts: set[str] = field(default_factory=set)  # keys of TEXT_KEYS that the rows have
    runs: list[str] = field(default_factory=list)  # run of each row, if the rows say it
    left_out: Counter[str] = field(default_factory=Counter)  # reason -> values
    notes: list[str] = field(default_factory=list)  # how the rows were read, for the report
    announced: int = 0  # steps that the training was to have, 0 if the log does not say
    error: str = ""  # what was printed after the last row when the training failed

    def add(self, row: Mapping[str, object]) -> None:
        """Append a row: numbers, numbers in text, and nested objects whose keys are joined by "/".

        A row that names one quantity and its value, such as {"step": 1, "name": "loss", "value": 0.5}, is one with that key.
        """
        self._add(row if _VALUES.isdisjoint(row) else _widened(row), "", 0)
        self.count += 1

    def _add(self, row: Mapping[str, object], prefix: str, depth: int) -> None:
        for key, value in row.items():
            kind = type(value)
            if kind is float or kind is int:
                number = self._number(value)
            elif kind is str:
                number = self._of_text(key, str(value))
            elif isinstance(value, Mapping):
                self._nested(row, key, value, prefix, depth)
                continue
            elif isinstance(value, list) and len(value) == 1 and type(value[0]) in (float, int):
                number = self._number(value[0])
            else:  # a truth value, a longer list or null
                continue
            if number is not None:
                self.put(f"{prefix}{key}" if prefix else key, self.count, number)

    def _nested(
        self,
        row: Mapping[str, object],
        key: str,
        value: Mapping[str, object],
        prefix: str,
        depth: int,
    ) -> None:
        if depth >= DEEPEST:
            self.left_out["nested too deeply"] += 1
            return
        # verl's file logger writes {"step": 1, "data": {…}}, ROLL's {"step": 1, "metrics": {…}}
        wrapper = key in ("data", "metrics") and "step" in row
        self._add(value, "" if wrapper else f"{prefix}{key}/", depth + 1)

    def put(self, key: str, row: int, value: float) -> None:
        """Set the value of a key in a row at or after the last one that has it."""
        column = self.columns.get(key)
        if column is None:
            column = self.columns[key] = Column()
        if column.positions and column.positions[-1] == row:
            column.values[-1] = value
            return
        column.positions.append(row)
        column.values.append(value)

    def append(self, other: Table) -> None:
        """Append the rows of another table."""
        for key, column in other.columns.items():
            for row, value in zip(column.positions, column.values, strict=True):
                self.put(key, self.count + row, value)
        self.count += other.count
        self.left_out += other.left_out

    def complete(self, key: str, text: str) -> None:
        """Add a number in text to the last row, unless it has the key."""
        column = self.columns.get(key)
        row = self.count - 1
        number = self._of_text(key, text)
        if number is not None and (column is None or column.positions[-1] != row):
            self.put(key, row, number)

    def _number(self, value: object) -> float | None:
        try:
            number = float(value)  # type: ignore[arg-type]
        except OverflowError:  # an integer of more than 308 digits
            self.left_out["integers that are too large"] += 1
            return None
        return number if -LARGEST < number < LARGEST else NOT_FINITE

    def _of_text(self, key: str, text: str) -> float | None:
        lower = key.lower()
        if lower in RUN_KEYS:
            self.runs.extend([""] * (self.count - len(self.runs)))
            self.runs.append(text)
        number = number_of(text) if len(text) <= 40 else None
        if number is None:
            if lower in TEXT_KEYS:
                self.texts.add(lower)
            # ms-swift's "global_step/max_steps": "240/960"
            match = _FRACTION.fullmatch(text[:40]) if "step" in lower else None
            if match:
                self.announced = int(match[2])
            return float(match[1]) if match else None
        return number if -LARGEST < number < LARGEST else NOT_FINITE

    def rows_with(self, keys: Iterable[str]) -> Flags:
        """Which rows have at least one of the keys (count,)."""
        found = np.zeros(self.count, dtype=bool)
        for key in keys:
            if key in self.columns:
                found[self.columns[key].rows()] = True
        return found

    def dense(self, key: str) -> Values:
        """The values of a key in all rows (count,), NaN where it is not logged."""
        values = np.full(self.count, np.nan)
        column = self.columns[key]
        values[column.rows()] = column.numbers()
        return values

    def part(self, rows: Flags) -> Table:
        """The table of some of the rows."""
        place = np.cumsum(rows) - 1
        made = Table(
            count=int(rows.sum()),
            texts=self.texts,
            notes=list(self.notes),
        )
        made.left_out = self.left_out.copy()
        made.runs = [run for run, kept in zip(self.runs, rows, strict=False) if kept]
        if rows[-1:].any():  # otherwise it ends before the log does
            made.announced = self.announced
            made.error = self.error
        for key, column in self.columns.items():
            positions = column.rows()
            values = column.numbers()
            kept = rows[positions]
            if kept.any():
                made.columns[key] = Column(
                    array("I", place[positions[kept]].tolist()), array("d", values[kept].tolist())
                )
        return made
