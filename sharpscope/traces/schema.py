"""The schema of a trace: tables, columns with type, unit and definition, and the Arrow schemas made from them.

They are in schema.yaml, which the writer, the reader, `sharpscope config columns` and the Parquet field metadata use. "Mean over
tokens" is over all loss tokens of the step. Probabilities are softmax(z / T) at the sampling temperature T, before top-p and
top-k. "L2 norm" is over the trainable parameters.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cache

import pyarrow as pa

from sharpscope.packaged import package_yaml

SCHEMA_VERSION = 5
"""Increases when tables or columns are added, renamed, removed or change their meaning.

- 2: sharpscope 0.2.
- 3: sharpscope 0.3. New columns (`probes.ceiling` and others) and the tables `uses` and `reductions`; null or empty in
  runs of version 2. Columns that nothing read are gone: those of version 2 are ignored.
- 4: sharpscope 0.4. New columns (`tokens.effect_kl` and others, `updates.batch_share`); null in runs of version 3.
- 5: New column `tokens.policy_version`; null in runs of version 4.
"""

READABLE_VERSIONS = (2, 3, 4, 5)
"""Versions that readers accept."""

MAX_SATURATION = 0.3
"""Largest `probes.saturation` at which a perturbation estimate still measures sharpness; larger ones enter no verdict."""

VERSION_KEY = b"sharpscope.schema_version"

ARROW_TYPES: dict[str, pa.DataType] = {
    "bool": pa.bool_(),
    "int8": pa.int8(),
    "int32": pa.int32(),
    "int64": pa.int64(),
    "float32": pa.float32(),
    "float64": pa.float64(),
    "string": pa.string(),
    "json": pa.string(),
    "ids": pa.string(),
}
"""Storage type of each `Column.type`. "json" is a string that holds one JSON object of numbers, "ids" one JSON list of token IDs."""


@dataclass(frozen=True)
class Column:
    """A column of a table."""

    name: str
    type: str  # a key of `ARROW_TYPES`
    unit: str  # "1" if dimensionless
    definition: str
    nullable: bool = False  # may be null (not recorded, or undefined in that row); the writer fills an omitted column
    probe: bool = False  # recorded only if a probe or an option asks for it
    timing: bool = False  # values differ between two runs of one config
    # the smallest and the largest value; NaN is always allowed
    low: float = -math.inf
    high: float = math.inf


@dataclass(frozen=True)
class Table:
    """A table: what one row is, the columns that identify a row (`key`), and all columns in file order."""

    name: str
    row: str
    key: tuple[str, ...]
    columns: tuple[Column, ...]

    @property
    def names(self) -> list[str]:
        """Column names in file order."""
        return [column.name for column in self.columns]

    def __getitem__(self, name: str) -> Column:
        return next(column for column in self.columns if column.name == name)


_COLUMN = re.compile(r"(\w+)([!?~]?) (\w+)(?: (\S*)\.\.(\S*))?(?: \[(.+?)\])?: (.+)")


def _table(name: str, row: str, key: str, columns: str) -> Table:
    """A table from its entry in schema.yaml, which says how a column is written."""
    made = []
    for line in columns.replace("\n    ", " ").strip().splitlines():
        match = _COLUMN.fullmatch(line)
        assert match is not None, line
        column, flag, type_, low, high, unit, definition = match.groups()
        how = flag != "!", flag == "?", flag == "~"
        ends = float(low or -math.inf), float(high or math.inf)
        made.append(Column(column, type_, unit or "1", definition, *how, *ends))
    return Table(name, row, tuple(key.split()), tuple(made))


Row = dict[str, object]
"""Column of a table -> its value in a row, or its values in several."""

_ENTRIES = package_yaml("sharpscope.traces", "schema.yaml")
TABLES: dict[str, Table] = {name: _table(name, **entry) for name, entry in _ENTRIES.items()}


@cache
def arrow_schema(table: str) -> pa.Schema:
    """Arrow schema of a table, with unit and definition in each field's metadata and the version in the schema's."""
    fields = [
        pa.field(
            c.name,
            ARROW_TYPES[c.type],
            c.nullable,
            metadata={"unit": c.unit, "definition": c.definition},
        )
        for c in TABLES[table].columns
    ]
    return pa.schema(fields, metadata={VERSION_KEY: str(SCHEMA_VERSION)})


def timing_columns(table: str) -> list[str]:
    """Columns that differ between two runs of one config on one machine."""
    return [column.name for column in TABLES[table].columns if column.timing]
