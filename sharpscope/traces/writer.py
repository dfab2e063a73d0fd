"""Rows to Parquet parts that appear whole: a crash loses at most what was appended since the last flush."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from sharpscope.errors import nearest
from sharpscope.traces.files import ASIDE, TRACES, publish, sync_folder
from sharpscope.traces.parts import PART, footer_checksum, names
from sharpscope.traces.schema import TABLES, arrow_schema
from sharpscope.traces.values import SchemaError, to_table

_FLUSH_ORDER = ("tokens", "rollouts", "probes", "eval", "events", "steps")
# these repeat within a step, so a dictionary is smaller than their bytes split into streams
_REPEATING = {"advantage", "ratio", "weight"}
# readers skip row groups in which these are all null
_PROBED = {column.name for table in TABLES.values() for column in table.columns if column.probe}


def write_part(table: pa.Table, folder: Path, number: int, *, groups: bool = True) -> Path:
    """Write one part whole: aside, checksums, fsync, rename, fsync of the folder. One row group a step, or one in all.

    The name carries the footer's checksum: part-<number>-<crc32>.parquet.
    """
    aside = folder / f".part-{number:06d}{ASIDE}"
    try:
        with pq.ParquetWriter(aside, table.schema, **parquet_encoding(table.schema)) as writer:
            if not groups:
                writer.write_table(table, row_group_size=max(1, len(table)))
            for step in pc.unique(table["step"]).sort().to_pylist() if groups else ():
                writer.write_table(table.filter(pc.equal(table["step"], step)))
        final = folder / f"part-{number:06d}-{footer_checksum(aside):08x}.parquet"
        publish(aside, final)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    return final


def parquet_encoding(schema: pa.Schema) -> dict[str, Any]:
    """Float columns as byte streams, the rest as dictionaries; statistics only where readers prune by them."""
    split = {f.name for f in schema if pa.types.is_floating(f.type) and f.name not in _REPEATING}
    return {
        "compression": "zstd",
        "compression_level": 3,
        "use_dictionary": [f.name for f in schema if f.name not in split],
        "column_encoding": dict.fromkeys(split, "BYTE_STREAM_SPLIT"),
        "write_statistics": [name for name in schema.names if name == "step" or name in _PROBED],
        "write_page_checksum": True,
    }


class TraceWriter:
    """Appends rows to the traces of one run; `flush` makes them durable.

    Hold the folder's RunLock while writing. Numbering goes on after the parts that are there, whole or damaged, and
    nothing is overwritten. As a context manager it flushes at the end, also after an exception.

    Args:
        run_dir: folder of the run; `traces/` is made in it when missing.
        groups: one row group a step, so that a reader finds a step without reading others; False makes small files.
    """

    def __init__(self, run_dir: str | Path, *, groups: bool = True) -> None:
        self.folder = Path(run_dir) / TRACES
        self._groups = groups
        self._buffers: dict[str, list[pa.Table]] = {name: [] for name in TABLES}
        self._next: dict[str, int] = {}
        for name in TABLES:
            folder = self.folder / name
            folder.mkdir(parents=True, exist_ok=True)
            for left_over in folder.glob(f".part-*{ASIDE}"):
                left_over.unlink(missing_ok=True)
            numbers = [int(match[1]) for match in map(PART.fullmatch, names(folder)) if match]
            self._next[name] = max(numbers, default=-1) + 1
        sync_folder(self.folder)

    def append(self, table: str, columns: Mapping[str, Any]) -> int:
        """Buffer rows: name -> 1-D values (array, tensor, list), or a scalar for all rows; returns how many.

        None and masked entries are null ("not recorded"), NaN stays NaN. Columns of probes may be left out.

        Raises:
            SchemaError: for rows that do not fit; nothing of them is kept.
        """
        if table not in TABLES:
            raise SchemaError(f"{table} is no table{nearest(table, TABLES)}")
        rows = to_table(TABLES[table], columns)
        if rows.num_rows:
            self._buffers[table].append(rows)
        return int(rows.num_rows)

    def append_table(self, table: str, rows: pa.Table) -> int:
        """Buffer rows as `Run.arrow` gives them, so that null and NaN stay what they were; returns how many.

        Raises:
            SchemaError: for a table of another schema.
        """
        if table not in TABLES or rows.schema.names != TABLES[table].names:
            raise SchemaError(f"{table}: not a table of a trace with all its columns")
        if rows.num_rows:
            self._buffers[table].append(rows.cast(arrow_schema(table)))
        return int(rows.num_rows)

    def flush(self) -> list[Path]:
        """Write what is buffered, one part a table, `steps` last: a step in `steps` has all its other rows.

        Raises:
            OSError: if the disk is full or the folder read-only; rows not yet in a part stay buffered, so that a later
                flush can write them.
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
