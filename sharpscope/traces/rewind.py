"""Before a run is resumed: take out of its traces what lies after the checkpoint, so that no row is there twice."""

from __future__ import annotations

from pathlib import Path

import pyarrow.compute as pc

from sharpscope.traces.files import ASIDE, TRACES, sync_folder
from sharpscope.traces.parts import DamagedPartError, Part, open_part
from sharpscope.traces.schema import TABLES, arrow_schema
from sharpscope.traces.writer import write_part


def rewind(run_dir: str | Path, step: int) -> int:
    """Remove every row after `step` from a run's traces, and files that a crash left half written; returns how many rows went.

    Hold the folder's RunLock. Interrupted at any instant it may be run again. A part that holds rows on both sides is
    written anew under its number before the old one goes; while both are there, readers take the shorter. Damaged parts
    are left as they are.
    """
    gone = 0
    for left_over in Path(run_dir).glob(f"*{ASIDE}"):
        left_over.unlink(missing_ok=True)
    for name in TABLES:
        folder = Path(run_dir) / TRACES / name
        for path in sorted(folder.glob("part-*.parquet")):
            try:
                part = open_part(path)
                gone += _cut(part, name, step) if part.last_step > step else 0
            except DamagedPartError:
                continue
    return gone


def _cut(part: Part, table: str, step: int) -> int:
    rows = part.read(TABLES[table].names)
    kept = rows.filter(pc.less_equal(rows["step"], step))
    folder = part.path.parent
    if kept.num_rows:
        write_part(kept.cast(arrow_schema(table)), folder, part.number)
    part.path.unlink()
    sync_folder(folder)
    return int(rows.num_rows - kept.num_rows)
