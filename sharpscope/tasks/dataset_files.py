"""Reading rows of a data set from Parquet, JSON lines or the Hugging Face hub; every failure names its place and its
fix.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sharpscope.errors import UserError, nearest

Row = dict[str, Any]
Place = str
"""Where a row stands: `file.jsonl line 3` or `file.parquet row 3`; both count from 1, as editors do."""

SUFFIXES = (".parquet", ".jsonl", ".ndjson")


def files_of(path: str, field: str) -> list[Path]:
    """The data files that a path names: itself, or those of a folder, in order of their names.

    Raises:
        UserError: nothing is there, or nothing of a known format.
    """
    place = Path(path).expanduser()
    if place.is_dir():
        files = sorted(file for file in place.iterdir() if file.suffix in SUFFIXES and file.is_file())
        if not files:
            raise UserError(f"{field} = '{path}': the folder holds no {', '.join(SUFFIXES)} file")
        return files
    if not place.is_file():
        raise UserError(f"{field} = '{path}': no such file or folder (looked in {Path.cwd()})")
    if place.suffix not in SUFFIXES:
        raise UserError(
            f"{field} = '{path}': '{place.suffix or 'no suffix'}' is not a known format; valid: {', '.join(SUFFIXES)}"
        )
    return [place]


def read_file(file: Path, columns: Sequence[str]) -> Iterator[tuple[Place, Row]]:
    """Rows of one file, with the top-level `columns` of those that it has.

    Raises:
        UserError: the file is broken or has no row.
    """
    rows = _parquet(file, columns) if file.suffix == ".parquet" else _json_lines(file)
    empty = True
    for place_row in rows:
        empty = False
        yield place_row
    if empty:
        raise UserError(f"{file}: the data set has no row")


def _parquet(file: Path, columns: Sequence[str]) -> Iterator[tuple[Place, Row]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        source = pq.ParquetFile(file)
        present = [name for name in source.schema_arrow.names if name in set(columns)]
        number = 0
        for batch in source.iter_batches(batch_size=1024, columns=present):
            for row in batch.to_pylist():
                number += 1
                yield f"{file} row {number}", row
    except (pa.ArrowException, OSError, ValueError, MemoryError) as error:
        raise UserError(f"{file}: not a readable Parquet file ({_first_line(error)})") from error


def _json_lines(file: Path) -> Iterator[tuple[Place, Row]]:
    try:
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                place = f"{file} line {number}"
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise UserError(
                        f"{place}: not JSON ({_first_line(error)}); one object a line is expected"
                    ) from error
                if not isinstance(row, dict):
                    raise UserError(f"{place}: a {type(row).__name__} where one object a line is expected")
                yield place, row
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: not UTF-8 text ({_first_line(error)})") from error
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({_first_line(error)})") from error


def read_hub(path: str, subset: str, split: str) -> Iterator[tuple[Place, Row]]:
    """Rows of a Hugging Face data set, by id or local folder, through the optional library `datasets`.

    Raises:
        UserError: the library, the data set or the split is absent.
    """
    try:
        import datasets
    except ImportError as error:
        raise UserError(
            "task.source = huggingface: needs the library 'datasets'; pip install 'sharpscope[hub]'"
        ) from error
    saved = Path(path, "dataset_info.json").is_file() or Path(path, "dataset_dict.json").is_file()
    try:
        loaded = datasets.load_from_disk(path) if saved else datasets.load_dataset(path, subset or None)
    except Exception as error:  # the library raises dozens of types: network, format, name
        raise UserError(
            f"task.path = '{path}': no local file, and no Hugging Face data set that loads ({_first_line(error)})"
        ) from error
    if isinstance(loaded, dict):
        if split not in loaded:
            raise UserError(f"task.hub_split = '{split}': '{path}' has no such split{nearest(split, loaded)}")
        loaded = loaded[split]
    if len(loaded) == 0:
        raise UserError(f"{path}: the data set has no row")
    for number, row in enumerate(loaded, 1):
        yield f"{path} row {number}", dict(row)


def cell(row: Row, column: str, place: Place, field: str) -> Any:
    """Value of a column; a dot enters a nested column unless the whole name is a column.

    Raises:
        UserError: no such column; the message lists those that are there.
    """
    if column in row:
        return row[column]
    value: Any = row
    path: list[str] = []
    for part in column.split("."):
        if isinstance(value, str) and value.lstrip().startswith("{"):  # some writers store nested columns as JSON text
            try:
                value = json.loads(value)
            except ValueError:
                value = None
        if not isinstance(value, dict) or part not in value:
            inside = f" in '{'.'.join(path)}'" if path else ""
            have = nearest(part, map(str, value)) if isinstance(value, dict) else f"; it holds a {type(value).__name__}"
            raise UserError(f"{place}: no column '{part}'{inside} (task.columns.{field} = '{column}'){have}")
        value = value[part]
        path.append(part)
    return value


def _first_line(error: BaseException) -> str:
    text = str(error).strip().partition("\n")[0]
    return text[:200] or type(error).__name__
