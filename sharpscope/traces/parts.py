"""The Parquet files of traces: parts of one run, and packed data sets of many runs.

A packed data set has `runs.parquet` (name, run.json and config.yaml of each run) and `<table>.parquet` for each table, with a first
column `run`, for a repository. `load_runs(folder)` opens all runs, `load_run(folder / name)` one of them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from sharpscope.errors import UserError, nearest
from sharpscope.traces.files import ASIDE, TRACES, publish
from sharpscope.traces.schema import (
    ARROW_TYPES,
    READABLE_VERSIONS,
    TABLES,
    VERSION_KEY,
    Column,
    arrow_schema,
)

if TYPE_CHECKING:
    from sharpscope.traces.reader import Run

PART = re.compile(r"part-(\d{6,})(?:-[0-9a-f]{8})?\.parquet")
"""Name of a part; version 2 added a checksum."""
RUN = "run"
"""First column of the files of a packed data set."""
# Values repeat within a step, so dictionary encoding is smaller than byte stream split.
_REPEATING = {"advantage", "ratio", "weight"}


class DamagedPartError(ValueError):
    """The content of a part is damaged; the message gives the reason."""


def read_part(
    path: Path, columns: Sequence[str], steps: Collection[int] | None = None, run: str = ""
) -> pa.Table:
    """Read rows of a table's file: `columns` of `steps` (None: all), in a packed data set those of `run`.

    Nothing else is read from the disk. A column that the file lacks (an older schema) is null; without a row there are
    no columns.

    Raises:
        FileNotFoundError: there is no such file.
        DamagedPartError: the file has no footer or another schema version, or a page fails its checksum.
    """
    stat = path.stat()
    # new content has another key in the cache
    metadata, groups = _footer(str(path), stat.st_mtime_ns, stat.st_size)
    chosen = [
        index
        for index, runs, first, last in groups
        if runs[0] <= run <= runs[1]
        and (steps is None or any(first <= step <= last for step in steps))
    ]
    if not chosen:
        return pa.table({})
    stored = metadata.schema.names
    try:
        with pq.ParquetFile(path, metadata=metadata, page_checksum_verification=True) as file:
            loaded = dict.fromkeys(
                [*(name for name in columns if name in stored), "step", *([RUN] if run else [])]
            )
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
        raise DamagedPartError(
            f"it has schema version {version}, this version reads {READABLE_VERSIONS}"
        )
    names, groups = metadata.schema.names, []
    for index in range(metadata.num_row_groups):
        group = metadata.row_group(index)
        runs = group.column(names.index(RUN)).statistics if RUN in names else None
        steps = group.column(names.index("step")).statistics
        groups.append(
            (index, ("", "") if runs is None else (runs.min, runs.max), steps.min, steps.max)
        )
    return metadata, groups


def parquet_options(schema: pa.Schema) -> dict[str, Any]:
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
    for name, table in TABLES.items():
        for path in sorted((Path(run_dir) / TRACES / name).glob("part-*.parquet")):
            try:
                steps = read_part(path, ["step"])["step"].to_numpy()
                if (steps > step).all():
                    path.unlink()
                elif (steps > step).any():
                    rows = read_part(path, table.names)
                    write_part(
                        rows.filter(pc.less_equal(rows["step"], step)).cast(arrow_schema(name)),
                        path,
                    )
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
    overwritten. With `groups` a reader can read one step alone; without, files are smaller.
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

    def append(self, table: str, columns: Mapping[str, Any]) -> int:
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
        """Buffer rows as returned by `Run.arrow`, with null and NaN unchanged, and return their number."""
        if rows.schema.names != TABLES[table].names:
            raise SchemaError(f"{table}: not a trace table with all its columns")
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
        if array.null_count and not field.nullable:
            raise SchemaError(f"{label} may not be null, but {array.null_count} of {rows} rows are")
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


def _plain(item: Any) -> Any:
    """One value as a number, a text that UTF-8 can encode, or of a mapping of numbers a JSON object."""
    if isinstance(item, str):
        # "\ud800" in a JSON file is half a character
        return item.encode("utf-8", "replace").decode("utf-8")
    if isinstance(item, Mapping):
        numbers = {str(key): float(number) for key, number in item.items()}
        return json.dumps(
            {k: v if math.isfinite(v) else None for k, v in numbers.items()}, ensure_ascii=False
        )
    return item.item() if hasattr(item, "item") else item


# -- packed data sets

PACK_FILE = "runs.parquet"
GROUP = 10_000
"""Rows of a row group, which may hold several runs."""
_RUNS = pa.schema([(RUN, pa.string()), ("info", pa.string()), ("config", pa.string())])


def is_pack(folder: Path) -> bool:
    """Whether a folder is a packed data set."""
    return (folder / PACK_FILE).is_file()


@lru_cache(maxsize=8)
def packed_runs(folder: Path) -> dict[str, dict[str, Any]]:
    """Texts of run.json (`info`) and config.yaml (`config` or None) of a packed data set's runs, by name."""
    try:
        rows = pq.read_table(folder / PACK_FILE, schema=_RUNS, partitioning=None).to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{folder / PACK_FILE}: cannot be read ({error}); restore it") from error
    return {row[RUN]: row for row in rows}


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
