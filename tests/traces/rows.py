"""Hand-made rows of every table for the tests of this folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from sharpscope.traces import TABLES, TraceWriter, create_run_dir, create_run_info

INFO: dict[str, Any] = {"method": "grpo", "task": "knights_knaves", "seed": 0, "config": {"seed": 0, "steps": 3}}


def new_run(path, **info):
    folder = create_run_dir(path)
    create_run_info(folder, INFO | info)
    return folder


def rows(table: str, step: int, count: int = 4, seed: int = 0) -> dict[str, Any]:
    """`count` valid rows with every column filled, in a dict as TraceWriter.append takes it."""
    rng = np.random.default_rng([seed, step])
    columns: dict[str, Any] = {}
    for column in TABLES[table].columns:
        if column.type == "bool":
            columns[column.name] = rng.random(count) < 0.5
        elif column.type.startswith("int"):
            columns[column.name] = rng.integers(-1, 2, count)
        elif column.name == "inclusion_probability":
            columns[column.name] = np.ones(count, dtype=np.float32)
        elif column.type.startswith("float"):
            columns[column.name] = rng.normal(size=count).astype(column.type)
        elif column.type == "json":
            columns[column.name] = [{"format": 1.0, "answer": float(i)} for i in range(count)]
        else:
            columns[column.name] = [f"{column.name} {i}" for i in range(count)]
    return columns | {"step": step}


def token_rows(step=1, count=4, **changes):
    return rows("tokens", step, count) | changes


def two_parts(path):
    run = new_run(path)
    writer = TraceWriter(run)
    for step in (1, 2):
        writer.append("tokens", rows("tokens", step, 20))
        writer.flush()
    return run, sorted((run / "traces/tokens").iterdir())


def damage_part(part: Path, column: str, group: int = -1) -> None:
    """Flip one bit in the last page of a column of a row group, so that only readers of that column notice."""
    metadata = pq.read_metadata(part)
    place = metadata.row_group(group % metadata.num_row_groups).column(metadata.schema.names.index(column))
    start = place.dictionary_page_offset if place.has_dictionary_page else place.data_page_offset
    content = bytearray(part.read_bytes())
    content[start + place.total_compressed_size - 1] ^= 1
    part.write_bytes(content)
