"""Packs: many finished runs in few files, one Parquet file a table, for a repository or a download.

A pack is a folder with `runs.parquet` (name, run.json and config.yaml of each run), `reductions.parquet` where runs were
reduced, and `<table>.parquet` for each table, with a column `run` before the table's own and one row group a run.
`load_runs(pack)` gives the runs, `load_run(pack / name)` one of them; `unpack_run` makes an ordinary folder of it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from sharpscope.errors import UserError
from sharpscope.traces.files import CONFIG_FILE, RUN_FILE, parse_run_info, write_atomic
from sharpscope.traces.parts import Part, RowGroup
from sharpscope.traces.reductions import (
    REDUCTIONS_FILE,
    REDUCTIONS_SCHEMA,
    Reduction,
    reductions_of,
    reductions_table,
    write_reductions,
)
from sharpscope.traces.schema import SCHEMA_VERSION, TABLES, VERSION_KEY, arrow_schema
from sharpscope.traces.writer import TraceWriter, parquet_encoding

if TYPE_CHECKING:
    from sharpscope.traces.reader import Run

PACK_FILE = "runs.parquet"
_RUNS = pa.schema([("run", pa.string()), ("info", pa.string()), ("config", pa.string())])
_NAMED = pa.field("run", pa.string())


class Pack:
    """The folder of a pack with the footers of its files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._texts = {row["run"]: row for row in _read(folder / PACK_FILE, _RUNS).to_pylist()}
        self._parts = {table: self._groups(table) for table in TABLES}

    @property
    def names(self) -> list[str]:
        """Names of its runs, in order."""
        return list(self._texts)

    def config_text(self, run: str) -> str | None:
        """The content of a run's config.yaml; None where it had none."""
        text = self._texts[run]["config"]
        return None if text is None else str(text)

    def info(self, run: str) -> dict[str, Any]:
        """The content of a run's run.json."""
        return parse_run_info(self._texts[run]["info"], self.folder / run / RUN_FILE)

    def reductions(self, run: str) -> list[Reduction] | None:
        """What `read_reductions` gives of a run's folder."""
        path = self.folder / REDUCTIONS_FILE
        if not path.exists():
            return None
        rows = _read(path, pa.schema([_NAMED, *REDUCTIONS_SCHEMA]), [("run", "=", run)])
        return reductions_of(rows, path) if len(rows) else None

    def parts(self, table: str, run: str) -> list[Part]:
        """The rows of one run in a table's file, as a part of its own; none where it has no rows."""
        part = self._parts[table].get(run)
        return [] if part is None else [part]

    def _groups(self, table: str) -> dict[str, Part]:
        path = self.folder / f"{table}.parquet"
        if not path.exists():
            return {}
        try:
            metadata = pq.read_metadata(path)
        except (pa.ArrowException, OSError) as error:
            raise UserError(f"{path}: cannot be read ({error}); restore it") from error
        schema = metadata.schema.to_arrow_schema()
        if (schema.metadata or {}).get(VERSION_KEY) != str(SCHEMA_VERSION).encode():
            raise UserError(f"{path}: is not of schema version {SCHEMA_VERSION}; pack its runs again")
        run, step = schema.names.index("run"), schema.names.index("step")
        groups: dict[str, list[RowGroup]] = {}
        rows: dict[str, int] = {}
        for index in range(metadata.num_row_groups):
            group = metadata.row_group(index)
            name, steps = group.column(run).statistics.min, group.column(step).statistics
            groups.setdefault(name, []).append(RowGroup(index, steps.min, steps.max))
            rows[name] = rows.get(name, 0) + group.num_rows
        return {name: Part(path, 0, rows[name], tuple(found), metadata) for name, found in groups.items()}


def _read(path: Path, schema: pa.Schema, filters: list[tuple[str, str, str]] | None = None) -> pa.Table:
    try:
        return pq.read_table(path, schema=schema, filters=filters, partitioning=None)
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path}: cannot be read ({error}); restore it") from error


def is_pack(folder: Path) -> bool:
    """Whether a folder is a pack."""
    return (folder / PACK_FILE).is_file()


def open_pack(folder: Path) -> Pack:
    """The pack in a folder; its footers are read once.

    Raises:
        UserError: a file of it cannot be read.
    """
    return _open_pack(folder, (folder / PACK_FILE).stat().st_mtime_ns)


@lru_cache(maxsize=8)
def _open_pack(folder: Path, _changed: int) -> Pack:
    return Pack(folder)


def pack_runs(runs: Mapping[str, Run], out: Path) -> list[Path]:
    """Write a pack of finished runs by name; a name may hold slashes. Rollouts are packed too, checkpoints are not.

    Raises:
        UserError: `out` is not empty, no run is given, one has not finished, or has damaged parts.
    """
    if out.exists() and any(out.iterdir()):
        raise UserError(f"--out {out}: is not empty; choose a new folder")
    if not runs:
        raise UserError("runs: none to pack; give folders of finished runs")
    for name, run in runs.items():
        if run.status != "finished":
            raise UserError(f"run: {name} is {run.status}; only finished runs are packed")
    out.mkdir(parents=True, exist_ok=True)
    texts = [
        {"run": name, "info": json.dumps(run.info, indent=2) + "\n", "config": run.config_text}
        for name, run in runs.items()
    ]
    pq.write_table(pa.Table.from_pylist(texts, _RUNS), out / PACK_FILE, compression="zstd")
    for table in TABLES:
        _pack_table(table, runs, out)
    _pack_reductions(runs, out)
    return sorted(out.iterdir())


def _pack_table(table: str, runs: Mapping[str, Run], out: Path) -> None:
    schema = pa.schema([_NAMED, *arrow_schema(table)], metadata=arrow_schema(table).metadata)
    encoding = parquet_encoding(schema)
    encoding |= {"write_statistics": ["run", *encoding["write_statistics"]], "compression_level": 19}
    path = out / f"{table}.parquet"
    count = 0
    with pq.ParquetWriter(path, schema, **encoding) as writer:
        for name, run in runs.items():
            rows = run.arrow(table)
            if run.damaged:
                raise UserError(
                    f"run: {name} has damaged parts ({', '.join(run.damaged)}); restore them, or leave it out"
                )
            if len(rows):
                named = rows.add_column(0, _NAMED, pa.array([name] * len(rows), pa.string()))
                writer.write_table(named.cast(schema), row_group_size=len(rows))
                count += len(rows)
    if not count:
        path.unlink()


def _pack_reductions(runs: Mapping[str, Run], out: Path) -> None:
    schema = pa.schema([_NAMED, *REDUCTIONS_SCHEMA])
    with pq.ParquetWriter(out / REDUCTIONS_FILE, schema, compression="zstd", compression_level=19) as writer:
        for name, run in runs.items():
            if run.reductions is not None:
                rows = reductions_table(run.reductions)
                named = rows.add_column(0, _NAMED, pa.array([name] * len(rows), pa.string()))
                writer.write_table(named.cast(schema), row_group_size=max(1, len(rows)))


def unpack_run(run: Run, folder: Path) -> Path:
    """Write a run, packed or not, as a run folder with one part a table; checkpoints and tokenizer are not copied.

    Raises:
        UserError: the folder exists.
    """
    if folder.exists():
        raise UserError(f"--out {folder}: exists and is not overwritten")
    aside = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    write_atomic(aside / RUN_FILE, json.dumps(run.info, indent=2) + "\n")
    if run.config_text is not None:
        write_atomic(aside / CONFIG_FILE, run.config_text)
    with TraceWriter(aside, groups=run.reduced is None) as writer:
        for table in TABLES:
            writer.append_table(table, run.arrow(table))
    if run.reductions is not None:
        write_reductions(aside, run.reductions)
    aside.rename(folder)
    return folder
