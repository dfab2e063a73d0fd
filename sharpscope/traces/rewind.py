"""Before a run is resumed: take out of its traces what lies after the checkpoint, so that no row is there twice."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pyarrow.compute as pc

from sharpscope.traces.files import ASIDE, TRACES, sync_folder
from sharpscope.traces.parts import FOUND_DAMAGED, DamagedPartError, Part, open_part
from sharpscope.traces.schema import TABLES, arrow_schema
from sharpscope.traces.writer import write_part


@dataclass
class Rewound:
    """How many rows went, and the parts that had to be set aside (relative to the run's folder) → why."""

    rows: int = 0
    damaged: dict[str, str] = field(default_factory=dict)


def rewind(run_dir: str | Path, step: int) -> Rewound:
    """Remove every row after `step` from a run's traces, and files that a crash left half written.

    Hold the folder's RunLock. Interrupted at any instant it may be run again. A part that lies after `step` goes by its
    footer alone. One that holds rows on both sides is written anew under its number before the old one goes; while both are
    there, readers take the shorter. If its pages are damaged it gets a name that readers list as damaged and never read: the
    rows after `step` are recorded again, and a reader of sound columns would have them twice. Parts that end before, and
    parts without a sound footer, which no reader reads, are left as they are.
    """
    done = Rewound()
    for left_over in Path(run_dir).glob(f"*{ASIDE}"):
        left_over.unlink(missing_ok=True)
    for name in TABLES:
        folder = Path(run_dir) / TRACES / name
        for path in sorted(folder.glob("part-*.parquet")):
            try:
                part = open_part(path)
            except DamagedPartError:
                continue
            if part.first_step > step:
                path.unlink()
                sync_folder(folder)
                done.rows += part.rows
            elif part.last_step > step:
                try:
                    done.rows += _cut(part, name, step)
                except DamagedPartError as error:
                    aside = path.rename(path.with_name(FOUND_DAMAGED + path.name))
                    sync_folder(folder)
                    done.damaged[aside.relative_to(run_dir).as_posix()] = str(error)
    return done


def _cut(part: Part, table: str, step: int) -> int:
    """Write the rows of a part up to `step` anew and remove the part; returns how many rows went.

    Raises:
        DamagedPartError: a page of it cannot be read; nothing is changed.
    """
    rows = part.read(TABLES[table].names)
    kept = rows.filter(pc.less_equal(rows["step"], step))
    folder = part.path.parent
    write_part(kept.cast(arrow_schema(table)), folder, part.number)
    part.path.unlink()
    sync_folder(folder)
    return int(rows.num_rows - kept.num_rows)
