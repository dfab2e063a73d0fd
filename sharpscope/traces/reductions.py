"""Results computed from token tables that were deleted afterwards, by name and step, in one file of the run folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sharpscope.errors import UserError
from sharpscope.traces.files import write_atomic

REDUCTIONS_FILE = "reductions.parquet"
_ARRAY = "array"
REDUCTIONS_SCHEMA = pa.schema(
    [("name", pa.string()), ("step", pa.int32()), ("tokens", pa.int64()), ("values", pa.string())]
)


@dataclass(frozen=True)
class Reduction:
    """One result of a reduction.

    Attributes:
        name: name of the reduction.
        step: step that it covers; -1 for the whole run.
        tokens: number of token rows it was computed from.
        values: its result.
    """

    name: str
    step: int
    tokens: int
    values: Any


def write_reductions(run_dir: str | Path, rows: Sequence[Reduction]) -> Path:
    """Write the file atomically. Values are stored as JSON; arrays are float64 and round-trip exactly."""
    sink = pa.BufferOutputStream()
    pq.write_table(reductions_table(rows), sink, compression="zstd", compression_level=19)
    path = Path(run_dir) / REDUCTIONS_FILE
    write_atomic(path, sink.getvalue().to_pybytes())
    return path


def reductions_table(rows: Sequence[Reduction]) -> pa.Table:
    """Convert reductions to Arrow, with values as JSON text."""
    columns = {
        "name": [row.name for row in rows],
        "step": [row.step for row in rows],
        "tokens": [row.tokens for row in rows],
        "values": [json.dumps(row.values, default=_to_json, separators=(",", ":")) for row in rows],
    }
    return pa.table(columns, schema=REDUCTIONS_SCHEMA)


def read_reductions(run_dir: str | Path) -> list[Reduction] | None:
    """Read a run's reductions in the order written; None if the run has no such file.

    Raises:
        UserError: the file cannot be read.
    """
    path = Path(run_dir) / REDUCTIONS_FILE
    if not path.exists():
        return None
    try:
        table = pq.read_table(path, schema=REDUCTIONS_SCHEMA)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({error}); reduce the run's traces again") from error
    return reductions_of(table, path)


def reductions_of(table: pa.Table, path: Path) -> list[Reduction]:
    """Convert rows that were read from `path` to reductions.

    Raises:
        UserError: a value is not valid JSON.
    """
    try:
        return [
            Reduction(r["name"], r["step"], r["tokens"], json.loads(r["values"], object_hook=_from_json))
            for r in table.to_pylist()
        ]
    except (ValueError, TypeError) as error:
        raise UserError(f"{path}: cannot be read ({error}); reduce the run's traces again") from error


def _to_json(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return {_ARRAY: value.astype(np.float64).tolist()}
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} cannot be stored in {REDUCTIONS_FILE}")


def _from_json(value: dict[str, Any]) -> Any:
    return np.array(value[_ARRAY], dtype=np.float64) if set(value) == {_ARRAY} else value
