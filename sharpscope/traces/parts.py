"""The Parquet files of traces: parts of one run, and packed data sets of many runs.

A packed data set has `runs.parquet` (name, run.json and config.yaml of each run) and `<table>.parquet` for each table, with a first
column `run`, for a repository. `load_runs(folder)` opens all runs, `load_run(folder / name)` one of them.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import Field, TypeAdapter, ValidationError

from sharpscope.errors import UserError, nearest
from sharpscope.traces.files import ASIDE, TRACES, publish
from sharpscope.traces.schema import (
    ARROW_TYPES,
    READABLE_VERSIONS,
    SCHEMA_VERSION,
    TABLES,
    VERSION_KEY,
    Column,
    arrow_schema,
)
from sharpscope.untrusted import UnreadableError, bound, check_regular, too_large, valid_text

if TYPE_CHECKING:
    from sharpscope.traces.reader import Run

PART = re.compile(r"part-(\d{6,})(?:-[0-9a-f]{8})?\.parquet")
"""Name of a part; version 2 added a checksum."""
RUN = "run"
"""First column of the files of a packed data set."""
# Values repeat within a step, so dictionary encoding is smaller than byte stream split.
_REPEATING = {"advantage", "ratio", "weight"}


OF_TOKENS = ("tokens", "uses")
"""Tables of many rows, in which the rows of a step are written at once."""
OF_STEPS = (*OF_TOKENS, "rollouts")
"""Tables of which single steps are read, so that each step is a row group; of others a row group is all of a part."""
KEPT_FOOTERS = 48_000_000
"""Size of the footers that are kept in memory, as their files have them [bytes]; in memory they take several times as much."""
LARGEST_READ = 4_000_000_000
"""Largest part of a file that is read at once [bytes in memory]."""
PIECE_ROWS = 400_000
"""Rows of a file that `part_pieces` reads at once; a row group, which of tokens holds a step, is never divided."""


class DamagedPartError(ValueError):
    """The content of a part is damaged; the message gives the reason."""


def read_part(
    path: Path,
    table: str,
    columns: Sequence[str] | None = None,
    *,
    steps: Collection[int] | None = None,
    run: str = "",
    groups: Collection[int] | None = None,
) -> pa.Table:
    """Read rows of a table's file: `columns` (None: all) of `steps` (None: all), in a packed data set those of `run`.

    Only row groups that hold such rows are read from the disk, of the numbers `groups` (None: all). A column that the file
    lacks (an older schema) is null. What is returned has the table's schema: types, no null where none may be, JSON that is an
    object of numbers.

    Raises:
        FileNotFoundError: there is no such file.
        DamagedPartError: the file is not a regular one, has no footer or another schema, needs more memory than
            `LARGEST_READ`, or a page fails its checksum.
    """
    names = list(TABLES[table].names if columns is None else columns)
    schema = pa.schema([arrow_schema(table).field(name) for name in names])
    key = _key(path, run)
    footer = _footer(*key, table)
    chosen: Sequence[int] = range(footer.metadata.num_row_groups)
    count = footer.metadata.num_rows
    if run or steps is not None or groups is not None:
        kept = [
            group
            for group in _row_groups(*key, table)
            if group.may_hold(run, steps) and (groups is None or group.index in groups)
        ]
        chosen, count = [group.index for group in kept], sum(group.rows for group in kept)
    if not chosen:
        return schema.empty_table()
    for name in names:
        if name not in footer.columns and not TABLES[table][name].nullable:
            raise DamagedPartError(f"it has no column {name}")
    wanted = [name for name in dict.fromkeys([*names, "step"]) if name in footer.columns]
    try:
        rows = _read_groups(path, footer, chosen, [*wanted, *([RUN] if run else [])], count)
        if run:
            rows = rows.filter(pc.equal(rows[RUN], run))
        if steps is not None:
            rows = rows.filter(pc.is_in(rows["step"], pa.array(list(steps), rows["step"].type)))
        for name in names:
            if name not in footer.columns:
                rows = rows.append_column(name, pa.nulls(rows.num_rows))
        rows = rows.select(names)
        for name in names:
            if problem := _problem(rows[name], TABLES[table][name]):
                raise DamagedPartError(f"its column {name} {problem}")
        rows = rows.cast(schema)
    except DamagedPartError:
        raise
    except (pa.ArrowException, OSError, MemoryError, ValueError, OverflowError) as error:
        raise DamagedPartError(f"its pages cannot be read ({_one_line(error)})") from error
    _check_json(rows, table)
    return rows


def part_pieces(
    path: Path,
    table: str,
    columns: Sequence[str] | None = None,
    *,
    steps: Collection[int] | None = None,
    run: str = "",
) -> Iterator[pa.Table]:
    """What `read_part` reads, a file of more than `PIECE_ROWS` rows in pieces of about as many."""
    key = _key(path, run)
    if _footer(*key, table).metadata.num_rows <= PIECE_ROWS:
        yield read_part(path, table, columns, steps=steps, run=run)
        return
    piece: list[int] = []
    rows = 0
    for group in _row_groups(*key, table):
        if piece and rows + group.rows > PIECE_ROWS:
            yield read_part(path, table, columns, steps=steps, run=run, groups=piece)
            piece, rows = [], 0
        piece.append(group.index)
        rows += group.rows
    yield read_part(path, table, columns, steps=steps, run=run, groups=piece)


def step_rows(path: Path, table: str, run: str = "") -> Mapping[int, int]:
    """Step -> number of its rows in a table's file, counted once; errors as of `read_part`, or a token stands twice."""
    return _step_rows(*_key(path, run), table, run)


@lru_cache(maxsize=65536)
def _step_rows(path: str, modified: int, size: int, table: str, run: str) -> Mapping[int, int]:
    key = list(TABLES[table].key)
    told_apart = table in OF_TOKENS and _footer(path, modified, size, table).columns.issuperset(key)
    rows = read_part(Path(path), table, key if told_apart else ["step"], run=run)
    if told_apart and _has_twice(rows):
        raise DamagedPartError("it has a row twice")
    counted = rows["step"].value_counts()
    return dict(zip(*(part.tolist() for part in counted.flatten()), strict=True))


def _has_twice(rows: pa.Table) -> bool:
    """Whether two rows are equal."""
    ordered = np.zeros(max(len(rows) - 1, 0), dtype=bool)
    equal = ~ordered
    for column in rows.columns:
        values = column.to_numpy()
        ordered |= equal & (values[1:] > values[:-1])
        equal &= values[1:] == values[:-1]
    if ordered.all():  # as parts are written: each row after the one before
        return False
    return len(rows.group_by(rows.column_names).aggregate([])) < len(rows)


def _key(path: Path, run: str) -> tuple[str, int, int]:
    """Path, time of change and size of a file, under which what is known of it is kept: new content has another key."""
    try:
        # of the folder of a run, or of a packed data set
        status = check_regular(path, path.parents[0 if run else 2])
    except UnreadableError as error:
        raise DamagedPartError(error.reason) from error
    return str(path), status.st_mtime_ns, status.st_size


@dataclass(frozen=True, kw_only=True)
class _RowGroup:
    """Number of rows, runs by name and steps of a row group."""

    index: int
    rows: int
    runs: frozenset[str]
    steps: frozenset[int]

    def may_hold(self, run: str, steps: Collection[int] | None) -> bool:
        """Whether rows of a run at one of the steps may be in the group."""
        return (not run or run in self.runs) and (steps is None or not self.steps.isdisjoint(steps))


@dataclass(frozen=True, kw_only=True)
class _Footer:
    """What a file's footer says."""

    metadata: pq.FileMetaData
    columns: frozenset[str]  # of the trace's schema that the file has
    texts: tuple[str, ...]  # columns of texts


class _Footers:
    """The footers that were read last, up to `KEPT_FOOTERS` bytes.

    A run of a thousand parts is passed over dozens of times, and a footer may take half a megabyte: so bytes are
    counted, not footers.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, int, int, str], _Footer] = OrderedDict()
        self._bytes = 0
        self._lock = Lock()

    def get(self, path: str, modified: int, size: int, table: str) -> _Footer:
        """The checked footer of a table's file."""
        with self._lock:
            key = path, modified, size, table
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
            found = self._kept[key] = _read_footer(path, table)
            self._bytes += found.metadata.serialized_size
            while self._bytes > KEPT_FOOTERS and len(self._kept) > 1:
                _, oldest = self._kept.popitem(last=False)
                self._bytes -= oldest.metadata.serialized_size
            return found


_footer = _Footers().get


def _read_footer(path: str, table: str) -> _Footer:
    """Read and check the footer of a table's file."""
    try:
        with pa.OSFile(path) as file:  # a path would be looked up among kinds of file systems
            metadata = pq.read_metadata(file)
        stored = metadata.schema.to_arrow_schema()
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DamagedPartError(f"truncated, or not a Parquet file ({_one_line(error)})") from error
    version = (metadata.metadata or {}).get(VERSION_KEY, b"?").decode("ascii", "replace")[:20]
    if version not in map(str, READABLE_VERSIONS):
        raise DamagedPartError(
            f"it has schema version {version}, this version reads {READABLE_VERSIONS}"
        )
    texts, columns = _check_schema(stored, table)
    unknown = set(stored.names) - columns - {RUN}
    if unknown and version == str(SCHEMA_VERSION):
        # A damaged name would read as a column that was not recorded.
        raise DamagedPartError(f"it has the column {min(unknown)[:40]!r}, which is not known")
    return _Footer(metadata=metadata, columns=columns, texts=texts)


@lru_cache(maxsize=65536)
def _row_groups(path: str, modified: int, size: int, table: str) -> list[_RowGroup]:
    """What the row groups of a table's file hold.

    The columns are read. The footer's statistics of them are not: a footer that is damaged there makes pyarrow end the process.
    """
    footer = _footer(path, modified, size, table)
    names = ["step", *([RUN] if RUN in footer.texts else [])]
    groups = []
    for index in range(footer.metadata.num_row_groups):
        try:
            rows = _read_groups(Path(path), footer, [index], names, footer.metadata.num_rows)
        except (pa.ArrowException, OSError, MemoryError, ValueError, OverflowError) as error:
            raise DamagedPartError(f"its pages cannot be read ({_one_line(error)})") from error
        steps, runs = (
            frozenset(rows[name].unique().to_pylist()) if name in names else frozenset()
            for name in ("step", RUN)
        )
        groups.append(_RowGroup(index=index, rows=len(rows), runs=runs, steps=steps))
    return groups


@lru_cache(maxsize=256)  # the files of a version have one
def _check_schema(stored: pa.Schema, table: str) -> tuple[tuple[str, ...], frozenset[str]]:
    """The texts and the columns of the trace's schema in a file; DamagedPartError if one has another kind of type or stands twice."""
    present = []
    for column in TABLES[table].columns:
        places = stored.get_all_field_indices(column.name)
        if not places and column.name == "step":
            raise DamagedPartError("it has no column step")
        if len(places) > 1:
            raise DamagedPartError(f"it has the column {column.name} {len(places)} times")
        if places:
            given, wanted = stored.field(places[0]).type, ARROW_TYPES[column.type]
            if _kind(given) != _kind(wanted):
                raise DamagedPartError(f"its column {column.name} is {given}, not {wanted}")
            present.append(column.name)
    for name in (RUN,) if RUN in stored.names else ():
        places = stored.get_all_field_indices(name)
        if len(places) > 1 or _kind(stored.field(places[0]).type) != "string":
            raise DamagedPartError(f"its column {name} is not one column of names")
    texts = tuple(field.name for field in stored if _kind(field.type) == "string")
    return texts, frozenset(present)


def _kind(of: pa.DataType) -> str:
    """Types of one kind are cast into each other."""
    if pa.types.is_dictionary(of):
        of = of.value_type
    if pa.types.is_string(of) or pa.types.is_large_string(of):
        return "string"
    if pa.types.is_integer(of):
        return "integer"
    return "float" if pa.types.is_floating(of) else str(of)


def _read_groups(
    path: Path, footer: _Footer, chosen: Sequence[int], columns: Sequence[str], count: int
) -> pa.Table:
    """Columns of row groups with `count` rows, texts as codes: repeated ones take little room in a file and much in memory."""
    _check_memory(8 * count * len(columns))
    codes = [name for name in columns if name in footer.texts]
    options = {"metadata": footer.metadata, "page_checksum_verification": True}
    with (
        pa.OSFile(str(path)) as opened,
        pq.ParquetFile(opened, read_dictionary=codes, **options) as file,
    ):
        table = file.read_row_groups(list(chosen), columns=list(columns), use_threads=False)
    _check_memory(sum(_text_bytes(table[name]) for name in codes))
    return table


def _check_memory(size: int) -> None:
    if size > bound(LARGEST_READ):
        raise DamagedPartError(too_large("what it holds", size, LARGEST_READ))


def _text_bytes(codes: pa.ChunkedArray) -> int:
    """Bytes of texts that are stored as codes, once expanded."""
    size = 0
    for chunk in codes.chunks:
        if pa.types.is_dictionary(chunk.type):
            lengths = pc.take(pc.binary_length(chunk.dictionary), chunk.indices)
            size += pc.sum(pc.cast(lengths, pa.int64())).as_py() or 0
    return size


_JSON: dict[str, tuple[TypeAdapter[dict[str, float | None]] | TypeAdapter[list[int]], str]] = {
    "json": (TypeAdapter(dict[str, float | None]), "JSON object of numbers"),
    "ids": (TypeAdapter(list[Annotated[int, Field(ge=0, lt=2**31)]]), "JSON list of token IDs"),
}
"""What the texts in columns of some types hold, and its name."""


def _problem(values: pa.ChunkedArray | pa.Array, column: Column) -> str:
    """Why values may not be in a column: a null, or one that no training writes, such as a negative index; empty if they may."""
    if values.null_count and not column.nullable:
        return f"has {values.null_count} empty values"
    if math.isinf(column.low) and math.isinf(column.high):
        return ""
    low, high = (end.as_py() for end in pc.min_max(values).values())
    if low is None or not (low < column.low or high > column.high):  # NaN is neither
        return ""
    return f"has {low if low < column.low else high:g}, outside {column.low:g} to {column.high:g}"


def _check_json(rows: pa.Table, table: str) -> None:
    """DamagedPartError if JSON is not what its column holds."""
    for column in map(TABLES[table].__getitem__, rows.schema.names):
        if column.type not in _JSON:
            continue
        of, name = _JSON[column.type]
        for text in pc.unique(rows[column.name]).drop_null().to_pylist():
            try:
                of.validate_json(text, strict=True)
            except ValidationError:
                raise DamagedPartError(
                    f"its column {column.name} has {text[:40]!r}, no {name}"
                ) from None


def parquet_options(schema: pa.Schema) -> dict[str, object]:
    """Options of `ParquetWriter`: byte stream split for floats, dictionaries for the rest, statistics for pruning."""
    split = {f.name for f in schema if pa.types.is_floating(f.type) and f.name not in _REPEATING}
    return {
        "compression": "zstd",
        "compression_level": 3,
        "use_dictionary": [f.name for f in schema if f.name not in split],
        "column_encoding": dict.fromkeys(split, "BYTE_STREAM_SPLIT"),
        "write_statistics": [name for name in schema.names if name in ("step", RUN)],
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

    Hold the folder's RunLock. A part with rows before and after `step` is replaced. A damaged one is renamed so that
    readers skip it, and returned with the reason.
    """
    damaged = {}
    for name in TABLES:
        for path in sorted((Path(run_dir) / TRACES / name).glob("part-*.parquet")):
            try:
                steps = read_part(path, name, ["step"])["step"].to_numpy()
                if (steps > step).all():
                    path.unlink()
                elif (steps > step).any():
                    rows = read_part(path, name)
                    kept = rows.filter(pc.less_equal(rows["step"], step))
                    kept = kept.cast(arrow_schema(name))
                    write_part(kept, path, groups=name in OF_STEPS)
            except DamagedPartError as error:
                renamed = path.rename(path.with_name(f".damaged-{path.name}"))
                damaged[renamed.relative_to(run_dir).as_posix()] = str(error)
    return damaged


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]


# -- writing


class SchemaError(ValueError):
    """Rows do not match the schema: an error in the calling code."""


class TraceWriter:
    """Append rows to the traces of one run; `flush` makes them durable, and so does leaving the context.

    Hold the folder's RunLock while writing. Part numbers continue after existing parts, intact or damaged, and nothing is
    overwritten. With `groups` a reader can read one step of the tables `OF_STEPS` alone; without, files are
    smaller. Of other tables a part is one row group.
    """

    def __init__(self, run_dir: str | Path, *, groups: bool = True) -> None:
        self.folder = Path(run_dir) / TRACES
        self._groups = groups
        self._buffers: dict[str, list[pa.Table]] = {name: [] for name in TABLES}
        self._next: dict[str, int] = {}
        for name in TABLES:
            folder = self.folder / name
            folder.mkdir(parents=True, exist_ok=True)
            numbers = [
                int(match[1]) for path in folder.iterdir() if (match := PART.search(path.name))
            ]
            self._next[name] = max(numbers, default=-1) + 1

    def append(self, table: str, columns: Mapping[str, object]) -> int:
        """Buffer rows and return their number.

        Args:
            table: name of a table.
            columns: column name -> 1-D values (array, tensor, list), or a scalar for all rows; scalars alone make one row.
                None and masked entries become null (not recorded); NaN stays NaN (recorded, not a number). A nullable
                column may be None as a whole, or omitted.

        Raises:
            SchemaError: unknown column, different lengths, more than one dimension, wrong type or forbidden null.
                None of the rows is buffered.
        """
        return self.append_table(table, _to_arrow(table, columns))

    def append_table(self, table: str, rows: pa.Table) -> int:
        """Buffer rows as returned by `Run.arrow`, with null and NaN unchanged, and return their number.

        Raises:
            SchemaError: not a trace table with all its columns, a forbidden null, or a value that no training writes.
        """
        if rows.schema.names != TABLES[table].names:
            raise SchemaError(f"{table}: not a trace table with all its columns")
        for column in TABLES[table].columns:
            values = rows[column.name].cast(ARROW_TYPES[column.type])
            if problem := _problem(values, column):
                raise SchemaError(f"{table}.{column.name} {problem}")
        if rows.num_rows:
            self._buffers[table].append(rows.cast(arrow_schema(table)))
        return len(rows)

    def flush(self) -> list[Path]:
        """Write the buffered rows, one part per table, `steps` last, whose rows say that a step is complete.

        Raises:
            OSError: the disk is full or the folder is read-only. Unwritten rows stay buffered for a later flush.
        """
        written = []
        for name in sorted(TABLES, key="steps".__eq__):
            if self._buffers[name]:
                path = self.folder / name / f"part-{self._next[name]:06d}.parquet"
                groups = self._groups and name in OF_STEPS
                write_part(pa.concat_tables(self._buffers[name]), path, groups=groups)
                written.append(path)
                self._next[name] += 1
                self._buffers[name].clear()
        return written

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self.flush()


def _to_arrow(name: str, columns: Mapping[str, object]) -> pa.Table:
    """Convert the columns given to `TraceWriter.append` to Arrow and check them against the schema."""
    table = TABLES[name]
    for column in columns:
        if column not in table.names:
            raise SchemaError(f"{name}.{column} is not a column{nearest(column, table.names)}")
    values = {key: _to_numpy(value) for key, value in columns.items()}
    lengths = {
        key: len(value)
        for key, value in values.items()
        if isinstance(value, list) or np.ndim(value)
    }
    if len(set(lengths.values())) > 1:
        raise SchemaError(f"{name}: columns differ in length: {lengths}")
    rows = next(iter(lengths.values()), 1)
    arrays = []
    for field in table.columns:
        value, label = values.get(field.name), f"{name}.{field.name}"
        if value is None:
            array = pa.nulls(rows, ARROW_TYPES[field.type])
        else:
            value = value if field.name in lengths else np.full(rows, value)
            array = _array(label, field, value)
        arrays.append(array)
    return pa.Table.from_arrays(arrays, schema=arrow_schema(name))


def _to_numpy(value: Any) -> Any:
    """Convert a torch tensor to NumPy without importing torch; return other values unchanged."""
    if hasattr(value, "detach"):
        tensor = value.detach().cpu()
        return (tensor.float() if str(tensor.dtype) == "torch.bfloat16" else tensor).numpy()
    return value


def _array(label: str, column: Column, value: Any) -> pa.Array:
    """The values of a column; None and masked entries are null, of texts what UTF-8 cannot encode is replaced."""
    mask = np.ma.getmaskarray(value) if isinstance(value, np.ma.MaskedArray) else None
    plain = isinstance(value, np.ndarray) and value.dtype.kind not in "OU"
    try:
        array = pa.array(
            np.ma.getdata(value) if plain else [_plain(item) for item in value], mask=mask
        )
        wanted, known = ARROW_TYPES[column.type], array.null_count < len(array)
        if known and any(
            is_kind(array.type) != is_kind(wanted)
            for is_kind in (pa.types.is_string, pa.types.is_boolean)
        ):
            raise pa.ArrowTypeError(f"got {array.type}")
        # large integers are rounded
        return array.cast(wanted, safe=not pa.types.is_floating(wanted))
    except (pa.ArrowException, OverflowError) as error:
        raise SchemaError(f"{label} is {column.type}: {_one_line(error)}") from error


def _plain(item: object) -> object:
    """One value as a number, a text that UTF-8 can encode, or of a mapping of numbers a JSON object."""
    if isinstance(item, str):
        return valid_text(item)
    if isinstance(item, Mapping):
        numbers = {valid_text(str(key)): float(number) for key, number in item.items()}
        return json.dumps(
            {k: v if math.isfinite(v) else None for k, v in numbers.items()}, ensure_ascii=False
        )
    return item.item() if hasattr(item, "item") else item


# -- packed data sets

PACK_FILE = "runs.parquet"
GROUP = 10_000
"""Rows of a row group, which may hold several runs."""
_RUNS = pa.schema([(RUN, pa.string()), ("info", pa.string()), ("config", pa.string())])


LONGEST_NAME = 500
"""Longest name of a run in a packed data set [characters]."""


@dataclass(frozen=True, kw_only=True)
class PackedRuns:
    """The runs of a packed data set.

    Attributes:
        rows: texts of run.json (`info`) and config.yaml (`config`, which may be None) by name.
        refused: name as it is shown -> reason why that run is left out.
    """

    rows: Mapping[str, Mapping[str, str | None]]
    refused: Mapping[str, str]


def is_pack(folder: Path) -> bool:
    """Whether a folder is a packed data set."""
    return os.path.lexists(folder / PACK_FILE)


@lru_cache(maxsize=8)
def packed_runs(folder: Path) -> PackedRuns:
    """The runs of a packed data set; UserError if they cannot be read."""
    path = folder / PACK_FILE
    try:
        check_regular(path, folder)
        metadata = pq.read_metadata(path)
        footer = _Footer(metadata=metadata, columns=frozenset(), texts=tuple(_RUNS.names))
        groups = range(metadata.num_row_groups)
        table = _read_groups(path, footer, groups, _RUNS.names, metadata.num_rows)
        listed = table.cast(_RUNS).to_pylist()
    except UnreadableError as error:
        raise UserError(f"{error}; restore it") from error
    except (pa.ArrowException, OSError, KeyError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({_one_line(error)}); restore it") from error
    rows: dict[str, dict[str, str | None]] = {}
    refused: dict[str, str] = {}
    for number, row in enumerate(listed, 1):
        name = row[RUN]
        reason = _name_problem(name) or ("its name stands twice" if name in rows else "")
        reason = reason or ("it has no run.json" if row["info"] is None else "")
        if reason:
            refused[f"{folder.name} row {number}"] = f"{path} row {number}: {reason}"
        else:
            rows[name] = row
    return PackedRuns(rows=rows, refused=refused)


def _name_problem(name: str | None) -> str:
    """Why a name cannot be that of a run in a packed data set; empty if it can."""
    if not name or len(name) > LONGEST_NAME or not name.isprintable():
        return f"its name is {str(name)[:40]!r}"
    parts = name.split("/")
    if any(part in ("", ".", "..") or "\\" in part for part in parts) or len(parts) > 8:
        return f"its name {name[:40]!r} is not a path below the folder"
    return ""


def pack_runs(runs: Mapping[str, Run], out: Path) -> list[Path]:
    """Write finished runs by name to a packed data set, without checkpoints and tokenizers; returns its files.

    Raises:
        UserError: `out` is not empty, there is no run, or a run is not finished or has damaged parts.
    """
    if out.exists() and any(out.iterdir()):
        raise UserError(f"--out {out}: is not empty; choose a new folder")
    unfinished = [
        f"{name} is {run.status}" for name, run in runs.items() if run.status != "finished"
    ]
    if unfinished or not runs:
        raise UserError(
            f"runs: {unfinished[0] if unfinished else 'none given'}; give folders of finished runs"
        )
    out.mkdir(parents=True, exist_ok=True)
    infos = {name: json.dumps(run.info, indent=2) + "\n" for name, run in runs.items()}
    texts = [
        {RUN: name, "info": infos[name], "config": run.config_text} for name, run in runs.items()
    ]
    pq.write_table(pa.Table.from_pylist(texts, _RUNS), out / PACK_FILE, compression="zstd")
    for table in TABLES:
        schema = arrow_schema(table).insert(0, pa.field(RUN, pa.string()))
        whole = schema.empty_table()
        for name, run in runs.items():
            rows = run.arrow(table)
            if run.damaged:
                raise UserError(
                    f"run: {name} has damaged parts ({', '.join(run.damaged)}); restore or exclude it"
                )
            rows = rows.add_column(0, schema.field(RUN), pa.repeat(name, len(rows))).cast(schema)
            whole = pa.concat_tables([whole, rows])
        if len(whole):
            options = parquet_options(schema) | {"compression_level": 19, "row_group_size": GROUP}
            pq.write_table(whole, out / f"{table}.parquet", **options)
    return sorted(out.iterdir())
