"""What trainers print: dicts, verl's `step:N - key:value`, lines and blocks of `key: value`, between progress bars and messages."""

from __future__ import annotations

import itertools
import json
import re
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from sharpscope.diagnose.names import by_words, is_evaluation
from sharpscope.diagnose.tables import Table
from sharpscope.diagnose.text import plain
from sharpscope.rules.measures import Flags

BAR_KEY = "progress bar"
"""Key under which a row has the step that the progress bar showed."""

_NUMBER = (
    r"[-+]?(?:[1-9]\d{0,2}(?:,\d{3})+(?:\.\d+)?(?!\d)|(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
    r"|(?:nan|inf(?:inity)?)\b)(?: ?%(?!\|)|[kKMBG]\b)?"
)
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
    r"[^\w\n]{0,12}(\d+)(?![\w.]*\d*s/)",
    re.IGNORECASE,
)
_STEP_OF_ALL = re.compile(r"\b(?:global|train(?:ing)?)[ _]step[^\w\n]{0,12}(\d+)", re.IGNORECASE)
"""Step of the whole training, which may stand beside one of an epoch."""
_CELLS = re.compile(rf"(?<=[│┃|]) *([A-Za-z][^│┃|:]*?) *[│┃|] *({_NUMBER}) *(?=[│┃|])")
"""Names and values in the cells of a table that is printed at each step."""
_EPOCH = re.compile(r"\W*epoch[^\w\n]{0,12}(\d+)(?![\w.])", re.IGNORECASE)
BAR = re.compile(r"(?:^|\s)\d+%\|[^|]*\|\s*(\d+)/(\d+)\s*\[")
_RAY = re.compile(r"^(?:\x1b\[\d+m)?\([^()]*pid=\d+[^()]*\)\s?")
_BULLETS = " \t•*-–|│║>"

_STEPS = frozenset({"step", "global_step", "global_step/max_steps", "current_steps", "iteration"})


@dataclass
class _Printed:
    """The rows of one way to print them, and where each stands among the progress bars."""

    table: Table = field(default_factory=Table)
    # bars that were printed before each row
    places: array[int] = field(default_factory=lambda: array("I"))

    def add(self, row: Mapping[str, object], bars: int) -> None:
        """Append a row that was printed after `bars` progress bars."""
        self.table.add(row)
        self.places.append(bars)

    def known(self) -> int:
        """Values whose key names a quantity; the learning rate, which settings have too, is not counted."""
        named = (c for key, c in self.table.columns.items() if by_words(key) not in (None, "lr"))
        return sum(len(column.values) for column in named)

    def without_settings(self) -> _Printed:
        """The rows without those of other things, such as printed settings: most of their keys stand in no other row."""
        values = np.zeros(self.table.count)
        common = np.zeros(self.table.count)
        for key, column in self.table.columns.items():
            if key not in _STEPS:
                values[column.rows()] += 1
                if len(column.values) > 1 or key.startswith("eval"):
                    common[column.rows()] += 1
        kept = (values > 0) & (2 * common >= values)
        return _Printed(self.table.part(kept), array("I", np.array(self.places)[kept].tolist()))


def console(lines: Iterable[str]) -> Table:
    """The rows that a log of a terminal holds; without any the table is empty."""
    dicts = _Printed()
    dashes = _Printed()
    pairs = _Printed()
    bars: list[tuple[int, int]] = []
    in_block = False
    for part in _parts(lines):
        line = _RAY.sub("", plain(part))
        if "%|" in line:
            bars.extend((int(bar[1]), int(bar[2])) for bar in BAR.finditer(line))
        if "{" in line:
            row = _dict_row(line)
            if row:
                step = _step(line[: line.index("{")])
                dicts.add({"step": step, **row} if step else row, len(bars))
                continue
        if _DASH_START.search(line):
            dashes.add(dict(_DASH_PAIR.findall(line[line.index("step:") :])), len(bars))
            continue
        in_block = _read_line(line, in_block, pairs, len(bars))
    kinds = [printed.without_settings() for printed in (dicts, dashes, pairs)]
    logs = [printed for printed in kinds if printed.table.count >= 2]
    if not logs:
        return Table()
    return _table(max(logs, key=_Printed.known), bars)  # of equal ones the first


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


def _step(text: str) -> str:
    """The step that a text says; empty if it says none."""
    found = _STEP_OF_ALL.search(text) or _STEP.search(text)
    return found[1] if found else ""


def _read_line(line: str, in_block: bool, printed: _Printed, bars: int) -> bool:
    """Read a line of `key: value`, as a row of its own or as a part of the block that a line with a step began.

    Returns:
        Whether the next line may be a part of a block.
    """
    step = _step(line)
    epoch = _EPOCH.match(line)
    found = {
        (name or equal or spaced).strip(): number or of_equal or of_space
        for name, number, equal, of_equal, spaced, of_space in _LINE_PAIR.findall(line)
    }
    if step:
        printed.add({**found, "step": step}, bars)
        return True
    if epoch is not None and found:
        printed.add({"epoch": epoch[1], **found}, bars)
    elif in_block and line.strip().startswith(("│", "┃", "|")):
        for name, number in _CELLS.findall(line):
            printed.table.complete(name, number)
    elif in_block and len(found) == 1:
        ((name, number),) = found.items()
        if line.strip(_BULLETS).startswith(name):
            printed.table.complete(name, number)
    return in_block


def _table(printed: _Printed, bars: list[tuple[int, int]]) -> Table:
    """The table of rows; those without a step get that of the training's progress bar."""
    table = printed.table
    if not _STEPS & table.columns.keys():
        for row, step in sorted(_bar_steps(printed, bars).items()):
            table.put(BAR_KEY, row, float(step))
    return table


def _bar_steps(printed: _Printed, bars: list[tuple[int, int]]) -> Mapping[int, int]:
    """Row -> step of the bar after it, which trainers draw again below what they print; else of the bar before it.

    The bar before counts if it tells more rows apart, as where bars are not drawn again. Bars of evaluations and downloads have other
    totals than the training's, which most rows stand beside.
    """
    beside: Counter[int] = Counter()
    for place in printed.places:
        beside.update({total for _, total in bars[max(0, place - 1) : place + 1]})
    if not beside:
        return {}
    training = beside.most_common(1)[0][0]
    drawn = [(at, done) for at, (done, total) in enumerate(bars) if total == training]
    at, done = np.array(drawn).T
    upcoming = np.searchsorted(at, printed.places)  # the first bar that was drawn after each row
    after = done[np.minimum(upcoming, len(done) - 1)]
    before = done[np.maximum(upcoming - 1, 0)]
    chosen = before if len(set(before)) > len(set(after)) else after
    found = dict(enumerate(chosen.tolist()))
    if (np.diff(done) < 0).any():
        return found  # a bar for each epoch
    table = printed.table
    return _spread(found, table.rows_with(key for key in table.columns if not is_evaluation(key)))


def _spread(steps: Mapping[int, int], trained: Flags) -> dict[int, int]:
    """Steps (by row) of which several rows that print a training have the same: they lie evenly up to it.

    Output that is buffered brings such rows in bunches, after the bars of all their steps.
    """
    found = dict(steps)
    before = 0
    rows = [row for row in steps if trained[row]]
    for step, bunch in itertools.groupby(rows, key=steps.__getitem__):
        for number, row in enumerate(members := list(bunch), 1):
            if step > before:
                found[row] = round(before + (step - before) * number / len(members))
        before = step
    return found
