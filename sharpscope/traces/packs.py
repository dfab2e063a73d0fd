"""Packs: many finished runs in one Parquet file per table, for a repository or a download.

A pack is a folder with `runs.parquet` (name, run.json and config.yaml of each run), `<table>.parquet` for each table,
with a first column `run` and one row group per run, and `reductions.parquet` if runs were reduced. `load_runs(pack)`
opens all runs, `load_run(pack / name)` one of them; `unpack_run` writes one as a run folder.
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
from sharpscope.traces.schema import READABLE_VERSIONS, TABLES, VERSION_KEY, arrow_schema
from sharpscope.traces.writer import TraceWriter, parquet_encoding

if TYPE_CHECKING:
    from sharpscope.traces.reader import Run

PACK_FILE = "runs.parquet"
_RUNS = pa.schema([("run", pa.string()), ("info", pa.string()), ("config", pa.string())])
_RUN_FIELD = pa.field("run", pa.string())


class Pack:
    """A pack: its folder and the footers of its files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._texts = {row["run"]: row for row in _read(folder / PACK_FILE, _RUNS).to_pylist()}
        self._parts = {table: self._read_footer(table) for table in TABLES}

    @property
    def names(self) -> list[str]:
        """Names of the runs, in order."""
        return list(self._texts)

    def config_text(self, run: str) -> str | None:
        """Content of a run's config.yaml; None if it had none."""
        text = self._texts[run]["config"]
        return None if text is None else str(text)

    def info(self, run: str) -> dict[str, Any]:
        """Content of a run's run.json."""
        return parse_run_info(self._texts[run]["info"], self.folder / run / RUN_FILE)

    def reductions(self, run: str) -> list[Reduction] | None:
        """Reductions of a run, as from `read_reductions`."""
        path = self.folder / REDUCTIONS_FILE
        if not path.exists():
            return None
        rows = _read(path, pa.schema([_RUN_FIELD, *REDUCTIONS_SCHEMA]), [("run", "=", run)])
        return reductions_of(rows, path) if len(rows) else None

    def parts(self, table: str, run: str) -> list[Part]:
        """Rows of a run in a table's file, as a list of one part; empty if it has no rows."""
        part = self._parts[table].get(run)
        return [] if part is None else [part]

    def _read_footer(self, table: str) -> dict[str, Part]:
        """Read a table's footer; returns run -> its row groups as a part."""
        path = self.folder / f"{table}.parquet"
        if not path.exists():
            return {}
        try:
            metadata = pq.read_metadata(path)
        except (pa.ArrowException, OSError) as error:
            raise UserError(f"{path}: cannot be read ({error}); restore it") from error
        schema = metadata.schema.to_arrow_schema()
        version = (schema.metadata or {}).get(VERSION_KEY, b"?").decode()
        if version not in map(str, READABLE_VERSIONS):
            raise UserError(f"{path}: has schema version {version}, this version reads {READABLE_VERSIONS}")
        run, step = schema.names.index("run"), schema.names.index("step")
        groups: dict[str, list[RowGroup]] = {}
        rows: dict[str, int] = {}
        for index in range(metadata.num_row_groups):
            group = metadata.row_group(index)
            name, steps = group.column(run).statistics.min, group.column(step).statistics
            groups.setdefault(name, []).append(RowGroup(index, steps.min, steps.max))
            rows[name] = rows.get(name, 0) + group.num_rows
        return {name: Part(path, 0, rows[name], tuple(selected), metadata) for name, selected in groups.items()}


def _read(path: Path, schema: pa.Schema, filters: list[tuple[str, str, str]] | None = None) -> pa.Table:
    try:
        return pq.read_table(path, schema=schema, filters=filters, partitioning=None)
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path}: cannot be read ({error}); restore it") from error


def is_pack(folder: Path) -> bool:
    """Whether a folder is a pack."""
    return (folder / PACK_FILE).is_file()


def open_pack(folder: Path) -> Pack:
    """Open the pack in a folder. The footers of recently opened packs are cached.

    Raises:
        UserError: a file of the pack cannot be read.
    """
    return _open_pack(folder, (folder / PACK_FILE).stat().st_mtime_ns)


@lru_cache(maxsize=8)
def _open_pack(folder: Path, _modified: int) -> Pack:
    return Pack(folder)


def pack_runs(runs: Mapping[str, Run], out: Path) -> list[Path]:
    """Write finished runs to a pack. Rollouts are included, checkpoints are not.

    Args:
        runs: name in the pack -> run. A name may contain slashes.
        out: folder of the pack; empty or new.

    Returns:
        The written files.

    Raises:
        UserError: `out` is not empty, there is no run, or a run is not finished or has damaged parts.
    """
    if out.exists() and any(out.iterdir()):
        raise UserError(f"--out {out}: is not empty; choose a new folder")
    if not runs:
        raise UserError("runs: none given; give folders of finished runs")
    for name, run in runs.items():
        if run.status != "finished":
            raise UserError(f"run: {name} is {run.status}; pack finished runs only")
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
    schema = pa.schema([_RUN_FIELD, *arrow_schema(table)], metadata=arrow_schema(table).metadata)
    encoding = parquet_encoding(schema)
    encoding |= {"write_statistics": ["run", *encoding["write_statistics"]], "compression_level": 19}
    path = out / f"{table}.parquet"
    count = 0
    with pq.ParquetWriter(path, schema, **encoding) as writer:
        for name, run in runs.items():
            rows = run.arrow(table)
            if run.damaged:
                raise UserError(
                    f"run: {name} has damaged parts ({', '.join(run.damaged)}); restore them or exclude the run"
                )
            if len(rows):
                packed = rows.add_column(0, _RUN_FIELD, pa.array([name] * len(rows), pa.string()))
                writer.write_table(packed.cast(schema), row_group_size=len(rows))
                count += len(rows)
    if not count:
        path.unlink()


def _pack_reductions(runs: Mapping[str, Run], out: Path) -> None:
    schema = pa.schema([_RUN_FIELD, *REDUCTIONS_SCHEMA])
    with pq.ParquetWriter(out / REDUCTIONS_FILE, schema, compression="zstd", compression_level=19) as writer:
        for name, run in runs.items():
            if run.reductions is not None:
                rows = reductions_table(run.reductions)
                packed = rows.add_column(0, _RUN_FIELD, pa.array([name] * len(rows), pa.string()))
                writer.write_table(packed.cast(schema), row_group_size=max(1, len(rows)))


def unpack_run(run: Run, folder: Path) -> Path:
    """Write a run, packed or not, to a run folder with one part per table, without checkpoints and tokenizer.

    Raises:
        UserError: `folder` exists.
    """
    if folder.exists():
        raise UserError(f"--out {folder}: exists and is not overwritten; choose a new folder")
    temporary = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    write_atomic(temporary / RUN_FILE, json.dumps(run.info, indent=2) + "\n")
    if run.config_text is not None:
        write_atomic(temporary / CONFIG_FILE, run.config_text)
    with TraceWriter(temporary, groups=run.reduced is None) as writer:
        for table in TABLES:
            writer.append_table(table, run.arrow(table))
    if run.reductions is not None:
        write_reductions(temporary, run.reductions)
    temporary.rename(folder)
    return folder
