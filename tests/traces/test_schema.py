"""The schema's text and field metadata."""

from __future__ import annotations

import pyarrow.parquet as pq

from sharpscope.traces import (
    SCHEMA_VERSION,
    TABLES,
    TraceWriter,
    schema_markdown,
    timing_columns,
)
from tests.traces.rows import new_run, rows


def test_metadata_of_every_field_holds_unit_and_definition(tmp_path):
    run = new_run(tmp_path / "a")
    with TraceWriter(run) as writer:
        for table in TABLES:
            writer.append(table, rows(table, 1))
    for table in TABLES.values():
        (path,) = (run / "traces" / table.name).glob("part-*.parquet")
        schema = pq.read_schema(path)
        assert schema.metadata[b"sharpscope.schema_version"] == str(SCHEMA_VERSION).encode()
        for column in table.columns:
            metadata = schema.field(column.name).metadata
            assert metadata == {b"unit": column.unit.encode(), b"definition": column.definition.encode()}
            assert schema.field(column.name).nullable == column.nullable


def test_schema_text_has_every_column():
    text = schema_markdown()
    sections = {part.split("\n", 1)[0]: part for part in text.split("\n## ")[1:]}
    assert set(TABLES) <= set(sections) and "forks" in TABLES
    for table in TABLES.values():
        for column in table.columns:
            assert f"| {column.name} | {column.type} | " in sections[table.name]
            assert column.unit and column.definition
    assert "## eval" not in schema_markdown(["steps"])
    assert timing_columns("steps") == ["generation_s", "training_s", "recording_s"]
