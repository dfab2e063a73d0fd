"""Tables of text: CSV, TSV, Markdown, boxes of a terminal, and columns between spaces."""

from __future__ import annotations

import csv
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from sharpscope.diagnose.bars import BAR
from sharpscope.diagnose.tables import Table
from sharpscope.diagnose.text import plain

SAMPLE = 40
"""Lines by which a table is recognized."""
_CELLS = 200
"""Cells of a line that are looked at to tell a table."""
_SPACES = {"  ": re.compile(r"\s{2,}"), " ": re.compile(r"\s+")}
"""Delimiters that are spaces, two or more and any number of them."""
_DELIMITERS = ("\t", ";", ",", "|", *_SPACES)
_RULE = re.compile(r"[\s|:+=-]*")
_NUMBER = re.compile(
    r"[-+−]?(?:\d[\d.,]*(?:[eE][-+]?\d+)?\s?[%kKMBG]?|nan|inf)|No Log|", re.IGNORECASE
)
_NO_NAME = re.compile(r"[{}]|=\s*\d|[:=]$")
_KEY = re.compile(r"[A-Za-z_][\w./@-]*")
_COMMA = re.compile(r"-?[\d.]*\d,\d+(?:[eE][-+]?\d+)?")
_THOUSANDS = re.compile(r"-?[1-9]\d{0,2}(?:,\d{3})+")
_POINT = re.compile(r"-?\d*\.\d+(?:[eE][-+]?\d+)?")
# lines of boxes: the vertical ones part cells, the others underline
_BOX = {code: "|" if chr(code) in "│┃║" else "-" for code in range(0x2500, 0x2580)}
_CLOCKS = frozenset({"wall time", "step", "timestamp", "time", "epoch", "iteration"})


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How the cells of a table of text are told apart."""

    delimiter: str  # a character, or a key of _SPACES
    skipped: int  # lines before the header
    decimal_comma: bool  # whether numbers are written like 1.234,5
    numbered: bool  # whether lines begin with a number that has no name, as pandas prints them


def layout_of(sample: Sequence[str]) -> Layout | None:
    """The layout of a table by its first lines: a header of names, then lines of as many cells, half of them numbers.

    Args:
        sample: the first lines; the last one may be cut off and is not looked at.

    Returns:
        The layout; None if the lines are no table.
    """
    sample = [_line(line) for line in sample]
    if any(BAR.search(line) for line in sample):
        return None
    for delimiter in _DELIMITERS:
        for skipped in range(min(10, len(sample) - 1)):
            if delimiter in sample[skipped]:
                found = _layout(sample[:-1], delimiter, skipped)
                if found is not None:
                    return found
    return None


def _layout(lines: Sequence[str], delimiter: str, skipped: int) -> Layout | None:
    """The layout of a table whose cells this delimiter parts and before whose header so many lines stand; None if it is none."""
    cells = _cells(lines[skipped:], delimiter)
    try:
        rows = [row for row in itertools.islice(cells, SAMPLE) if row]
    except csv.Error:
        return None
    if not rows:
        return None
    header, *body = rows
    header = _unmarked(header)
    longer = all(len(row) == len(header) + 1 for row in body)
    # empty last cells are a delimiter at the end of each line, not an index at its start
    numbered = bool(body) and longer and any(row[-1] for row in body)
    if numbered:
        header = ["index", *header]
    elif longer:
        body = [row[:-1] for row in body]
    plain_names = delimiter != " " or all(_KEY.fullmatch(cell) for cell in header)
    if not plain_names or not _is_table(header, body):
        return None
    return Layout(
        delimiter=delimiter,
        skipped=skipped,
        decimal_comma=_has_commas(body, delimiter),
        numbered=numbered,
    )


def nameless(sample: Sequence[str]) -> int:
    """Columns of a table that has no header: of lines of as many numbers each; 0 of another text.

    Args:
        sample: the first lines that are not empty.
    """
    for delimiter in _DELIMITERS:
        try:
            rows = [[cell.strip() for cell in row] for row in _cells(sample, delimiter)]
        except csv.Error:
            continue
        columns = len(rows[0]) if rows else 0
        if len(rows) < 3 or columns < 2 or any(len(row) != columns for row in rows):
            continue
        cells = [cell for row in rows for cell in row if cell]
        if cells and all(_NUMBER.fullmatch(cell) for cell in cells):
            return columns
    return 0


def _line(text: str) -> str:
    """A line without colors, with plain characters in place of a box's."""
    text = plain(text)
    return text if text.isascii() else text.translate(_BOX)


def _cells(text: Iterable[str], delimiter: str) -> Iterator[list[str]]:
    """The cells of each line; none of a line that only underlines a header."""
    if delimiter in (",", ";"):
        yield from csv.reader((f"{_line(line)}\n" for line in text), delimiter=delimiter)
        return
    for line in text:
        stripped = _line(line).strip("\n\r")
        if delimiter != "\t":
            stripped = stripped.strip().strip("|")
        if _RULE.fullmatch(stripped):
            yield []
        else:
            spaces = _SPACES.get(delimiter)
            cells = spaces.split(stripped) if spaces else stripped.split(delimiter)
            yield [cell.strip() for cell in cells]


def _unmarked(header: list[str]) -> list[str]:
    """A header without the mark of a comment, which NumPy writes before it."""
    if header[:1] == ["#"]:
        return header[1:]
    return [header[0].removeprefix("#").strip(), *header[1:]] if header else header


def _is_table(header: Sequence[str], rows: Sequence[list[str]]) -> bool:
    """Whether these are names, and lines of as many cells of which a third are numbers, one a line at least."""
    if not rows or len(header) < 2:
        return False
    named = [cell for cell in header if re.search(r"[A-Za-z]", cell)]
    if len(named) < len(header) - 1 or any(_NO_NAME.search(cell) for cell in header):
        return False
    names = set(header)
    body = list(itertools.takewhile(lambda row: not _is_header(row, names), rows))
    alike = [row for row in body if len(row) == len(header)]
    if not body or len(alike) < 0.8 * len(body):
        return False
    filled = [cell for row in alike for cell in row[:_CELLS] if cell.strip()]
    numbers = [cell for cell in filled if _NUMBER.fullmatch(cell.strip())]
    return 3 * len(numbers) >= len(filled) and len(numbers) >= len(alike)


def _is_header(row: Sequence[str], names: set[str]) -> bool:
    """Whether a row is a header again, as a resumed training writes it: half of its cells are names of the last one."""
    return 2 * len(names.intersection(row) - {""}) >= len(row) > 0


def _has_commas(rows: Iterable[list[str]], delimiter: str) -> bool:
    """Whether numbers have a decimal comma: one is like "0,5", or some have a comma and none a point alone."""
    cells = [cell.strip() for row in rows for cell in row[:_CELLS]]
    with_comma = [cell for cell in cells if _COMMA.fullmatch(cell)]
    if any(cell.lstrip("-").startswith("0,") for cell in with_comma):
        return True
    # "1,234" alone is a decimal comma where columns are parted by semicolons, as spreadsheets of such countries do
    if delimiter != ";" and all(_THOUSANDS.fullmatch(cell) for cell in with_comma):
        return False
    return bool(with_comma) and not any(_POINT.fullmatch(cell) for cell in cells)


def delimited(text: Iterable[str], layout: Layout, name: str = "") -> Table:
    """The rows of a table of text.

    A cell "nan" was logged, an empty one and "No Log" were not.

    Args:
        text: all lines of the file.
        layout: how its cells are told apart (`layout_of`).
        name: of the file, which names a single column of values.
    """
    csv.field_size_limit(1 << 27)
    table = Table()
    rows = _cells(itertools.islice(text, layout.skipped, None), layout.delimiter)
    header: list[str] = []
    names: set[str] = set()
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
        if not header or (row[0] in names and _is_header(row, names)):
            names = set(row)
            header = _header(["index", *row] if layout.numbered else _unmarked(row), name)
            continue
        if any(row[len(header) :]):
            table.left_out["lines with more cells than the header has names"] += 1
            continue
        if layout.decimal_comma:
            row = [_with_point(cell) for cell in row]
        table.add({key: value for key, value in zip(header, row, strict=False) if value})


def _with_point(cell: str) -> str:
    return cell.replace(".", "").replace(",", ".") if _COMMA.fullmatch(cell) else cell


def _header(cells: Sequence[str], name: str) -> list[str]:
    """The keys of a table, each once; of one column of values the name of the file, as in TensorBoard's "run-a-tag-loss.csv"."""
    names = [cell.strip().lstrip("\ufeff") for cell in cells]
    if [cell.lower() for cell in names if cell.lower() not in _CLOCKS] == ["value"]:
        of_file = name.rpartition("tag-")[2] or "Value"
        names = [of_file if cell.lower() == "value" else cell for cell in names]
    seen: Counter[str] = Counter()
    keys = []
    for cell in names:
        seen[cell] += 1
        keys.append(cell if seen[cell] == 1 else f"{cell} ({seen[cell]})")
    return keys
