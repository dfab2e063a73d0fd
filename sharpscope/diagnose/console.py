"""What trainers print: dicts, verl's `step:N - key:value`, lines and blocks of `key: value`, between progress bars and messages."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from sharpscope.diagnose.tables import Table
from sharpscope.diagnose.text import plain

BAR_KEY = "progress bar"
"""Key under which a row has the step that the progress bar showed."""

_NUMBER = r"[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|(?:nan|inf(?:inity)?)\b)"
_WRAPPED = rf"(?:np\.\w+\(|(?:torch\.)?tensor\(|array\()?['\"]?({_NUMBER}(?:/\d+)?)"
_DICT_PAIR = re.compile(rf"""['"]([^'"]{{1,200}})['"]\s*:\s*{_WRAPPED}""", re.IGNORECASE)
_DASH_PAIR = re.compile(rf"(?:^| - )([^\s:]+):{_WRAPPED}", re.IGNORECASE)
_DASH_START = re.compile(r"(?:^|[\s)])step:\d+ - ")
_NAMES = r"[A-Za-z][\w/.@-]*(?: [A-Za-z(][\w/.@()-]*){0,3}"
_LINE_PAIR = re.compile(
    rf"({_NAMES})\s*:\s*({_NUMBER})(?![\w:])"
    rf"|([A-Za-z][\w/.@-]*)\s*=\s*({_NUMBER})(?![\w:])"
    rf"|\b((?:\w+[ _])?(?:loss|reward|kl|entropy|lr|grad[ _]norm|accuracy))\s+({_NUMBER})(?![\w:])",
    re.IGNORECASE,
)
_STEP = re.compile(
    r"(?<![\w-])(?:global[_ ]|optimizer[_ ]|train(?:ing|er)?[_/ ](?:global_)?)?(?:step|iter|iteration)\b"
    r"\W{0,3}(\d+)(?![\w.]*\d*s/)",
    re.IGNORECASE,
)
_BAR = re.compile(r"(?:^|\s)\d+%\|[^|]*\|\s*(\d+)/(\d+)\s*\[")
_RAY = re.compile(r"^(?:\x1b\[\d+m)?\([^()]*pid=\d+[^()]*\)\s?")
_BULLETS = " \t•*-–|│║>"

_STEPS = frozenset({"step", "global_step", "global_step/max_steps", "current_steps", "iteration"})


@dataclass
class _Printed:
    """The rows of one way to print them, and where each stands among the progress bars."""

    rows: list[dict[str, object]] = field(default_factory=list)
    places: list[int] = field(default_factory=list)  # bars that were printed before the row

    def add(self, row: dict[str, object], bars: int) -> None:
        self.rows.append(row)
        self.places.append(bars)


def console(lines: Iterable[str]) -> Table:
    """The rows that a log of a terminal holds; without any the table is empty."""
    dicts, dashes, pairs = _Printed(), _Printed(), _Printed()
    bars: list[tuple[int, int]] = []
    block: dict[str, object] | None = None
    for part in _parts(lines):
        line = _RAY.sub("", plain(part))
        if "%|" in line:
            bars.extend((int(bar[1]), int(bar[2])) for bar in _BAR.finditer(line))
        if "{" in line:
            row = _dict_row(line)
            if row:
                dicts.add(row, len(bars))
                continue
        if _DASH_START.search(line):
            dashes.add(dict(_DASH_PAIR.findall(line[line.index("step:") :])), len(bars))
            continue
        block = _line_row(line, block, pairs, len(bars))
    for printed in (dicts, dashes, pairs):
        printed_rows = _without_settings(printed)
        if len(printed_rows.rows) >= 2:
            return _table(printed_rows, bars)
    return Table()


def _parts(lines: Iterable[str]) -> Iterable[str]:
    """Lines, cut where a progress bar returned to their beginning."""
    for line in lines:
        if "\r" in line:
            yield from line.split("\r")
        else:
            yield line


def _dict_row(line: str) -> dict[str, object]:
    """The numbers of a dict that Python or a JSON encoder printed within a line."""
    text = line[line.index("{") :]
    if text.startswith('{"') and text.rstrip().endswith("}"):
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            pass
        else:
            return found if isinstance(found, dict) else {}
    return dict(_DICT_PAIR.findall(text))


def _line_row(
    line: str, block: dict[str, object] | None, printed: _Printed, bars: int
) -> dict[str, object] | None:
    """Read a line of `key: value`, as a row of its own or as a part of the block that a line with a step began."""
    step = _STEP.search(line)
    found = {
        (name or equal or spaced).strip(): number or of_equal or of_space
        for name, number, equal, of_equal, spaced, of_space in _LINE_PAIR.findall(line)
    }
    if step is not None:
        row: dict[str, object] = {**found, "step": step[1]}
        printed.add(row, bars)
        return row
    if block is not None and len(found) == 1:
        (name,) = found
        if line.strip(_BULLETS).startswith(name):
            block.setdefault(name, found[name])
    return block


def _without_settings(printed: _Printed) -> _Printed:
    """The rows without those of other things, such as printed settings: most of their keys stand in no other row."""
    counts = Counter(key for row in printed.rows for key in row)
    kept = _Printed()
    for row, place in zip(printed.rows, printed.places, strict=True):
        values = [key for key in row if key not in _STEPS]
        common = [key for key in values if counts[key] > 1 or key.startswith("eval")]
        if values and 2 * len(common) >= len(values):
            kept.add(row, place)
    return kept


def _table(printed: _Printed, bars: list[tuple[int, int]]) -> Table:
    """The table of rows; those without a step get that of the training's progress bar."""
    table = Table()
    with_bar = 0
    steps: Mapping[int, int] = {}
    if not any(_STEPS & row.keys() for row in printed.rows):
        steps = _bar_steps(printed.places, bars)
    for number, row in enumerate(printed.rows):
        if number in steps:
            row[BAR_KEY] = steps[number]
            with_bar += 1
        table.add(row)
    if with_bar:
        table.notes.append("The rows have no step: it is that of the progress bar beside them.")
    return table


def _bar_steps(places: list[int], bars: list[tuple[int, int]]) -> dict[int, int]:
    """Row -> step of the bar after it, which trainers draw again below what they print; else of the bar before it.

    Bars of evaluations and downloads have other totals than the training's, which most rows stand beside.
    """
    beside: Counter[int] = Counter()
    for place in places:
        beside.update({total for _, total in bars[max(0, place - 1) : place + 1]})
    if not beside:
        return {}
    training = beside.most_common(1)[0][0]
    after: dict[int, int] = {}
    upcoming: int | None = None
    at = len(bars)
    for row in range(len(places) - 1, -1, -1):
        while at > places[row]:
            at -= 1
            done, total = bars[at]
            upcoming = done if total == training else upcoming
        if upcoming is not None:
            after[row] = upcoming
    before: int | None = None
    at, found = 0, {}
    for row, place in enumerate(places):
        for done, total in bars[at:place]:
            before = done if total == training else before
        at = place
        step = after.get(row, before)
        if step is not None:
            found[row] = step
    return found
