"""Write rows to Parquet parts. A crash loses at most the rows appended since the last flush."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from sharpscope.errors import nearest
from sharpscope.traces.files import ASIDE, TRACES
from sharpscope.traces.parts import PART, write_part
from sharpscope.traces.schema import ARROW_TYPES, TABLES, Column, arrow_schema


class SchemaError(ValueError):
    """Rows do not match the schema: an error in the calling code."""


class TraceWriter:
    """Append rows to the traces of one run; `flush` makes them durable.

    Hold the folder's RunLock while writing. Part numbers continue after existing parts, intact or damaged, and nothing is
    overwritten. As a context manager it flushes on exit, also after an exception.

    Args:
        run_dir: folder of the run; `traces/` is created if missing.
        groups: write one row group per step, so that a reader can read one step alone; False makes smaller files.
    """

    def __init__(self, run_dir: str | Path, *, groups: bool = True) -> None:
        self.folder = Path(run_dir) / TRACES
        self._groups = groups
        self._buffers: dict[str, list[pa.Table]] = {name: [] for name in TABLES}
        self._next: dict[str, int] = {}
        for name in TABLES:
            folder = self.folder / name
            folder.mkdir(parents=True, exist_ok=True)
            for temporary in folder.glob(f".part-*{ASIDE}"):
                temporary.unlink(missing_ok=True)
            numbers = [int(match[1]) for path in folder.iterdir() if (match := PART.search(path.name))]
            self._next[name] = max(numbers, default=-1) + 1

    def append(self, table: str, columns: Mapping[str, Any]) -> int:
        """Buffer rows and return their number.

        Args:
            table: name of a table.
            columns: column name -> 1-D values (array, tensor, list), or a scalar for all rows; scalars alone make one row.
                None and masked entries become null (not recorded); NaN stays NaN (recorded, not a number). A nullable
                column may be None as a whole, or omitted.

        Raises:
            SchemaError: unknown or missing column, different lengths, more than one dimension, wrong type or forbidden null.
                None of the rows is buffered.
        """
        if table not in TABLES:
            raise SchemaError(f"{table} is not a table{nearest(table, TABLES)}")
        rows = _to_arrow(table, columns)
        if rows.num_rows:
            self._buffers[table].append(rows)
        return int(rows.num_rows)

    def append_table(self, table: str, rows: pa.Table) -> int:
        """Buffer rows as returned by `Run.arrow`, with null and NaN unchanged, and return their number.

        Raises:
            SchemaError: `rows` has another schema.
        """
        if table not in TABLES or rows.schema.names != TABLES[table].names:
            raise SchemaError(f"{table}: not a trace table with all its columns")
        if rows.num_rows:
            self._buffers[table].append(rows.cast(arrow_schema(table)))
        return int(rows.num_rows)

    def flush(self) -> list[Path]:
        """Write the buffered rows, one part per table.

        `steps` comes last: every step in `steps` has its rows in the other tables.

        Raises:
            OSError: the disk is full or the folder is read-only. Unwritten rows stay buffered for a later flush.
        """
        written = []
        for name in sorted(TABLES, key="steps".__eq__):
            if self._buffers[name]:
                path = self.folder / name / f"part-{self._next[name]:06d}.parquet"
                write_part(pa.concat_tables(self._buffers[name]), path, groups=self._groups)
                written.append(path)
                self._next[name] += 1
                self._buffers[name].clear()
        return written

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self.flush()


def _to_arrow(name: str, columns: Mapping[str, Any]) -> pa.Table:
    """Convert the columns given to `TraceWriter.append` to Arrow and check them against the schema."""
    table = TABLES[name]
    unknown = [column for column in columns if column not in table.names]
    if unknown:
        raise SchemaError(f"{name}.{unknown[0]} is not a column{nearest(unknown[0], table.names)}")
    missing = [column.name for column in table.columns if column.name not in columns and not column.nullable]
    if missing:
        raise SchemaError(f"{name}: missing {', '.join(missing)}")
    values = {column: _to_numpy(value) for column, value in columns.items()}
    lengths = {column: len(value) for column, value in values.items() if isinstance(value, list) or np.ndim(value)}
    if len(set(lengths.values())) > 1:
        raise SchemaError(f"{name}: columns differ in length: {lengths}")
    rows = next(iter(lengths.values()), 1)
    arrays = []
    for column in table.columns:
        value, label = values.get(column.name), f"{name}.{column.name}"
        if value is None:
            array = pa.nulls(rows, arrow_schema(name).field(column.name).type)
        else:
            value = value if column.name in lengths else np.full(rows, value)
            array = (_texts if column.type in ("string", "json") else _numbers)(label, column, value)
        if array.null_count and not column.nullable:
            raise SchemaError(f"{label} may not be null, but {array.null_count} of {rows} rows are")
        arrays.append(array)
    return pa.Table.from_arrays(arrays, schema=arrow_schema(name))


def _to_numpy(value: Any) -> Any:
    """Convert a torch tensor to NumPy without importing torch; return other values unchanged."""
    if hasattr(value, "detach"):
        tensor = value.detach().cpu()
        return (tensor.float() if str(tensor.dtype) == "torch.bfloat16" else tensor).numpy()
    return value


def _numbers(label: str, column: Column, value: Any) -> pa.Array:
    """An array of numbers or booleans; None and masked entries are null."""
    dtype = np.dtype(ARROW_TYPES[column.type].to_pandas_dtype())
    mask, data = np.ma.getmaskarray(value) if isinstance(value, np.ma.MaskedArray) else None, np.ma.getdata(value)
    if not isinstance(value, np.ndarray) or data.dtype == object:
        items = [item.item() if hasattr(item, "item") else item for item in value]
        mask = np.array([item is None for item in items], dtype=bool)
        # Masked entries get a valid value, so that None does not determine the dtype.
        filler = next((item for item in items if item is not None), dtype.type(0))
        data = np.array([filler if item is None else item for item in items]) if items else np.empty(0, dtype)
    if data.ndim != 1:
        raise SchemaError(f"{label} has shape {data.shape}; give one value per row")
    if data.dtype.kind not in {"b": "b", "i": "iu", "f": "fiu"}[dtype.kind]:
        raise SchemaError(f"{label} is {column.type}, got {data.dtype}")
    if dtype.kind == "i" and data.size and not np.can_cast(data.dtype, dtype):
        bounds = np.iinfo(dtype)
        if data.min() < bounds.min or data.max() > bounds.max:
            raise SchemaError(f"{label} is {column.type}, got values from {data.min()} to {data.max()}")
    with np.errstate(over="ignore"):  # values beyond float32 become infinite
        return pa.array(data.astype(dtype), ARROW_TYPES[column.type], mask=mask)


def _texts(label: str, column: Column, value: Any) -> pa.Array:
    """An array of strings; a mapping in a column of JSON becomes an object of numbers, null where not finite."""
    items = [_json(item) if column.type == "json" and isinstance(item, Mapping) else item for item in value]
    wrong = next((item for item in items if not isinstance(item, str | None)), None)
    if wrong is not None:
        raise SchemaError(f"{label} is {column.type}, got {type(wrong).__name__}")
    # A lone surrogate (from "\ud800" in a JSON file) cannot be encoded in UTF-8.
    return pa.array([item and item.encode("utf-8", "replace").decode("utf-8") for item in items], pa.string())


def _json(numbers: Mapping[str, float]) -> str:
    known = {str(key): float(number) for key, number in numbers.items()}
    return json.dumps({k: v if math.isfinite(v) else None for k, v in known.items()}, ensure_ascii=False)
