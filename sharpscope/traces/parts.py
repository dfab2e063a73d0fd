"""One Parquet part of a trace: check it, list its steps, and read selected columns and steps."""

from __future__ import annotations

import re
import zlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from sharpscope.traces.schema import READABLE_VERSIONS, VERSION_KEY

PART = re.compile(r"part-(\d{6,})-([0-9a-f]{8})\.parquet")
FOUND_DAMAGED = "damaged-"
"""Prefix of the file name of a part that a resume set aside as damaged."""
_TAIL = 8  # bytes: length of the footer (4) and the magic number (4)


class DamagedPartError(ValueError):
    """The content of a part is damaged; the message gives the reason."""


def names(folder: Path) -> list[str]:
    """Sorted names of the files in `folder`; empty if it does not exist."""
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def footer_checksum(path: Path) -> int:
    """CRC-32 of a Parquet file's footer (schema and column offsets), which the page checksums do not cover.

    Raises:
        DamagedPartError: the file has no footer.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        file.seek(max(0, size - _TAIL))
        tail = file.read()
        footer = int.from_bytes(tail[:4], "little")
        if tail[4:] != b"PAR1" or not 0 < footer <= size - _TAIL - 4:
            raise DamagedPartError("its footer is missing: truncated, or not a Parquet file")
        file.seek(size - _TAIL - footer)
        return zlib.crc32(file.read(footer))


@dataclass(frozen=True)
class RowGroup:
    """A row group of a part, with rows of steps first_step to last_step."""

    index: int
    first_step: int
    last_step: int


@dataclass(frozen=True)
class Part:
    """A part with a valid footer. Its pages are checked when they are read."""

    path: Path
    number: int
    rows: int
    groups: tuple[RowGroup, ...]
    metadata: pq.FileMetaData

    @cached_property
    def names(self) -> list[str]:
        """Columns of the file, in order. Each has one leaf: no column is a struct."""
        return list(self.metadata.schema.to_arrow_schema().names)

    @property
    def first_step(self) -> int:
        """Lowest step with rows in this part."""
        return min(group.first_step for group in self.groups)

    @property
    def last_step(self) -> int:
        """Highest step with rows in this part."""
        return max(group.last_step for group in self.groups)

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
        mixed = steps is not None and any(g.first_step != g.last_step for g in groups)
        stored = set(self.names)
        loaded = [name for name in columns if name in stored]
        if (mixed or not loaded) and "step" not in loaded:
            loaded.append("step")
        try:
            with pq.ParquetFile(self.path, metadata=self.metadata, page_checksum_verification=True) as file:
                table = file.read_row_groups([g.index for g in groups], columns=loaded, use_threads=False)
            expected = sum(self.metadata.row_group(g.index).num_rows for g in groups)
            if table.num_rows != expected:
                raise DamagedPartError(f"it has {table.num_rows} rows, expected {expected}")
            table.validate(full=True)
        except FileNotFoundError:
            raise
        except (pa.ArrowException, OSError, MemoryError, UnicodeDecodeError) as error:
            raise DamagedPartError(f"its pages cannot be read ({_one_line(error)})") from error
        if mixed:
            table = table.filter(pc.is_in(table["step"], pa.array(list(steps or ()), pa.int32())))
        for name in columns:
            if name not in stored:
                table = table.append_column(name, pa.nulls(table.num_rows))
        return table.select(list(columns))

    def _all_null(self, group: RowGroup, column: str) -> bool:
        if column not in self.names:
            return True
        rows = self.metadata.row_group(group.index)
        statistics = rows.column(self.names.index(column)).statistics
        return statistics is not None and statistics.has_null_count and statistics.null_count == rows.num_rows


def open_part(path: Path) -> Part:
    """Read and check the footer of a part.

    Raises:
        DamagedPartError: the footer is missing, altered or has another schema version.
        FileNotFoundError: the file no longer exists (a resumed run removes rows after its checkpoint).
    """
    match = PART.fullmatch(path.name)
    if match is None and path.name.startswith(FOUND_DAMAGED):
        raise DamagedPartError(
            "a resume found it damaged; its rows after the checkpoint are recorded again in another part"
        )
    if match is None:
        raise DamagedPartError("its name has no checksum; it was not written by TraceWriter")
    try:
        if footer_checksum(path) != int(match[2], 16):
            raise DamagedPartError("its footer does not match the checksum in its name")
        metadata = pq.read_metadata(path)
    except FileNotFoundError:
        raise
    except (pa.ArrowException, OSError) as error:
        raise DamagedPartError(f"its footer cannot be read ({_one_line(error)})") from error
    version = metadata.schema.to_arrow_schema().metadata.get(VERSION_KEY, b"?").decode()
    if version not in map(str, READABLE_VERSIONS):
        raise DamagedPartError(f"it has schema version {version}, this version reads {READABLE_VERSIONS}")
    groups = []
    for index in range(metadata.num_row_groups):
        statistics = metadata.row_group(index).column(metadata.schema.names.index("step")).statistics
        groups.append(RowGroup(index, statistics.min, statistics.max))
    return Part(path, int(match[1]), metadata.num_rows, tuple(groups), metadata)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
