"""Write rows to Parquet parts. A crash loses at most the rows appended since the last flush."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from sharpscope.errors import nearest
from sharpscope.traces.files import ASIDE, TRACES, publish, sync_folder
from sharpscope.traces.parts import PART, footer_checksum, names
from sharpscope.traces.schema import ARROW_TYPES, TABLES, Column, arrow_schema

_FLUSH_ORDER = ("tokens", "uses", "rollouts", "probes", "probe_prompts", "eval", "events", "forks", "updates", "steps")
# Values repeat within a step, so dictionary encoding is smaller than byte stream split.
_REPEATING = {"advantage", "ratio", "weight"}
# Readers skip row groups in which these columns are all null.
_PROBED = {column.name for table in TABLES.values() for column in table.columns if column.probe}


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
            numbers = [int(match[1]) for match in map(PART.fullmatch, names(folder)) if match]
            self._next[name] = max(numbers, default=-1) + 1
        sync_folder(self.folder)

    def append(self, table: str, columns: Mapping[str, Any]) -> int:
        """Buffer rows and return their number.

        Args:
            table: name of a table.
            columns: column name -> 1-D values (array, tensor, list), or a scalar for all rows; scalars alone make one row.
                None and masked entries become null (not recorded); NaN stays NaN (recorded, not a number). A nullable
                column may be None as a whole. Columns of probes may be omitted.

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
        for name in _FLUSH_ORDER:
            if self._buffers[name]:
                rows = pa.concat_tables(self._buffers[name])
                written.append(write_part(rows, self.folder / name, self._next[name], groups=self._groups))
                self._next[name] += 1
                self._buffers[name].clear()
        return written

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.flush()


def write_part(table: pa.Table, folder: Path, number: int, *, groups: bool = True) -> Path:
    """Write one part to a temporary file, fsync it and rename it to part-<number>-<CRC-32 of the footer>.parquet.

    Args:
        table: rows with a column `step`.
        folder: folder of the table.
        number: number of the part.
        groups: write one row group per step instead of one in total.
    """
    temporary = folder / f".part-{number:06d}{ASIDE}"
    try:
        with pq.ParquetWriter(temporary, table.schema, **parquet_encoding(table.schema)) as writer:
            if not groups:
                writer.write_table(table, row_group_size=max(1, len(table)))
            for step in pc.unique(table["step"]).sort().to_pylist() if groups else ():
                writer.write_table(table.filter(pc.equal(table["step"], step)))
        final = folder / f"part-{number:06d}-{footer_checksum(temporary):08x}.parquet"
        publish(temporary, final)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return final


def parquet_encoding(schema: pa.Schema) -> dict[str, Any]:
    """Options of `ParquetWriter`: byte stream split for floats, dictionaries for the rest, statistics for pruning."""
    split = {f.name for f in schema if pa.types.is_floating(f.type) and f.name not in _REPEATING}
    return {
        "compression": "zstd",
        "compression_level": 3,
        "use_dictionary": [f.name for f in schema if f.name not in split],
        "column_encoding": dict.fromkeys(split, "BYTE_STREAM_SPLIT"),
        "write_statistics": [name for name in schema.names if name == "step" or name in _PROBED],
        "write_page_checksum": True,
    }


def _to_arrow(name: str, columns: Mapping[str, Any]) -> pa.Table:
    """Convert the columns given to `TraceWriter.append` to Arrow and check them against the schema."""
    table = TABLES[name]
    unknown = [column for column in columns if column not in table.names]
    if unknown:
        raise SchemaError(f"{name}.{unknown[0]} is not a column{nearest(unknown[0], table.names)}")
    missing = [column.name for column in table.columns if column.name not in columns and not column.probe]
    if missing:
        raise SchemaError(f"{name}: missing {', '.join(missing)} (a nullable column may be None)")
    values = {column: _to_numpy(value) for column, value in columns.items()}
    lengths = {column: len(value) for column, value in values.items() if _is_sequence(value)}
    if len(set(lengths.values())) > 1:
        raise SchemaError(f"{name}: columns differ in length: {lengths}")
    rows = next(iter(lengths.values()), 1)
    arrays = [_array(f"{name}.{column.name}", column, values.get(column.name), rows) for column in table.columns]
    return pa.Table.from_arrays(arrays, schema=arrow_schema(name))


def _to_numpy(value: Any) -> Any:
    """Convert a torch tensor to NumPy without importing torch; return other values unchanged."""
    if hasattr(value, "detach"):
        tensor = value.detach().cpu()
        return (tensor.float() if str(tensor.dtype) == "torch.bfloat16" else tensor).numpy()
    return value


def _is_sequence(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return value.ndim > 0
    return hasattr(value, "__len__") and not isinstance(value, str | bytes | Mapping)


def _array(label: str, column: Column, value: Any, rows: int) -> pa.Array:
    arrow_type = ARROW_TYPES[column.type]
    if value is None:
        if not column.nullable and rows:
            raise SchemaError(f"{label} may not be null")
        return pa.nulls(rows, arrow_type)
    if not _is_sequence(value):
        value = [value.item() if isinstance(value, np.generic | np.ndarray) else value] * rows
    if column.type in ("string", "json"):
        array = pa.array([_text(label, column.type, item) for item in value], arrow_type)
    else:
        array = _numbers(label, column, value, arrow_type)
    if array.null_count and not column.nullable:
        raise SchemaError(f"{label} may not be null, but {array.null_count} of {rows} rows are")
    return array


def _numbers(label: str, column: Column, value: Any, arrow_type: pa.DataType) -> pa.Array:
    dtype = np.dtype(arrow_type.to_pandas_dtype())
    mask = np.ma.getmaskarray(value) if isinstance(value, np.ma.MaskedArray) else None
    data = value.data if isinstance(value, np.ma.MaskedArray) else value
    if not isinstance(data, np.ndarray):
        items = [item.item() if hasattr(item, "item") else item for item in data]
        mask = np.array([item is None for item in items], dtype=bool)
        # Masked entries get a valid value, so that None does not determine the dtype.
        filler = next((item for item in items if item is not None), dtype.type(0))
        data = np.array([filler if item is None else item for item in items]) if items else np.empty(0, dtype)
    if data.ndim != 1:
        raise SchemaError(f"{label} has shape {data.shape}; give one value per row")
    if data.dtype.kind not in {"b": "b", "i": "iu", "f": "fiu"}[dtype.kind]:
        raise SchemaError(f"{label} is {column.type}, got {data.dtype}")
    if column.type.startswith("int") and data.size:
        bounds = np.iinfo(dtype)
        if data.min() < bounds.min or data.max() > bounds.max:
            raise SchemaError(f"{label} is {column.type}, got values from {data.min()} to {data.max()}")
    with np.errstate(over="ignore"):  # values beyond float32 become infinite
        return pa.array(data.astype(dtype), arrow_type, mask=mask)


def _text(label: str, type_: str, item: Any) -> str | None:
    if item is None:
        return None
    if type_ == "json" and isinstance(item, Mapping):
        numbers = {str(key): float(number) for key, number in item.items()}
        item = json.dumps({k: v if math.isfinite(v) else None for k, v in numbers.items()}, ensure_ascii=False)
    if not isinstance(item, str):
        raise SchemaError(f"{label} is {type_}, got {type(item).__name__}")
    # A lone surrogate (from "\ud800" in a JSON file) cannot be encoded in UTF-8.
    return item.encode("utf-8", "replace").decode("utf-8")
