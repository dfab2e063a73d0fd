"""Parquet files of a trace: write one, and read selected columns and steps of it."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
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


class DamagedPartError(ValueError):
    """The content of a part is damaged; the message gives the reason."""


def read_part(
    path: Path,
    columns: Sequence[str],
    steps: Collection[int] | None = None,
    required: Sequence[str] = (),
    run: str = "",
) -> pa.Table:
    """Read rows of a table's file. Other columns, and row groups without such rows, are not read from the disk.

    Args:
        path: of the file.
        columns: columns to return, in this order; none without a row. A column that the file lacks (an older schema) is null.
        steps: steps to return; None returns all.
        required: skip row groups in which one of these columns is all null.
        run: name of a run in the file of a packed data set; "" in the file of one run.

    Raises:
        FileNotFoundError: there is no such file.
        DamagedPartError: the file has no footer or another schema version, or a page fails its checksum.
    """
    stat = path.stat()
    metadata, groups = _footer(str(path), stat.st_mtime_ns, stat.st_size)
    chosen = [
        index
        for index, runs, first, last in groups
        if runs[0] <= run <= runs[1]
        and (steps is None or any(first <= step <= last for step in steps))
        and not any(_all_null(metadata, index, name) for name in required)
    ]
    if not chosen:
        return pa.table({})
    stored = metadata.schema.names
    try:
        with pq.ParquetFile(path, metadata=metadata, page_checksum_verification=True) as file:
            loaded = dict.fromkeys([*(name for name in columns if name in stored), "step", *([RUN] if run else [])])
            table = file.read_row_groups(chosen, columns=list(loaded), use_threads=False)
    except (pa.ArrowException, OSError, MemoryError) as error:
        raise DamagedPartError(f"its pages cannot be read ({_one_line(error)})") from error
    if run:
        table = table.filter(pc.equal(table[RUN], run))
    if steps is not None:
        table = table.filter(pc.is_in(table["step"], pa.array(list(steps), pa.int32())))
    for name in columns:
        if name not in stored:
            table = table.append_column(name, pa.nulls(table.num_rows))
    return table.select(list(columns))


def row_groups(path: Path, run: str = "") -> list[tuple[int, int, int]]:
    """First step, last step and number of rows of a run in a file's row groups, from its footer; raises as `read_part`.

    Of a row group with several runs the rows are counted.
    """
    stat = path.stat()
    metadata, groups = _footer(str(path), stat.st_mtime_ns, stat.st_size)
    found = [group for group in groups if group[1][0] <= run <= group[1][1]]
    if all(low == high for _, (low, high), *_ in found):
        return [(first, last, metadata.row_group(at).num_rows) for at, _, first, last in found]
    steps = read_part(path, ["step"], run=run)
    return [(*pc.min_max(steps["step"]).as_py().values(), len(steps))] if len(steps) else []


def _all_null(metadata: pq.FileMetaData, group: int, column: str) -> bool:
    if column not in metadata.schema.names:
        return True
    part = metadata.row_group(group)
    known = part.column(metadata.schema.names.index(column)).statistics
    return known is not None and known.has_null_count and known.null_count == part.num_rows


@lru_cache(maxsize=65536)
def _footer(
    path: str, _modified: int, _size: int
) -> tuple[pq.FileMetaData, list[tuple[int, tuple[str, str], int, int]]]:
    """A file's metadata, and index, first and last run by name, first and last step of its row groups."""
    try:
        metadata = pq.read_metadata(path)
    except (pa.ArrowException, OSError) as error:
        raise DamagedPartError(f"truncated, or not a Parquet file ({_one_line(error)})") from error
    version = (metadata.metadata or {}).get(VERSION_KEY, b"?").decode()
    if version not in map(str, READABLE_VERSIONS):
        raise DamagedPartError(f"it has schema version {version}, this version reads {READABLE_VERSIONS}")
    names, groups = metadata.schema.names, []
    for index in range(metadata.num_row_groups):
        group = metadata.row_group(index)
        runs = group.column(names.index(RUN)).statistics if RUN in names else None
        steps = group.column(names.index("step")).statistics
        groups.append((index, ("", "") if runs is None else (runs.min, runs.max), steps.min, steps.max))
    return metadata, groups


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
                steps = read_part(path, ["step"])["step"].to_numpy()
            except DamagedPartError:
                continue
            if (steps > step).all():
                path.unlink()
            elif (steps > step).any():
                try:
                    rows = read_part(path, table.names)
                    write_part(rows.filter(pc.less_equal(rows["step"], step)).cast(arrow_schema(name)), path)
                except DamagedPartError as error:
                    renamed = path.rename(path.with_name(f".damaged-{path.name}"))
                    damaged[renamed.relative_to(run_dir).as_posix()] = str(error)
    return damaged


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
