"""One Parquet part of a trace: its checksums, which steps it holds, and reading some columns of some steps."""

from __future__ import annotations

import re
import zlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from sharpscope.traces.schema import SCHEMA_VERSION, VERSION_KEY

PART = re.compile(r"part-(\d{6,})-([0-9a-f]{8})\.parquet")
FOUND_DAMAGED = "damaged-"
"""Before the name of a part that a resume found damaged and set aside."""
_TAIL = 8  # length of the footer (4 bytes) and the magic word


class DamagedPartError(ValueError):
    """A part whose content cannot be trusted; the message says why."""


def names(folder: Path) -> list[str]:
    """Names of the files in `folder`, sorted; none if it does not exist."""
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def footer_checksum(path: Path) -> int:
    """CRC-32 of a Parquet file's footer (schema, places of the columns), which its pages' own checksums do not cover.

    Raises:
        DamagedPartError: if the file has no footer.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        file.seek(max(0, size - _TAIL))
        tail = file.read()
        footer = int.from_bytes(tail[:4], "little")
        if tail[4:] != b"PAR1" or not 0 < footer <= size - _TAIL - 4:
            raise DamagedPartError("its end is missing: cut off, or no Parquet file")
        file.seek(size - _TAIL - footer)
        return zlib.crc32(file.read(footer))


@dataclass(frozen=True)
class RowGroup:
    """Rows of a part that can be read alone; they belong to steps first_step..last_step."""

    index: int
    first_step: int
    last_step: int


@dataclass(frozen=True)
class Part:
    """A part whose footer is sound. Its pages are checked when they are read."""

    path: Path
    number: int
    rows: int
    groups: tuple[RowGroup, ...]
    metadata: pq.FileMetaData

    @property
    def first_step(self) -> int:
        """The lowest step it holds rows of."""
        return min(group.first_step for group in self.groups)

    @property
    def last_step(self) -> int:
        """The highest step it holds rows of."""
        return max(group.last_step for group in self.groups)

    def wanted(self, steps: Collection[int] | None = None, required: Collection[str] = ()) -> list[RowGroup]:
        """Row groups that may hold rows of `steps` (None: all) in which no `required` column is all null."""
        groups = [g for g in self.groups if steps is None or any(g.first_step <= s <= g.last_step for s in steps)]
        return [g for g in groups if not any(self._empty(g, column) for column in required)]

    def read(
        self, columns: Sequence[str], steps: Collection[int] | None = None, required: Collection[str] = ()
    ) -> pa.Table:
        """Rows of `steps` (None: all), with `columns` in their order; no byte of another column or row group is read.

        Row groups in which a `required` column holds nothing but nulls are not read either.

        Raises:
            DamagedPartError: if a page fails its checksum or cannot be decoded.
        """
        groups = self.wanted(steps, required)
        mixed = steps is not None and any(g.first_step != g.last_step for g in groups)
        wanted = [*columns, "step"] if mixed and "step" not in columns else list(columns)
        try:
            with pq.ParquetFile(self.path, metadata=self.metadata, page_checksum_verification=True) as file:
                table = file.read_row_groups([g.index for g in groups], columns=wanted, use_threads=False)
            expected = sum(self.metadata.row_group(g.index).num_rows for g in groups)
            if table.num_rows != expected:
                raise DamagedPartError(f"holds {table.num_rows} rows where {expected} were written")
            table.validate(full=True)
        except FileNotFoundError:
            raise
        except (pa.ArrowException, OSError, MemoryError, UnicodeDecodeError) as error:
            raise DamagedPartError(f"its pages cannot be read ({_one_line(error)})") from error
        if mixed:
            table = table.filter(pc.is_in(table["step"], pa.array(list(steps or ()), pa.int32())))
        return table.select(list(columns))

    def _empty(self, group: RowGroup, column: str) -> bool:
        rows = self.metadata.row_group(group.index)
        statistics = rows.column(self.metadata.schema.names.index(column)).statistics
        return statistics is not None and statistics.has_null_count and statistics.null_count == rows.num_rows


def open_part(path: Path) -> Part:
    """Read a part's footer and check it.

    Raises:
        DamagedPartError: if the footer is missing, altered, or of another schema version.
        FileNotFoundError: if the file has gone (a resumed run takes away what lies after its checkpoint).
    """
    match = PART.fullmatch(path.name)
    if match is None and path.name.startswith(FOUND_DAMAGED):
        raise DamagedPartError("a resume found it damaged; its rows after the checkpoint are recorded again elsewhere")
    if match is None:
        raise DamagedPartError("its name holds no checksum; it was not written by a trace writer")
    try:
        if footer_checksum(path) != int(match[2], 16):
            raise DamagedPartError("its footer does not have the checksum in its name")
        metadata = pq.read_metadata(path)
    except FileNotFoundError:
        raise
    except (pa.ArrowException, OSError) as error:
        raise DamagedPartError(f"its footer cannot be read ({_one_line(error)})") from error
    version = metadata.schema.to_arrow_schema().metadata.get(VERSION_KEY, b"?").decode()
    if version != str(SCHEMA_VERSION):
        raise DamagedPartError(f"has schema version {version}, this program reads {SCHEMA_VERSION}")
    groups = []
    for index in range(metadata.num_row_groups):
        statistics = metadata.row_group(index).column(metadata.schema.names.index("step")).statistics
        groups.append(RowGroup(index, statistics.min, statistics.max))
    return Part(path, int(match[1]), metadata.num_rows, tuple(groups), metadata)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
