"""Remove rows after a checkpoint from the traces, so that a resumed run does not record them twice."""

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
    """Result of `rewind`.

    Attributes:
        rows: number of removed rows.
        damaged: part that was set aside (relative to the run's folder) -> reason.
    """

    rows: int = 0
    damaged: dict[str, str] = field(default_factory=dict)


def rewind(run_dir: str | Path, step: int) -> Rewound:
    """Remove every row after `step` from a run's traces, and temporary files that a crash left.

    Hold the folder's RunLock. After an interruption at any point it can be repeated.

    - A part with rows only after `step` is deleted; only its footer is read.
    - A part with rows before and after `step` is rewritten under its number before the old file is deleted. While both
      exist, readers use the shorter one. If its pages are damaged it is renamed, so that readers list it as damaged and do
      not read it: the rows after `step` are recorded again and would otherwise appear twice.
    - Other parts, and parts with a damaged footer (which readers skip), stay unchanged.
    """
    result = Rewound()
    for temporary in Path(run_dir).glob(f"*{ASIDE}"):
        temporary.unlink(missing_ok=True)
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
                result.rows += part.rows
            elif part.last_step > step:
                try:
                    result.rows += _truncate(part, name, step)
                except DamagedPartError as error:
                    renamed = path.rename(path.with_name(FOUND_DAMAGED + path.name))
                    sync_folder(folder)
                    result.damaged[renamed.relative_to(run_dir).as_posix()] = str(error)
    return result


def _truncate(part: Part, table: str, step: int) -> int:
    """Replace a part by one with its rows up to `step`; return the number of removed rows.

    Raises:
        DamagedPartError: a page cannot be read; nothing changes.
    """
    rows = part.read(TABLES[table].names)
    kept = rows.filter(pc.less_equal(rows["step"], step))
    folder = part.path.parent
    write_part(kept.cast(arrow_schema(table)), folder, part.number)
    part.path.unlink()
    sync_folder(folder)
    return int(rows.num_rows - kept.num_rows)
