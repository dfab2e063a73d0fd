"""What trainers print: dicts, verl's `step:N - key:value`, lines and blocks of `key: value`, between progress bars and messages."""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from sharpscope.diagnose.bars import BAR, STEPS, with_steps_of_bars
from sharpscope.diagnose.names import by_words
from sharpscope.diagnose.tables import Table
from sharpscope.diagnose.text import plain

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
    rf"({_NAMES})\s*(?::|→|[-=]>)\s*({_NUMBER})(?![\w:])"
    rf"|([A-Za-z][\w/.@-]*)\s*=\s*\"?({_NUMBER})(?![\w:])"
    r"|\b((?:[A-Za-z]\w*[ _])?(?:loss|reward|kl|entropy|lr|grad[ _]norm|accuracy)(?:[ _](?:mean|avg))?)"
    rf"\s+({_NUMBER})(?![\w:])",
    re.IGNORECASE,
)
_WHOLE = r"[1-9]\d{0,2}(?:,\d{3})+(?![\d,])|\d+"
_STEP = re.compile(
    r"(?<![\w-])(?:global[_ ]|optimizer[_ ]|train(?:ing|er)?[_/ ](?:global_)?)?(?:step|iter|iteration)\b"
    rf"[^\w\n]{{0,12}}({_WHOLE})(?![\w.]*\d*s/)",
    re.IGNORECASE,
)
_STEP_OF_ALL = re.compile(
    rf"\b(?:global|train(?:ing)?)[ _]step[^\w\n]{{0,12}}({_WHOLE})", re.IGNORECASE
)
"""Step of the whole training, which may stand beside one of an epoch."""
_ROLLOUT = re.compile(r"\b(?:rollout|perf|eval) (\d+): *$")
"""Number of a rollout, with which slime begins what it prints of it."""
_ANNOUNCED = re.compile(
    r"\b(?:step|iter|iteration)\b[^\w\n]{0,12}\d+ ?/ ?(\d{1,9})\b", re.IGNORECASE
)
"""Number of steps beside a step."""
_ERROR = re.compile(
    r"\s*(?:[\w.]*(?:Error|Exception|Interrupt)(?:: |$)|Killed\b|Segmentation fault|Bus error"
    r"|(?:slurmstepd|srun): error|.*\b(?:CUDA out of memory|[oO]om[-_ ]kill|OOM Killer|SIGKILL|DUE TO TIME LIMIT))"
)
"""Lines that say why a process ended."""
_CELLS = re.compile(rf"(?<=[│┃|]) *([A-Za-z][^│┃|:]*?) *[│┃|] *({_NUMBER}) *(?=[│┃|])")
"""Names and values in the cells of a table that is printed at each step."""
_RULE = re.compile(r"\s*[-=+─━┌┬┐├┼┤╭╮╞╡]{8,}\s*$")
"""A line that begins or ends a table."""
_COUNTED = re.compile(
    rf"\b(?:(?:num_)?updates?|episode|batch|rollout|round|steps)\b[^\w\n]{{0,4}}({_WHOLE})"
    r"|\[ ?(\d+) ?/ ?\d+\]",
    re.IGNORECASE,
)
"""What counts the lines of a training that has no step."""
_EPOCH = re.compile(r"\W*epoch[^\w\n]{0,12}(\d+)(?![\w.])", re.IGNORECASE)
_POSTFIX = re.compile(rf"({_NAMES}) ?[=:] ?({_NUMBER})(?=[,\]\s])")
"""A name and a value within the brackets of a progress bar."""
_RAY = re.compile(r"^(?:\x1b\[\d+m)?\([^()]*pid=\d+[^()]*\)\s?")
_BULLETS = re.compile(r"\W*")


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
            if key not in STEPS:
                values[column.rows()] += 1
                if len(column.values) > 1 or key.startswith("eval"):
                    common[column.rows()] += 1
        kept = (values > 0) & (2 * common >= values)
        part = self.table.part(kept)
        part.announced = self.table.announced  # also where the last line has a step and no value
        return _Printed(part, array("I", np.array(self.places)[kept].tolist()))


class _Reader:
    """Reads a terminal's lines into rows, apart for each way to print them; one of these is the log."""

    def __init__(self) -> None:
        self.dicts = _Printed()
        self.dashes = _Printed()  # verl's "step:1 - key:value"
        self.pairs = _Printed()  # lines, and blocks, that have a step or an epoch
        self.counted = _Printed()  # lines of known quantities with another count
        self.boxes = _Printed()  # tables of names and values, one a step
        self.postfixes = _Printed()  # values within progress bars
        self.bars: list[tuple[int, int]] = []
        self.in_block = False  # whether a line with a step came before
        self.after_rule = False
        self.error = ""
        self.rows_before_error = [0] * len(self.kinds)

    @property
    def kinds(self) -> tuple[_Printed, ...]:
        """The ways to print a row, of which the first one of equal ones counts."""
        return self.dicts, self.dashes, self.pairs, self.counted, self.boxes, self.postfixes

    def read(self, line: str) -> None:
        """Read one line."""
        if _ERROR.match(line):
            self.error = line.strip()[:200]
            self.rows_before_error = [len(kind.places) for kind in self.kinds]
        if "%|" in line:
            self._bars(line)
        row = _dict_row(line) if "{" in line else {}
        if row:
            before = line[: line.index("{")]
            rollout = _ROLLOUT.search(before)
            step = rollout[1] if rollout else _step(before)
            self.dicts.add({"step": step, **row} if step else row, len(self.bars))
        elif _DASH_START.search(line):
            found = _DASH_PAIR.findall(line[line.index("step:") :])
            self.dashes.add(dict(found), len(self.bars))
        else:
            self._pairs(line)

    def _bars(self, line: str) -> None:
        within = _POSTFIX.findall(line[line.rindex("%|") :]) if line.endswith("]") else ()
        if within:
            self.postfixes.add(dict(within), len(self.bars))
        self.bars.extend((int(bar[1]), int(bar[2])) for bar in BAR.finditer(line))

    def _pairs(self, line: str) -> None:
        """Read a line of `key: value`, as a row of its own or as a part of the block that a line with a step began."""
        step = _step(line)
        found = {
            (name or equal or spaced).strip(): number or of_equal or of_space
            for name, number, equal, of_equal, spaced, of_space in _LINE_PAIR.findall(line)
        }
        if step:
            self._step(line, step, found)
        elif found and (epoch := _EPOCH.match(line)):
            self.pairs.add({"epoch": epoch[1], **found}, len(self.bars))
        elif line.lstrip().startswith(("│", "┃", "|")):
            self._cells(line)
        elif found:
            self._without_step(line, found)
        self.after_rule = bool(_RULE.match(line))

    def _step(self, line: str, step: str, found: Mapping[str, str]) -> None:
        self.pairs.add({**found, "step": step}, len(self.bars))
        announced = _ANNOUNCED.findall(line)
        if announced:
            self.pairs.table.announced = int(announced[-1])
        self.in_block = True

    def _cells(self, line: str) -> None:
        """Read names and values in cells, of a block or of a table that a rule began."""
        cells = _CELLS.findall(line)
        if self.after_rule:
            self.boxes.add(dict(cells), len(self.bars))
        # read both ways: which of them is the log shows at its end
        for table in (self.boxes.table, *([self.pairs.table] if self.in_block else [])):
            for name, number in cells if table.count else ():
                table.complete(name, number)

    def _without_step(self, line: str, found: Mapping[str, str]) -> None:
        if self.in_block and len(found) == 1:
            ((name, number),) = found.items()
            if line.startswith(name, _BULLETS.match(line).end()):  # type: ignore[union-attr]
                self.pairs.table.complete(name, number)
        elif len(found) > 1:
            count = _COUNTED.search(line)
            if count and any(by_words(name) not in (None, "lr") for name in found):
                number = (count[1] or count[2]).replace(",", "")
                self.counted.add({**found, "step": number}, len(self.bars))

    def table(self) -> Table:
        """The rows of the way to print them that has most known values."""
        kinds = [kind.without_settings() for kind in self.kinds]
        logs = [printed for printed in kinds if printed.table.count >= 2]
        if not logs:
            return Table()
        best = max(logs, key=_Printed.known)
        table = with_steps_of_bars(best.table, best.places, self.bars)
        at = next(number for number, kind in enumerate(kinds) if kind is best)
        if self.rows_before_error[at] == len(
            self.kinds[at].places
        ):  # none of the log came after it
            table.error = self.error
        return table


def console(lines: Iterable[str]) -> Table:
    """The rows that a log of a terminal holds; without any the table is empty."""
    reader = _Reader()
    for part in _parts(lines):
        reader.read(_RAY.sub("", plain(part)))
    return reader.table()


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
    return found[1].replace(",", "") if found else ""
