"""The schema of a trace: version, Arrow schemas that carry units and definitions, and its rendering as text.

The tables themselves are data in `columns`.
"""

from __future__ import annotations

from functools import cache

import pyarrow as pa

from sharpscope.traces.columns import EVAL, EVENTS, PROBES, ROLLOUTS, STEPS, TOKENS, Column, Table

SCHEMA_VERSION = 1
"""Raised whenever a column is renamed, changes its meaning or goes; readers refuse other versions."""

TABLES: dict[str, Table] = {table.name: table for table in (STEPS, ROLLOUTS, TOKENS, PROBES, EVAL, EVENTS)}

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
}
"""Column.type -> storage. "json" is a string that holds one JSON object."""


@cache
def arrow_schema(table: str) -> pa.Schema:
    """Arrow schema of a table; unit and definition stand in each field's metadata, the version in the schema's."""
    return pa.schema([_field(column) for column in TABLES[table].columns], metadata={VERSION_KEY: str(SCHEMA_VERSION)})


def _field(column: Column) -> pa.Field:
    metadata = {"unit": column.unit, "definition": column.definition}
    return pa.field(column.name, ARROW_TYPES[column.type], nullable=column.nullable, metadata=metadata)


def timing_columns(table: str) -> list[str]:
    """Columns that differ between two runs of one config on one machine."""
    return [column.name for column in TABLES[table].columns if column.timing]


def _kind(column: Column) -> str:
    if column.probe:
        return "with a probe"
    return "or null" if column.nullable else ""


def schema_rows(table: str) -> list[tuple[str, str, str, str, str]]:
    """(name, type, unit, when recorded, definition) of every column of `table`, for any renderer."""
    return [(c.name, c.type, c.unit, _kind(c), c.definition) for c in TABLES[table].columns]


def schema_markdown(tables: list[str] | None = None) -> str:
    """The schema as Markdown, one section a table; `tables` chooses some (KeyError for an unknown name)."""
    lines = [
        f"# Trace schema, version {SCHEMA_VERSION}",
        "",
        "`runs/<name>/traces/<table>/part-*.parquet`. 'or null': the value may be missing; 'with a probe': null",
        "unless a probe or an option records it. Columns in seconds differ between two runs of one config.",
    ]  # fmt: skip
    for name in tables or TABLES:
        table = TABLES[name]
        lines += ["", f"## {name}", "", f"A row is {table.row}, named by {', '.join(table.key)}.", ""]
        lines += ["| column | type | unit | recorded | definition |", "|---|---|---|---|---|"]
        lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in schema_rows(name)]
    return "\n".join(lines) + "\n"
