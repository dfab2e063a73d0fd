"""Packed data sets: many finished runs in one Parquet file per table, with a first column `run`, for a repository.

The folder has `runs.parquet` (name, run.json and config.yaml of each run) and `<table>.parquet` for each table, with one row
group per run. `load_runs(folder)` opens all runs, `load_run(folder / name)` one of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from sharpscope.errors import UserError
from sharpscope.traces.files import RUN_FILE, parse_run_info
from sharpscope.traces.parts import RUN, DamagedPartError, PartFile, open_part, parquet_options
from sharpscope.traces.schema import TABLES, arrow_schema

if TYPE_CHECKING:
    from sharpscope.traces.reader import Run

PACK_FILE = "runs.parquet"
_RUNS = pa.schema([(RUN, pa.string()), ("info", pa.string()), ("config", pa.string())])


class Pack:
    """A packed data set: the texts of its runs and the footers of its files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            rows = pq.read_table(folder / PACK_FILE, schema=_RUNS, partitioning=None).to_pylist()
            files = {table: folder / f"{table}.parquet" for table in TABLES}
            self._parts = {table: open_part(file) if file.exists() else {} for table, file in files.items()}
        except (pa.ArrowException, OSError, DamagedPartError) as error:
            raise UserError(f"{folder}: a file cannot be read ({error}); restore it") from error
        self._texts = {row[RUN]: row for row in rows}

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

    def parts(self, table: str, run: str) -> list[PartFile]:
        """Rows of a run in a table's file, as a list of one part; empty if it has no rows."""
        return [self._parts[table][run]] if run in self._parts[table] else []


def is_pack(folder: Path) -> bool:
    """Whether a folder is a packed data set."""
    return (folder / PACK_FILE).is_file()


def open_pack(folder: Path) -> Pack:
    """Open the packed data set in a folder. The footers of recently opened ones are cached.

    Raises:
        UserError: a file cannot be read.
    """
    return _open_pack(folder, (folder / PACK_FILE).stat().st_mtime_ns)


@lru_cache(maxsize=8)
def _open_pack(folder: Path, _modified: int) -> Pack:
    return Pack(folder)


def pack_runs(runs: Mapping[str, Run], out: Path) -> list[Path]:
    """Write finished runs to a packed data set; checkpoints and tokenizers are not included.

    Args:
        runs: name in the data set -> run. A name may contain slashes.
        out: its folder; empty or new.

    Returns:
        The written files.

    Raises:
        UserError: `out` is not empty, there is no run, or a run is not finished or has damaged parts.
    """
    if out.exists() and any(out.iterdir()):
        raise UserError(f"--out {out}: is not empty; choose a new folder")
    unfinished = [f"{name} is {run.status}" for name, run in runs.items() if run.status != "finished"]
    if unfinished or not runs:
        raise UserError(f"runs: {unfinished[0] if unfinished else 'none given'}; give folders of finished runs")
    out.mkdir(parents=True, exist_ok=True)
    texts = [
        {RUN: name, "info": json.dumps(run.info, indent=2) + "\n", "config": run.config_text}
        for name, run in runs.items()
    ]
    pq.write_table(pa.Table.from_pylist(texts, _RUNS), out / PACK_FILE, compression="zstd")
    for table in TABLES:
        schema = pa.schema([pa.field(RUN, pa.string()), *arrow_schema(table)], metadata=arrow_schema(table).metadata)
        path, count = out / f"{table}.parquet", 0
        with pq.ParquetWriter(path, schema, **parquet_options(schema) | {"compression_level": 19}) as writer:
            for name, run in runs.items():
                rows = run.arrow(table)
                if run.damaged:
                    raise UserError(f"run: {name} has damaged parts ({', '.join(run.damaged)}); restore or exclude it")
                if len(rows):
                    labeled = rows.add_column(0, schema.field(RUN), pa.array([name] * len(rows), pa.string()))
                    writer.write_table(labeled.cast(schema), row_group_size=len(rows))
                    count += len(rows)
        if not count:
            path.unlink()
    return sorted(out.iterdir())
