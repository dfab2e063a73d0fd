"""Packed data sets: many finished runs in one Parquet file per table, with a first column `run`, for a repository.

The folder has `runs.parquet` (name, run.json and config.yaml of each run) and `<table>.parquet` for each table. `load_runs(folder)`
opens all runs, `load_run(folder / name)` one of them.
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
from sharpscope.traces.parts import RUN, parquet_options
from sharpscope.traces.schema import TABLES, arrow_schema

if TYPE_CHECKING:
    from sharpscope.traces.reader import Run

PACK_FILE = "runs.parquet"
GROUP = 4_000
"""Rows from which a row group is full; it holds whole runs, and small ones share it."""
_RUNS = pa.schema([(RUN, pa.string()), ("info", pa.string()), ("config", pa.string())])


def is_pack(folder: Path) -> bool:
    """Whether a folder is a packed data set."""
    return (folder / PACK_FILE).is_file()


def packed_runs(folder: Path) -> dict[str, dict[str, Any]]:
    """Texts of run.json (`info`) and config.yaml (`config`, may be None) of the runs in a packed data set, by name.

    Raises:
        UserError: the file cannot be read.
    """
    return _packed_runs(folder, (folder / PACK_FILE).stat().st_mtime_ns)


@lru_cache(maxsize=8)
def _packed_runs(folder: Path, _modified: int) -> dict[str, dict[str, Any]]:
    try:
        rows = pq.read_table(folder / PACK_FILE, schema=_RUNS, partitioning=None).to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{folder / PACK_FILE}: cannot be read ({error}); restore it") from error
    return {row[RUN]: row for row in rows}


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
        tables = {name: rows for name, run in runs.items() if len(rows := run.arrow(table))}
        for name, run in runs.items():
            if run.damaged:
                raise UserError(f"run: {name} has damaged parts ({', '.join(run.damaged)}); restore or exclude it")
        if not tables:
            continue
        schema = pa.schema([pa.field(RUN, pa.string()), *arrow_schema(table)], metadata=arrow_schema(table).metadata)
        options = parquet_options(schema) | {"compression_level": 19}
        with pq.ParquetWriter(out / f"{table}.parquet", schema, **options) as writer:
            waiting: list[pa.Table] = []
            for left, (name, rows) in enumerate(tables.items(), 1 - len(tables)):
                labeled = rows.add_column(0, schema.field(RUN), pa.array([name] * len(rows), pa.string()))
                waiting.append(labeled.cast(schema))
                if (count := sum(map(len, waiting))) >= GROUP or not left:
                    writer.write_table(pa.concat_tables(waiting), row_group_size=count)
                    waiting = []
    return sorted(out.iterdir())
