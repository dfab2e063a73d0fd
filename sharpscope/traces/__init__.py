"""Recorded data of a run: schema, crash-safe writer and reader. `schema` defines every table and column."""

from sharpscope.rules.judging import robust_z
from sharpscope.traces.files import (
    RUN_FILE,
    RunLock,
    check_free,
    claim_run_dir,
    create_run_dir,
    create_run_info,
    free_name,
    has_writer,
    held_text,
    output_folder,
    read_run_info,
    update_run_info,
    write_atomic,
)
from sharpscope.traces.parts import SchemaError, TraceWriter, pack_runs, rewind
from sharpscope.traces.reader import (
    DamagedPartWarning,
    Reduction,
    Run,
    Runs,
    load_run,
    load_runs,
    write_reductions,
)
from sharpscope.traces.schema import (
    MAX_SATURATION,
    SCHEMA_VERSION,
    TABLES,
    Row,
    timing_columns,
)
