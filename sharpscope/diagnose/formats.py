"""Readers of logs, one for each format, and which of them reads a file: by its content, not by its name."""

from __future__ import annotations

import csv
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

from sharpscope.diagnose.console import console
from sharpscope.diagnose.tables import Table
from sharpscope.diagnose.text import HEAD, encoding_of, head, lines, plain, whole
from sharpscope.errors import UserError, first_line

READS = (
    "a run of sharpscope, trainer_state.json, JSON lines, a table (CSV, TSV, Markdown), the text of a"
    " terminal, a notebook, TensorBoard events, each also as .gz, or a folder of these"
)

_SAMPLE = 40
"""Lines by which a format is recognized."""
_CELLS = 200
"""Cells of a line that are looked at to tell a table."""
_DELIMITERS = ("\t", ";", ",", "|")
_SPACES = re.compile(r"\s{2,}")
_RULE = re.compile(r"[\s|:+=-]*")
_DECIMAL_COMMA = re.compile(r"-?\d+,\d+(?:[eE][-+]?\d+)?")
_NUMBER = re.compile(r"[-+]?(?:\d[\d.,]*(?:[eE][-+]?\d+)?|nan|inf)|No Log|", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Content:
    """What a reader found in a file."""

    format: str  # in words
    table: Table


def read_file(file: Path) -> Content:
    """Read a file by the reader that its content asks for.

    Raises:
        UserError: the file cannot be opened, is binary, or holds no rows.
    """
    try:
        start = head(file)
        if b"brain.Event:" in start[:64]:
            return Content(format="TensorBoard events", table=events([file]))
        if b"\0" in start and encoding_of(start) == "utf-8":
            raise UserError(f"{file}: is a binary file; give {READS}")
        content = _read_text(file, start)
    except (OSError, EOFError) as error:
        raise UserError(f"{file}: cannot be read ({first_line(error)}); give {READS}") from error
    if not content.table.count:
        raise UserError(f"{file}: holds no rows of a log; diagnose reads {READS}")
    return content


def _read_text(file: Path, start: bytes) -> Content:
    sample = (
        start.decode(encoding_of(start), errors="replace").lstrip("\ufeff").split("\n", 2 * _SAMPLE)
    )
    filled = [line.strip() for line in sample if line.strip()][:_SAMPLE]
    if len(start) < HEAD:
        sample.append("")  # the last line is whole
    first = filled[0] if filled else ""
    if first.startswith(("{", "[")):
        if len(filled) > 1 and _are_json_lines(filled):
            return Content(format="JSON lines", table=json_lines(lines(file)))
        document = _document(file)
        if document is not None:
            return document
        if _are_json_lines(list(itertools.islice(lines(file), 2))):  # longer than the sample
            return Content(format="JSON lines", table=json_lines(lines(file)))
    layout = layout_of(sample)
    if layout is not None:
        return Content(format="table", table=delimited(lines(file), layout, file.stem))
    return Content(format="terminal output", table=console(lines(file)))


# -- JSON


def _parsed(text: str) -> object:
    """A value from JSON; integers of more digits than Python converts become infinite.

    Raises:
        ValueError, RecursionError: the text is no JSON, or is nested too deeply.
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        raise
    except ValueError:
        return json.loads(text, parse_int=float)


def _are_json_lines(sample: Sequence[str]) -> bool:
    """Whether at least half of the lines are objects, and not one object is the whole document."""
    objects = 0
    for line in sample:
        try:
            row = _parsed(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict) and not {"log_history", "cells"} & row.keys():
            objects += 1
    return 2 * objects >= len(sample) and objects > 0


def json_lines(text: Iterable[str]) -> Table:
    """Objects, one a line. Lines that are none, such as the last one of an interrupted writer, are counted."""
    table = Table()
    for line in text:
        if not line or line.isspace():
            continue
        try:
            row = _parsed(line)
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, dict):
            table.add(row)
        else:
            table.left_out["lines that are no JSON object"] += 1
    return table


def _document(file: Path) -> Content | None:
    """The content of one JSON value, None if the text is none."""
    text = whole(file)
    try:
        content = _parsed(text)
    except RecursionError as error:
        raise UserError(f"{file}: its JSON is nested too deeply; give {READS}") from error
    except ValueError:
        return None
    if isinstance(content, dict) and isinstance(content.get("cells"), list):
        return Content(format="notebook", table=notebook(content["cells"]))
    table = Table()
    for row in _rows_of(content):
        if isinstance(row, Mapping):
            table.add(row)
        else:
            table.left_out["rows that are no JSON object"] += 1
    return Content(format="JSON", table=table)


def _rows_of(content: object) -> Iterable[object]:
    """The rows of a JSON value: a list, an object of lists or of {step: value}, or an object that holds a list of rows."""
    if isinstance(content, list):
        return content
    if not isinstance(content, dict):
        return []
    if isinstance(content.get("log_history"), list):
        return content["log_history"]
    listed = [value for value in content.values() if isinstance(value, list)]
    rows = [value for value in listed if value and isinstance(value[0], dict)]
    if rows:
        return max(rows, key=len)
    if len(listed) >= 2:
        return _transposed({k: v for k, v in content.items() if isinstance(v, list)})
    by_step = {
        key: value
        for key, value in content.items()
        if isinstance(value, dict) and value and all(str(step).isdecimal() for step in value)
    }
    if by_step:
        return _by_step(by_step)
    return [content]


def _transposed(columns: Mapping[str, list[object]]) -> Iterator[dict[str, object]]:
    """Rows of columns."""
    for values in itertools.zip_longest(*columns.values()):
        yield dict(zip(columns, values, strict=True))


def _by_step(columns: Mapping[str, Mapping[str, object]]) -> Iterator[dict[str, object]]:
    """Rows of columns whose values have steps as keys."""
    steps = sorted({int(step) for values in columns.values() for step in values})
    for step in steps:
        row: dict[str, object] = {"step": step}
        for key, values in columns.items():
            if str(step) in values:
                row[key] = values[str(step)]
        yield row


# -- tables


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How the cells of a table of text are told apart."""

    delimiter: str  # one character, or "" for two and more spaces
    skipped: int  # lines before the header


def layout_of(sample: Sequence[str]) -> Layout | None:
    """The layout of a table by its first lines: a header of names, then lines of as many cells, half of them numbers."""
    for delimiter in (*_DELIMITERS, ""):
        for skipped in range(min(10, len(sample) - 1)):
            if delimiter not in sample[skipped]:
                continue
            cells = _cells(sample[skipped:-1], delimiter)
            try:
                rows = [row for row in itertools.islice(cells, _SAMPLE) if row]
            except csv.Error:
                continue
            if _is_table(rows):
                return Layout(delimiter=delimiter, skipped=skipped)
    return None


def _cells(text: Iterable[str], delimiter: str) -> Iterator[list[str]]:
    """The cells of each line; none of a line that only underlines a header."""
    if delimiter in (",", ";"):
        yield from csv.reader((f"{plain(line)}\n" for line in text), delimiter=delimiter)
        return
    for line in text:
        stripped = plain(line).strip("\n\r")
        if delimiter != "\t":
            stripped = stripped.strip().strip("|")
        if _RULE.fullmatch(stripped):
            yield []
        else:
            cells = stripped.split(delimiter) if delimiter else _SPACES.split(stripped)
            yield [cell.strip() for cell in cells]


def _is_table(rows: Sequence[list[str]]) -> bool:
    if len(rows) < 2 or len(rows[0]) < 2:
        return False
    header, body = rows[0], rows[1:]
    named = [cell for cell in header if re.search(r"[A-Za-z]", cell)]
    if len(named) < len(header) - 1 or any(re.search(r"[{}]|=\s*\d", cell) for cell in header):
        return False
    alike = [row for row in body if len(row) == len(header)]
    if len(alike) < 0.8 * len(body):
        return False
    filled = [cell for row in alike for cell in row[:_CELLS] if cell.strip()]
    numbers = [cell for cell in filled if _NUMBER.fullmatch(cell.strip())]
    return 3 * len(numbers) >= len(filled) and len(numbers) >= len(alike)


def delimited(text: Iterable[str], layout: Layout, name: str = "") -> Table:
    """The rows of a table of text. A cell "nan" was logged, an empty one and "No Log" were not."""
    csv.field_size_limit(1 << 27)
    table = Table()
    rows = _cells(itertools.islice(text, layout.skipped, None), layout.delimiter)
    header: list[str] = []
    while True:
        try:
            row = next(rows, None)
        except csv.Error:
            table.left_out["lines that are no row of the table"] += 1
            continue
        if row is None:
            return table
        if not row:
            continue
        if not header:
            header = _header(row, name)
            continue
        if layout.delimiter != ",":
            row = [c.replace(",", ".") if _DECIMAL_COMMA.fullmatch(c) else c for c in row]
        table.add({key: value for key, value in zip(header, row, strict=False) if value})


def _header(cells: Sequence[str], name: str) -> list[str]:
    """The keys of a table; TensorBoard's download of one tag names it in the file's name only."""
    names = [cell.strip().lstrip("\ufeff") for cell in cells]
    if names == ["Wall time", "Step", "Value"]:
        names[2] = name.rpartition("tag-")[2].replace("_", "/") or "Value"
    return names


# -- notebooks


class _Tables(HTMLParser):
    """The cells of the tables of an HTML text."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: list[list[list[str]]] = []
        self._cell: list[str] | None = None

    def handle_starttag(self, tag: str, attrs: object) -> None:
        """Begin a table, a row or a cell."""
        if tag == "table":
            self.tables.append([])
        elif tag == "tr" and self.tables:
            self.tables[-1].append([])
        elif tag in ("td", "th") and self.tables and self.tables[-1]:
            self._cell = []

    def handle_data(self, data: str) -> None:
        """Add text to the open cell; text between cells is left out."""
        if self._cell is not None:
            self._cell.append(data)

    def handle_endtag(self, tag: str) -> None:
        """End a cell."""
        if tag in ("td", "th") and self._cell is not None:
            self.tables[-1][-1].append("".join(self._cell).strip())
            self._cell = None


def notebook(cells: Iterable[object]) -> Table:
    """The longest log among the outputs of a notebook: a table that the trainer drew, or printed text."""
    made: list[Table] = []
    for cell in cells:
        printed: list[str] = []
        outputs = cell.get("outputs") if isinstance(cell, dict) else None
        for output in outputs if isinstance(outputs, list) else []:
            if not isinstance(output, dict):
                continue
            data = output.get("data")
            page = _text(data.get("text/html")) if isinstance(data, dict) else ""
            if "<table" in page:
                made.extend(_html_tables(page))
            printed.append(_text(output.get("text")))
        text = "".join(printed).split("\n")
        layout = layout_of(text)
        made.append(delimited(text, layout) if layout else console(text))
    logs = [table for table in made if table.count]
    if not logs:
        return Table()
    longest = max(logs, key=lambda table: table.count)
    if len(logs) > 1:
        counts = ", ".join(str(table.count) for table in logs)
        longest.notes.append(
            f"The notebook has {len(logs)} logs, of {counts} rows: the longest is read."
        )
    return longest


def _html_tables(page: str) -> Iterator[Table]:
    parser = _Tables()
    parser.feed(page)
    for rows in parser.tables:
        filled = [row for row in rows if row]
        if len(filled) > 1:
            table = Table()
            for row in filled[1:]:
                table.add(dict(zip(filled[0], row, strict=False)))
            yield table


def _text(value: object) -> str:
    """Text of a notebook, which is one string or a list of lines."""
    if isinstance(value, list):
        return "".join(str(part) for part in value)
    return value if isinstance(value, str) else ""


# -- TensorBoard


def events(files: Sequence[Path]) -> Table:
    """The scalars of TensorBoard's event files, one row a step; of several values of a tag at a step the later counts.

    Raises:
        UserError: tensorboard is not installed, or the files hold no scalars.
    """
    series = [scalars(file) for file in files]
    steps = sorted({step for tags in series for points in tags.values() for step in points})
    row_of = {step: row for row, step in enumerate(steps)}
    merged: dict[str, dict[int, float]] = {}
    for tags in series:
        for tag, points in tags.items():
            merged.setdefault(tag, {}).update(points)
    table = Table(count=len(steps))
    for row, step in enumerate(steps):
        table.put("step", row, float(step))
    for tag, points in merged.items():
        for step in sorted(points):
            number = table._number(points[step])
            if number is not None:
                table.put(tag, row_of[step], number)
    return table


def scalars(file: Path) -> dict[str, dict[int, float]]:
    """Tag -> step -> value of one event file."""
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError as error:
        raise UserError(
            f"{file}: its events need `pip install tensorboard`; or export them as CSV"
        ) from error
    loaded = EventAccumulator(str(file), size_guidance={"scalars": 0, "tensors": 0})
    loaded.Reload()
    tags = loaded.Tags()
    found = {
        tag: {point.step: float(point.value) for point in loaded.Scalars(tag)}
        for tag in tags["scalars"]
    }
    for tag in tags["tensors"]:  # TensorFlow 2 writes scalars as tensors
        points = {p.step: list(p.tensor_proto.float_val) for p in loaded.Tensors(tag)}
        if points and all(len(value) == 1 for value in points.values()):
            found[tag] = {step: float(value[0]) for step, value in points.items()}
    return found
