"""Parquet files of a trace: write one, and read selected columns and steps of it."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from functools import lru_cache, reduce
from operator import and_
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from sharpscope.traces.files import ASIDE, TRACES, publish
from sharpscope.traces.schema import READABLE_VERSIONS, TABLES, VERSION_KEY, arrow_schema

PART = re.compile(r"part-(\d{6,})(?:-[0-9a-f]{8})?\.parquet")
"""Name of a part; version 2 added a checksum."""
RUN = "run"
"""First column of the files of a packed data set."""
# Values repeat within a step, so dictionary encoding is smaller than byte stream split.
_REPEATING = {"advantage", "ratio", "weight"}
# Readers skip row groups in which these columns are all null.
_STATISTICS = {"step", RUN} | {c.name for table in TABLES.values() for c in table.columns if c.probe}
_FORMAT = ds.ParquetFileFormat(
    default_fragment_scan_options=ds.ParquetFragmentScanOptions(page_checksum_verification=True)
)


class DamagedPartError(ValueError):
    """The content of a part is damaged; the message gives the reason."""


def read_part(
    path: Path,
    table: str,
    columns: Sequence[str],
    steps: Collection[int] | None = None,
    required: Sequence[str] = (),
    run: str = "",
) -> pa.Table:
    """Read rows of a table's file. Other columns, and row groups without such rows, are not read from the disk.

    Args:
        path: of the file.
        table: name of its table.
        columns: columns to return, in this order. A column that the file lacks (an older schema) is null.
        steps: steps to return; None returns all.
        required: return only steps with rows in which all of these columns were recorded.
        run: name of a run in the file of a packed data set; "" in the file of one run.

    Raises:
        FileNotFoundError: there is no such file.
        DamagedPartError: the file has no footer or another schema version, or a page fails its checksum.
    """
    stat = path.stat()
    try:
        data = _opened(path, table, stat.st_mtime_ns, stat.st_size)
        conditions = [pc.field(RUN) == run] if run else []
        if steps is not None:
            conditions.append(pc.field("step").isin(list(steps)))
        if required:
            known = reduce(and_, [*conditions, *(pc.field(name).is_valid() for name in required)])
            found = data.to_table(["step"], filter=known, use_threads=False)["step"].unique().to_pylist()
            conditions.append(pc.field("step").isin(found))
        condition = reduce(and_, conditions) if conditions else None
        return data.to_table(list(columns), filter=condition, use_threads=False)
    except (pa.ArrowException, OSError, MemoryError) as error:
        raise DamagedPartError(f"its pages cannot be read ({_one_line(error)})") from error


@lru_cache(maxsize=4096)
def _opened(path: Path, table: str, _modified: int, _size: int) -> ds.Dataset:
    """A Parquet file with a valid footer."""
    try:
        stored = pq.read_schema(path)
    except (pa.ArrowException, OSError) as error:
        raise DamagedPartError(f"truncated, or not a Parquet file ({_one_line(error)})") from error
    version = (stored.metadata or {}).get(VERSION_KEY, b"?").decode()
    if version not in map(str, READABLE_VERSIONS):
        raise DamagedPartError(f"it has schema version {version}, this version reads {READABLE_VERSIONS}")
    return ds.dataset(path, pa.schema([pa.field(RUN, pa.string()), *arrow_schema(table)]), _FORMAT)


def parquet_options(schema: pa.Schema) -> dict[str, Any]:
    """Options of `ParquetWriter`: byte stream split for floats, dictionaries for the rest, statistics for pruning."""
    split = {f.name for f in schema if pa.types.is_floating(f.type) and f.name not in _REPEATING}
    return {
        "compression": "zstd",
        "compression_level": 3,
        "use_dictionary": [f.name for f in schema if f.name not in split],
        "column_encoding": dict.fromkeys(split, "BYTE_STREAM_SPLIT"),
        "write_statistics": [name for name in schema.names if name in _STATISTICS],
        "write_page_checksum": True,
    }


def write_part(table: pa.Table, path: Path, *, groups: bool = True) -> None:
    """Write rows to a temporary file, fsync it and rename it to `path`; one row group per step if `groups`."""
    temporary = path.with_name(f".{path.stem}{ASIDE}")
    try:
        with pq.ParquetWriter(temporary, table.schema, **parquet_options(table.schema)) as writer:
            if not groups:
                writer.write_table(table, row_group_size=max(1, len(table)))
            for step in pc.unique(table["step"]).sort().to_pylist() if groups else ():
                writer.write_table(table.filter(pc.equal(table["step"], step)))
        publish(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def rewind(run_dir: str | Path, step: int) -> dict[str, str]:
    """Remove every row after `step` from a run's traces, so that a resumed run does not record them twice.

    Hold the folder's RunLock. A part with rows before and after `step` is replaced; if its pages are damaged it is renamed
    to a name that readers skip. Parts with a damaged footer stay. It can be repeated after an interruption.

    Returns:
        Part that was set aside (relative to the run's folder) -> reason.
    """
    damaged = {}
    for temporary in Path(run_dir).glob(f"*{ASIDE}"):
        temporary.unlink(missing_ok=True)
    for name, table in TABLES.items():
        for path in sorted((Path(run_dir) / TRACES / name).glob("part-*.parquet")):
            try:
                steps = read_part(path, name, ["step"])["step"].to_numpy()
            except DamagedPartError:
                continue
            if (steps > step).all():
                path.unlink()
            elif (steps > step).any():
                try:
                    rows = read_part(path, name, table.names)
                    write_part(rows.filter(pc.less_equal(rows["step"], step)).cast(arrow_schema(name)), path)
                except DamagedPartError as error:
                    renamed = path.rename(path.with_name(f".damaged-{path.name}"))
                    damaged[renamed.relative_to(run_dir).as_posix()] = str(error)
    return damaged


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
