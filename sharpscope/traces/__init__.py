"""Recorded data of a run: schema, crash-safe writer and reader. `schema` defines every table and column."""

from sharpscope.traces.files import (
    RUN_FILE,
    create_run_dir,
    create_run_info,
    output_folder,
    read_run_info,
    run_path,
    update_run_info,
    write_atomic,
)
from sharpscope.traces.lock import Owner, RunLock, held_text, lock_owner
from sharpscope.traces.packs import pack_runs, unpack_run
from sharpscope.traces.reader import DamagedPartWarning, Run, Runs, load_run, load_runs
from sharpscope.traces.reductions import Reduction, read_reductions, write_reductions
from sharpscope.traces.rewind import rewind
from sharpscope.traces.schema import (
    MAX_SATURATION,
    SCHEMA_VERSION,
    TABLES,
    arrow_schema,
    schema_markdown,
    schema_rows,
    timing_columns,
)
from sharpscope.traces.spike_rule import robust_z
from sharpscope.traces.writer import SchemaError, TraceWriter

__all__ = [
    "MAX_SATURATION",
    "RUN_FILE",
    "SCHEMA_VERSION",
    "TABLES",
    "DamagedPartWarning",
    "Owner",
    "Reduction",
    "Run",
    "RunLock",
    "Runs",
    "SchemaError",
    "TraceWriter",
    "arrow_schema",
    "create_run_dir",
    "create_run_info",
    "held_text",
    "load_run",
    "load_runs",
    "lock_owner",
    "output_folder",
    "pack_runs",
    "read_reductions",
    "read_run_info",
    "rewind",
    "robust_z",
    "run_path",
    "schema_markdown",
    "schema_rows",
    "timing_columns",
    "unpack_run",
    "update_run_info",
    "write_atomic",
    "write_reductions",
]
