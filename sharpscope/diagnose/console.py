"""What trainers print: dicts, verl's `step:N - key:value`, lines and blocks of `key: value`, between progress bars and messages."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from sharpscope.diagnose.names import by_words, is_evaluation
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
_EPOCH = re.compile(r"\W*epoch\W{0,3}(\d+)(?![\w.])", re.IGNORECASE)
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
        """Append a row that was printed after `bars` progress bars."""
        self.rows.append(row)
        self.places.append(bars)

    def known(self) -> int:
        """Values whose key names a quantity; the learning rate, which settings have too, is not counted."""
        keys = Counter(key for row in self.rows for key in row)
        return sum(count for key, count in keys.items() if by_words(key) not in (None, "lr"))


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
    kinds = [_without_settings(printed) for printed in (dicts, dashes, pairs)]
    logs = [printed for printed in kinds if len(printed.rows) >= 2]
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


def _line_row(
    line: str, block: dict[str, object] | None, printed: _Printed, bars: int
) -> dict[str, object] | None:
    """Read a line of `key: value`, as a row of its own or as a part of the block that a line with a step began."""
    step, epoch = _STEP.search(line), _EPOCH.match(line)
    found = {
        (name or equal or spaced).strip(): number or of_equal or of_space
        for name, number, equal, of_equal, spaced, of_space in _LINE_PAIR.findall(line)
    }
    if step is not None:
        row: dict[str, object] = {**found, "step": step[1]}
        printed.add(row, bars)
        return row
    if epoch is not None and found:
        printed.add({"epoch": epoch[1], **found}, bars)
    elif block is not None and len(found) == 1:
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
    steps: Mapping[int, int] = {}
    if not any(_STEPS & row.keys() for row in printed.rows):
        steps = _bar_steps(printed, bars)
    for number, row in enumerate(printed.rows):
        if number in steps:
            row[BAR_KEY] = steps[number]
        table.add(row)
    return table


def _bar_steps(printed: _Printed, bars: list[tuple[int, int]]) -> Mapping[int, int]:
    """Row -> step of the bar after it, which trainers draw again below what they print; else of the bar before it.

    Bars of evaluations and downloads have other totals than the training's, which most rows stand beside.
    """
    beside: Counter[int] = Counter()
    for place in printed.places:
        beside.update({total for _, total in bars[max(0, place - 1) : place + 1]})
    if not beside:
        return {}
    training = beside.most_common(1)[0][0]
    drawn = [(at, done) for at, (done, total) in enumerate(bars) if total == training]
    found, upcoming = {}, 0  # the first bar that was drawn after the row
    for row, place in enumerate(printed.places):
        while upcoming < len(drawn) and drawn[upcoming][0] < place:
            upcoming += 1
        found[row] = drawn[min(upcoming, len(drawn) - 1)][1]
    if any(later < earlier for (_, earlier), (_, later) in itertools.pairwise(drawn)):
        return found  # a bar for each epoch
    return _spread(found, [any(not is_evaluation(key) for key in row) for row in printed.rows])


def _spread(steps: Mapping[int, int], trained: Sequence[bool]) -> dict[int, int]:
    """Steps (by row) of which several rows that print a training have the same: they lie evenly up to it.

    Output that is buffered brings such rows in bunches, after the bars of all their steps.
    """
    found, before = dict(steps), 0
    rows = [row for row in steps if trained[row]]
    for step, bunch in itertools.groupby(rows, key=steps.__getitem__):
        for number, row in enumerate(members := list(bunch), 1):
            if step > before:
                found[row] = round(before + (step - before) * number / len(members))
        before = step
    return found
