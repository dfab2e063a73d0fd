"""Readers of logs, one for each format, and which of them reads a file: by its content, not by its name."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

from sharpscope.diagnose.console import console
from sharpscope.diagnose.delimited import SAMPLE, delimited, layout_of, nameless
from sharpscope.diagnose.names import by_words
from sharpscope.diagnose.shapes import objects_in, parsed, rows_of
from sharpscope.diagnose.tables import LARGEST, Table
from sharpscope.diagnose.text import BROKEN, HEAD, encoding_of, head, lines, whole
from sharpscope.errors import UserError, first_line

READS = (
    "a run of sharpscope, trainer_state.json, JSON lines, a table (CSV, TSV, Markdown), the text of a"
    " terminal, a notebook, TensorBoard events, each also as .gz, .bz2, .xz or .zip, or a folder of these"
)


_MESSAGES = frozenset({"message", "msg", "log", "text"})
"""Keys of printed text in the objects of a log of messages."""
_JSON = re.compile(r"\{|\[\s*(?:[\[{\"]|//|$)")
_MLFLOW = re.compile(r"\d{12,14} \S+ \d+")


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
            return Content(
                format="TensorBoard events",
                table=events([file]),
            )
        if b"\0" in start and encoding_of(start) == "utf-8":
            raise UserError(f"{file}: is a binary file; give {READS}")
        content = _read_text(file, start)
    except BROKEN as error:
        raise UserError(f"{file}: cannot be read ({first_line(error)}); give {READS}") from error
    if not content.table.count:
        raise UserError(f"{file}: holds no rows of a log; diagnose reads {READS}")
    return content


def _read_text(file: Path, start: bytes) -> Content:
    notes: list[str] = []
    content = _read_lines(file, start, notes)
    content.table.notes.extend(notes)
    return content


def _read_lines(file: Path, start: bytes, notes: list[str]) -> Content:
    sample = list(itertools.islice(lines(file, []), 2 * SAMPLE))
    filled = [line.strip() for line in sample if line.strip()][:SAMPLE]
    if len(start) < HEAD:
        sample.append("")  # the last line is whole
    first = filled[0] if filled else ""
    if _JSON.match(first):
        if len(filled) > 1 and _are_json_lines(filled):
            table = json_lines(lines(file, notes))
            if not any(by_words(key) for key in table.columns):
                printed = console(_messages(lines(file, notes)))
                table = printed if printed.count else table
            return Content(format="JSON lines", table=table)
        document = _document(file)
        if document is not None:
            return document
    if first.startswith("<") and (tables := list(html_tables(whole(file)))):
        return Content(format="web page", table=longest(tables))
    if filled and all(_MLFLOW.fullmatch(line) for line in filled):
        return Content(
            format="MLflow metric",
            table=mlflow(file, lines(file, notes)),
        )
    layout = layout_of(sample)
    if layout is not None:
        table = delimited(lines(file, notes), layout, file.stem)
        return Content(format="table", table=table)
    columns = nameless(filled)
    if columns:
        raise UserError(
            f"{file}: is a table of {columns} columns without names; write a line of names above it, such as step,loss,grad_norm"
        )
    return Content(
        format="terminal output",
        table=console(lines(file, notes)),
    )


def mlflow(file: Path, text: Iterable[str]) -> Table:
    """Lines of time, value and step, as MLflow writes them to `metrics/KEY`."""
    table = Table()
    inside = next((p for p in file.parents if p.name == "metrics"), file.parent)
    key = file.relative_to(inside).as_posix()
    for line in text:
        if _MLFLOW.fullmatch(line.strip()):  # a last line may be cut off
            _, value, step = line.split()[:3]
            table.add({"step": step, key: value})
    return table


# -- JSON


def _are_json_lines(sample: Sequence[str]) -> bool:
    """Whether at least half of the lines are objects, and not one object is the whole document."""
    objects = 0
    for line in sample:
        try:
            row = parsed(line)
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
            row = parsed(line)
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, dict):
            table.add(row)
        else:
            table.left_out["lines that are no JSON object"] += 1
    return table


def _messages(text: Iterable[str]) -> Iterator[str]:
    """What was printed, of the objects that a logging library or a container keeps it in."""
    for line in text:
        try:
            row = parsed(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict):
            for key in _MESSAGES & row.keys():
                yield from str(row[key]).split("\n")


def _document(file: Path) -> Content | None:
    """The content of a file of one JSON value, or of several or one that breaks off; None if the text is none."""
    text = whole(file)
    notes = []
    try:
        content = parsed(text)
    except RecursionError as error:
        raise UserError(f"{file}: its JSON is nested too deeply; give {READS}") from error
    except ValueError:
        content = objects_in(text)
        if len(content) < 2:
            return None
        notes.append("The file is no whole JSON value: the objects in it are read.")
    if isinstance(content, dict) and isinstance(content.get("cells"), list):
        return Content(
            format="notebook",
            table=notebook(content["cells"]),
        )
    table = Table(notes=notes)
    planned = content.get("max_steps") if isinstance(content, dict) else None
    if type(planned) is int and planned < LARGEST:
        table.announced = planned
    rows, others = rows_of(content)
    for row in rows:
        if isinstance(row, Mapping):
            table.add(row)
        else:
            table.left_out["rows that are no JSON object"] += 1
    if others:
        counts = ", ".join(str(count) for count in (len(rows), *others[:8]))
        table.notes.append(f"The file has lists of {counts} rows: the longest is read.")
    return Content(format="JSON", table=table)


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
    """The longest log among the outputs of a notebook: a table that the trainer drew, or printed text.

    Args:
        cells: of the notebook, as in its JSON.

    Returns:
        The rows; an empty table if there are none.
    """
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
                made.extend(html_tables(page))
            printed.append(_text(output.get("text")))
        text = "".join(printed).split("\n")
        layout = layout_of(text)
        made.append(delimited(text, layout) if layout else console(text))
    return longest(made)


def longest(made: Iterable[Table]) -> Table:
    """The table with the most rows, which says so if others have rows, too."""
    logs = sorted(
        (t for t in made if t.count),
        key=lambda table: table.count,
        reverse=True,
    )
    if not logs:
        return Table()
    if len(logs) > 1:
        counts = ", ".join(str(table.count) for table in logs[:8])
        logs[0].notes.append(
            f"The file has {len(logs)} logs, of {counts} rows: the longest is read."
        )
    return logs[0]


def html_tables(page: str) -> Iterator[Table]:
    """The tables of an HTML text that have rows.

    Args:
        page: an HTML text, complete or not.
    """
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
    """Tag -> step -> value of one event file.

    Args:
        file: an event file of TensorBoard, of scalars or of tensors with one value.
    """
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
