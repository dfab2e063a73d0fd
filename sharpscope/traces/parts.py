"""Parquet files of a trace: write one, check it, list its steps, and read selected columns and steps."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from sharpscope.traces.files import ASIDE, TRACES, publish
from sharpscope.traces.schema import READABLE_VERSIONS, TABLES, VERSION_KEY, arrow_schema

PART = re.compile(r"part-(\d{6,})(?:-[0-9a-f]{8})?\.parquet")
"""Name of a part; version 2 added a checksum."""
DAMAGED = "damaged-"
"""Prefix of the file name of a part that a resume set aside as damaged."""
RUN = "run"
"""First column of the files of a packed data set."""
# Values repeat within a step, so dictionary encoding is smaller than byte stream split.
_REPEATING = {"advantage", "ratio", "weight"}
# Readers skip row groups in which these columns are all null.
_STATISTICS = {"step", RUN} | {c.name for table in TABLES.values() for c in table.columns if c.probe}


class DamagedPartError(ValueError):
    """The content of a part is damaged; the message gives the reason."""


@dataclass(frozen=True)
class RowGroup:
    """A row group of a part, with rows of steps first_step to last_step."""

    index: int
    rows: int
    first_step: int
    last_step: int


@dataclass(frozen=True)
class PartFile:
    """A Parquet file with a valid footer, or the rows of one run in it. Its pages are checked when they are read."""

    path: Path
    groups: tuple[RowGroup, ...]
    metadata: pq.FileMetaData

    @property
    def rows(self) -> int:
        """Number of rows."""
        return sum(group.rows for group in self.groups)

    @property
    def names(self) -> list[str]:
        """Columns of the file, in order. Each has one leaf: no column is a struct."""
        return list(self.metadata.schema.names)

    def select(self, steps: Collection[int] | None = None, required: Collection[str] = ()) -> list[RowGroup]:
        """Row groups that may contain rows of `steps` (None: all), except those in which a `required` column is all null."""
        groups = [g for g in self.groups if steps is None or any(g.first_step <= s <= g.last_step for s in steps)]
        return [g for g in groups if not any(self._all_null(g, column) for column in required)]

    def read(
        self, columns: Sequence[str], steps: Collection[int] | None = None, required: Collection[str] = ()
    ) -> pa.Table:
        """Read rows of some steps. Other columns and row groups are not read from the disk.

        Args:
            columns: columns to return, in this order. A column that the file lacks (an older schema) is null.
            steps: steps to return; None returns all.
            required: skip row groups in which one of these columns is all null.

        Raises:
            DamagedPartError: a page fails its checksum or cannot be decoded.
        """
        groups = self.select(steps, required)
        stored = set(self.names)
        loaded = list(dict.fromkeys([*(name for name in columns if name in stored), "step"]))
        try:
            with pq.ParquetFile(self.path, metadata=self.metadata, page_checksum_verification=True) as file:
                table = file.read_row_groups([g.index for g in groups], columns=loaded, use_threads=False)
            if table.num_rows != sum(g.rows for g in groups):
                raise DamagedPartError(f"it has {table.num_rows} rows, expected {sum(g.rows for g in groups)}")
            table.validate(full=True)
        except (pa.ArrowException, OSError, MemoryError, UnicodeDecodeError) as error:
            raise DamagedPartError(f"its pages cannot be read ({_one_line(error)})") from error
        if steps is not None and any(g.first_step != g.last_step for g in groups):
            table = table.filter(pc.is_in(table["step"], pa.array(list(steps), pa.int32())))
        for name in columns:
            if name not in stored:
                table = table.append_column(name, pa.nulls(table.num_rows))
        return table.select(list(columns))

    def _all_null(self, group: RowGroup, column: str) -> bool:
        if column not in self.names:
            return True
        statistics = self.metadata.row_group(group.index).column(self.names.index(column)).statistics
        return statistics is not None and statistics.has_null_count and statistics.null_count == group.rows


def open_part(path: Path) -> dict[str, PartFile]:
    """Read and check the footer of a Parquet file: run -> its part, or "" -> the part where the file is of one run.

    Raises:
        DamagedPartError: the footer is missing, damaged or has another schema version.
    """
    if path.name.startswith(DAMAGED):
        raise DamagedPartError("a resume found it damaged; its rows after the checkpoint are recorded again")
    try:
        metadata = pq.read_metadata(path)
    except (pa.ArrowException, OSError) as error:
        raise DamagedPartError(f"truncated, or not a Parquet file ({_one_line(error)})") from error
    version = (metadata.metadata or {}).get(VERSION_KEY, b"?").decode()
    if version not in map(str, READABLE_VERSIONS):
        raise DamagedPartError(f"it has schema version {version}, this version reads {READABLE_VERSIONS}")
    names, groups = metadata.schema.names, dict[str, list[RowGroup]]()
    for index in range(metadata.num_row_groups):
        group = metadata.row_group(index)
        run = group.column(names.index(RUN)).statistics.min if RUN in names else ""
        steps = group.column(names.index("step")).statistics
        groups.setdefault(run, []).append(RowGroup(index, group.num_rows, steps.min, steps.max))
    return {run: PartFile(path, tuple(groups_of_run), metadata) for run, groups_of_run in groups.items()}


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

    Hold the folder's RunLock. A part with rows before and after `step` is replaced; if its pages are damaged it is renamed,
    so that readers list it as damaged. Parts with a damaged footer stay. It can be repeated after an interruption.

    Returns:
        PartFile that was set aside (relative to the run's folder) -> reason.
    """
    damaged = {}
    for temporary in Path(run_dir).glob(f"*{ASIDE}"):
        temporary.unlink(missing_ok=True)
    for name in TABLES:
        for path in sorted((Path(run_dir) / TRACES / name).glob("part-*.parquet")):
            try:
                part = open_part(path).get("")
            except DamagedPartError:
                continue
            if part is None or all(group.last_step <= step for group in part.groups):
                continue
            if all(group.first_step > step for group in part.groups):
                path.unlink()
                continue
            try:
                rows = part.read(TABLES[name].names)
                write_part(rows.filter(pc.less_equal(rows["step"], step)).cast(arrow_schema(name)), path)
            except DamagedPartError as error:
                renamed = path.rename(path.with_name(DAMAGED + path.name))
                damaged[renamed.relative_to(run_dir).as_posix()] = str(error)
    return damaged


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
