"""Read files that somebody else may have written: regular files only, of bounded size, as valid text and JSON.

A read returns a value or raises `UnreadableError` with one reason. A missing file or one without permission is an OSError, as usual.
"""

from __future__ import annotations

import io
import json
import math
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from sharpscope.errors import UserError

BOUNDS_VARIABLE = "SHARPSCOPE_BOUNDS"
"""Environment variable with a number that multiplies every bound on what is read."""
LONGEST_LINE = 256_000_000
"""Longest line of a file of lines [bytes]."""
DEEPEST = 64
"""Deepest nesting of JSON that is read."""
MB = 1_000_000
Json = Any
"""A value in JSON: None, a truth value, a number, a text, a list or a mapping of these."""


class UnreadableError(UserError):
    """A file is not what it should be. `reason` says why, without the file's name."""

    def __init__(self, path: Path | str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.reason = reason


def bound(largest: float) -> float:
    """A bound after the environment variable `BOUNDS_VARIABLE` has multiplied it."""
    text = os.environ.get(BOUNDS_VARIABLE, "1")
    try:
        factor = float(text)
    except ValueError:
        factor = math.nan
    if not 0 < factor < math.inf:
        raise UserError(
            f"{BOUNDS_VARIABLE} = {text!r}: not a positive number; it multiplies the bounds on files"
        )
    return largest * factor


def too_large(what: str, size: float, largest: float) -> str:
    """The reason why something above its bound is not read, and how to raise the bound."""
    factor = math.ceil(size / largest)
    return (
        f"{what} is {size / MB:,.1f} MB, above the bound of {bound(largest) / MB:,.1f} MB; "
        f"if you trust it, set {BOUNDS_VARIABLE}={factor} in the environment"
    )


def check_regular(path: Path, inside: Path | None = None) -> os.stat_result:
    """Status of a regular file.

    Args:
        path: of the file; symbolic links are followed.
        inside: folder that the file may not leave through a symbolic link; None: it may.

    Raises:
        UnreadableError: it is a pipe, a device, a socket or a folder, or a link that leads out of `inside`.
        OSError: there is no such file, or it may not be looked at.
    """
    try:
        status = path.stat()
    except ValueError as error:  # a name with NUL
        raise UnreadableError(repr(str(path)), "is not a file's name") from error
    _check_mode(path, status)
    if inside is not None and _leads_out(path, inside):
        raise UnreadableError(
            path, f"is a link that leads out of {inside}; put the file there instead"
        )
    return status


def _leads_out(path: Path, inside: Path) -> bool:
    """Whether a path leaves a folder through a link; without a link on the way no path is resolved, which is slow."""
    if path.is_relative_to(inside) and ".." not in path.parts:
        below = len(path.parts) - len(inside.parts)
        if not any(one.is_symlink() for one in (path, *path.parents)[:below]):
            return False
    return not path.resolve().is_relative_to(inside.resolve())


def _check_mode(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = "a folder" if stat.S_ISDIR(status.st_mode) else "a pipe, socket or device"
        raise UnreadableError(path, f"is {kind}, not a regular file")


@contextmanager
def open_regular(path: Path, largest: float, inside: Path | None = None) -> Iterator[BinaryIO]:
    """Open a regular file of at most `largest` bytes (times `BOUNDS_VARIABLE`) for reading; see `check_regular`."""
    check_regular(path, inside)
    # Without waiting, should the file have been replaced by a pipe since it was looked at.
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        _check_mode(path, status)
        if status.st_size > bound(largest):
            raise UnreadableError(path, too_large("the file", status.st_size, largest))
        yield file


def read_lines(path: Path, inside: Path | None = None) -> Iterator[tuple[int, str]]:
    """Number, from 1, and text of each line of a regular file in UTF-8 of any size, split at "\\n" alone.

    Raises:
        UnreadableError: not a regular file, not UTF-8, or a line is longer than `LONGEST_LINE`.
    """
    with open_regular(path, math.inf, inside) as file:
        longest = int(bound(LONGEST_LINE))
        for number, line in enumerate(iter(lambda: file.readline(longest + 1), b""), 1):
            if len(line) > longest:
                raise UnreadableError(path, too_large(f"line {number}", len(line), LONGEST_LINE))
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                reason = f"line {number} is not UTF-8 ({error.reason} at byte {error.start})"
                raise UnreadableError(path, reason) from error
            yield number, text


def read_up_to(file: BinaryIO | io.BufferedIOBase, most: int) -> bytes:
    """At most so many bytes of a file, in pieces: one read would set aside the memory for `most` of them."""
    pieces = []
    while most > 0 and (piece := file.read(min(most, 1 << 20))):
        pieces.append(piece)
        most -= len(piece)
    return b"".join(pieces)


def read_bytes(path: Path, largest: float, inside: Path | None = None) -> bytes:
    """Content of a regular file of at most `largest` bytes; see `open_regular`."""
    with open_regular(path, largest, inside) as file:
        content = read_up_to(file, int(bound(largest)) + 1)
    if len(content) > bound(largest):  # it grew, or the system does not know its size
        raise UnreadableError(path, too_large("the file", len(content), largest))
    return content


def read_text(path: Path, largest: float, inside: Path | None = None) -> str:
    """Text of a regular file in UTF-8; see `read_bytes`."""
    try:
        return read_bytes(path, largest, inside).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UnreadableError(
            path, f"is not UTF-8 ({error.reason} at byte {error.start})"
        ) from error


def read_json(path: Path, largest: float, inside: Path | None = None) -> Json:
    """JSON value in a regular file; see `read_bytes` and `parse_json`."""
    try:
        return parse_json(read_text(path, largest, inside))
    except ValueError as error:
        raise UnreadableError(path, f"is not valid JSON ({error})") from error


def parse_json(text: str | bytes) -> Json:
    """Parse JSON that is nested at most DEEPEST deep; half characters ("\\ud800") become U+FFFD.

    Raises:
        ValueError: with the reason in one line.
    """
    try:
        value = json.loads(text)
    except (RecursionError, MemoryError):
        raise ValueError(f"nested deeper than {DEEPEST}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 ({error.reason} at byte {error.start})") from None
    return _whole_characters(value, DEEPEST)


def _whole_characters(value: Json, depth: int) -> Json:
    """A JSON value in which every text can be written as UTF-8; ValueError below `depth`."""
    if isinstance(value, str):
        return valid_text(value)
    if not isinstance(value, dict | list):
        return value
    if not depth:
        raise ValueError(f"nested deeper than {DEEPEST}")
    if isinstance(value, list):
        return [_whole_characters(item, depth - 1) for item in value]
    return {valid_text(name): _whole_characters(item, depth - 1) for name, item in value.items()}


def valid_text(text: str) -> str:
    """`text` with U+FFFD for halves of characters, which UTF-8 cannot encode."""
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def visible(text: object) -> str:
    """Text on one line with nothing that a terminal would obey: newline as ⏎, other control characters as �."""
    return "".join("⏎" if c == "\n" else c if c.isprintable() else "�" for c in str(text))
