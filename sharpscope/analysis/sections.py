"""Sections: what a run or a study is shown as, in the terminal and on the page. A section has a title and one content."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal

import pandas as pd
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from sharpscope.analysis.text import number, visible
from sharpscope.traces import Row

if TYPE_CHECKING:  # `show` needs no plotting library
    from matplotlib.figure import Figure

NUMERIC = {*"0123456789+-−–.<~", ""}
"""What a number as text begins with."""
NAME = 16
"""Letters of the longest name up to which a column of names is not folded."""
UP, DOWN = "bold reverse deep_sky_blue3", "bold reverse dark_orange3"


@dataclass(frozen=True)
class Section:
    """One piece of what is shown.

    Attributes:
        title: its heading; empty for none.
        content: a table, a figure, or text.
        note: what the table or figure needs to be read, in one or two sentences.
        part: the part of the page that it belongs to; parts are shown in the order of their first section.
        name: of the figure's or table's file.
        records: the rows as numbers, for `--json`; None: as the table shows them.
        step: that it is about, where the page shows it with this step only.
    """

    title: str
    content: pd.DataFrame | Figure | str
    note: str = ""
    part: str = "Found"
    name: str = ""
    records: Sequence[Mapping[str, object]] | None = None
    step: int | None = None


@dataclass(frozen=True)
class Marked:
    """A token in its sentence, as a cell of a table.

    Attributes:
        before, token, after: text.
        direction: 1 if its loss makes it more likely, -1 if less likely, 0 if that is not known.
        run, step, rollout, position: where it is, by which the page links to it.
    """

    before: str
    token: str
    after: str
    direction: int
    run: str
    step: int
    rollout: int
    position: int

    def __str__(self) -> str:
        return f"{self.before}[{self.token}]{self.after}"


def cell_text(value: object) -> str:
    """A cell as text: three significant digits for a number, a dash for what is missing."""
    if isinstance(value, bool | str | Marked):
        return str(value)
    if value is None or value is pd.NA or value is pd.NaT:
        return "–"
    if isinstance(value, numbers.Integral):
        return f"{int(value):,}" if abs(int(value)) >= 10_000 else str(int(value))
    if isinstance(value, numbers.Real):
        real = float(value)
        return f"{real:,.0f}" if math.isfinite(real) and abs(real) >= 1000 else number(real)
    return str(value)


def is_text(column: pd.Series) -> bool:
    """Whether a column is aligned to the left: words or sentences, and not numbers as text. A prompt may be a sum."""
    return column.name == "prompt" or any(
        isinstance(c, Marked) or (isinstance(c, str) and c[:1] not in NUMERIC) for c in column
    )


def records_of(frame: pd.DataFrame) -> list[Row]:
    """The rows of a frame as numbers by column, for `Section.records`."""
    return [{str(name): value for name, value in row.items()} for row in frame.to_dict("records")]


def to_records(sections: Iterable[Section]) -> dict[str, object]:
    """Sections for scripts: `title`, `part`, `note`, and `text` or `rows`; a cell with a token is an object."""
    made: list[Row] = []
    for section in sections:
        content: Row = {"text": section.content}
        if isinstance(section.content, pd.DataFrame):
            rows = section.records or section.content.to_dict("records")
            cells = [
                {str(k): asdict(v) if isinstance(v, Marked) else v for k, v in row.items()}
                for row in rows
            ]
            content = {"rows": cells}
        if "rows" in content or isinstance(section.content, str):
            made.append(
                {
                    "title": section.title,
                    "part": section.part,
                    **content,
                    "note": section.note,
                }
            )
    return {"sections": made}


def to_terminal(sections: Iterable[Section]) -> RenderableType:
    """Sections for rich; figures, which a terminal cannot show, are left out.

    Text is printed as it is: markup in it has no effect, and control characters are replaced.
    """
    parts: list[RenderableType] = []
    for section in sections:
        if not isinstance(section.content, str | pd.DataFrame):
            continue
        if section.title:
            parts.append(Text(visible(section.title), "bold"))
        if isinstance(section.content, str):
            parts += [Text(visible(line)) for line in section.content.splitlines()]
        else:
            parts.append(_table(section.content))
        parts += [Text(visible(section.note), "dim"), Text()] if section.note else [Text()]
    return Group(*parts[:-1])


def _table(frame: pd.DataFrame) -> Table:
    """A table for rich; a column of sentences takes the width that is left."""
    table = Table(
        box=None,
        pad_edge=False,
        padding=(0, 2, 0, 0),
        header_style="dim",
    )
    for at, name in enumerate(frame.columns):
        column = frame.iloc[:, at]
        wide = any(isinstance(value, Marked) for value in column)
        justify: Literal["left", "right"] = "left" if is_text(column) else "right"
        ratio = 1 if wide else None
        whole = justify == "left" and all(len(str(value)) <= NAME for value in column)
        title = Text(visible(name))
        # fold: a word that is too long goes on in the next line, by default it is cut
        table.add_column(
            title,
            justify=justify,
            ratio=ratio,
            overflow="fold",
            no_wrap=whole,
        )
    for row in frame.itertuples(index=False, name=None):
        table.add_row(
            *(_sentence(c) if isinstance(c, Marked) else Text(visible(cell_text(c))) for c in row)
        )
    return table


def _sentence(cell: Marked) -> Text:
    """A token in its sentence, colored by its direction."""
    style = {1: UP, -1: DOWN}.get(cell.direction, "bold reverse")
    text = Text(visible(cell.before), "dim").append(f"[{visible(cell.token)}]", style)
    return text.append(visible(cell.after), "dim")
