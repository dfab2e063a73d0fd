"""Read rows of a dataset from Parquet, JSON Lines or the Hugging Face Hub."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sharpscope.errors import UserError, nearest

Row = dict[str, Any]
Location = str
"""Location of a row, for error messages: `file.jsonl line 3` or `file.parquet row 3`, counted from 1."""

SUFFIXES = (".parquet", ".jsonl", ".ndjson")


def files_of(path: str, field: str) -> list[Path]:
    """The data file at `path`, or the sorted data files of a folder.

    Args:
        path: file or folder.
        field: configuration field of `path`, for the error message.

    Raises:
        UserError: the path does not exist or has no file of a known format.
    """
    root = Path(path).expanduser()
    if root.is_dir():
        files = sorted(file for file in root.iterdir() if file.suffix in SUFFIXES and file.is_file())
        if not files:
            raise UserError(f"{field} = '{path}': the folder has no {', '.join(SUFFIXES)} file")
        return files
    if not root.is_file():
        raise UserError(f"{field} = '{path}': no such file or folder (looked in {Path.cwd()})")
    if root.suffix not in SUFFIXES:
        raise UserError(
            f"{field} = '{path}': '{root.suffix or 'no suffix'}' is not a known format; valid: {', '.join(SUFFIXES)}"
        )
    return [root]


def read_file(file: Path, columns: Sequence[str]) -> Iterator[tuple[Location, Row]]:
    """Rows of one file. Of a Parquet file, only the top-level `columns` that exist are read.

    Raises:
        UserError: the file is damaged or has no rows.
    """
    rows = _parquet(file, columns) if file.suffix == ".parquet" else _json_lines(file)
    empty = True
    for item in rows:
        empty = False
        yield item
    if empty:
        raise UserError(f"{file}: the dataset has no rows")


def _parquet(file: Path, columns: Sequence[str]) -> Iterator[tuple[Location, Row]]:
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


def _json_lines(file: Path) -> Iterator[tuple[Location, Row]]:
    try:
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                location = f"{file} line {number}"
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise UserError(
                        f"{location}: not JSON ({_first_line(error)}); write one object per line"
                    ) from error
                if not isinstance(row, dict):
                    raise UserError(f"{location}: a {type(row).__name__}; write one object per line")
                yield location, row
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: not UTF-8 text ({_first_line(error)})") from error
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({_first_line(error)})") from error


def read_hub(path: str, subset: str, split: str) -> Iterator[tuple[Location, Row]]:
    """Rows of a Hugging Face dataset, through the optional library `datasets`.

    Args:
        path: id of the dataset, or a local folder.
        subset: name of its configuration, or empty.
        split: name of the split.

    Raises:
        UserError: the library, the dataset or the split is missing.
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
    except Exception as error:  # the library raises many types: network, format, name
        raise UserError(
            f"task.path = '{path}': not a local file, and not a loadable Hugging Face dataset ({_first_line(error)})"
        ) from error
    if isinstance(loaded, dict):
        if split not in loaded:
            raise UserError(f"task.hub_split = '{split}': '{path}' has no such split{nearest(split, loaded)}")
        loaded = loaded[split]
    if len(loaded) == 0:
        raise UserError(f"{path}: the dataset has no rows")
    for number, row in enumerate(loaded, 1):
        yield f"{path} row {number}", dict(row)


def cell(row: Row, column: str, location: Location, field: str) -> Any:
    """Value of a column of a row.

    Args:
        row: the row.
        column: name of the column; a dot selects a nested column unless a column has the full name.
        location: where the row is, for the error message.
        field: field of `task.columns`, for the error message.

    Raises:
        UserError: the column does not exist.
    """
    if column in row:
        return row[column]
    value: Any = row
    path: list[str] = []
    for part in column.split("."):
        if isinstance(value, str) and value.lstrip().startswith("{"):  # some files store nested columns as JSON text
            try:
                value = json.loads(value)
            except ValueError:
                value = None
        if not isinstance(value, dict) or part not in value:
            parent = f" in '{'.'.join(path)}'" if path else ""
            hint = nearest(part, map(str, value)) if isinstance(value, dict) else f"; it is a {type(value).__name__}"
            raise UserError(f"{location}: no column '{part}'{parent} (task.columns.{field} = '{column}'){hint}")
        value = value[part]
        path.append(part)
    return value


def _first_line(error: BaseException) -> str:
    text = str(error).strip().partition("\n")[0]
    return text[:200] or type(error).__name__
