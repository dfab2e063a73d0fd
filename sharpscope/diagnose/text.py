"""Text of a file as lines: compressed or not, in the encodings that logs have, split at newlines only."""

from __future__ import annotations

import gzip
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

HEAD = 1 << 22
"""Bytes by which the format of a file is recognized."""
_MARKS = ((b"\xef\xbb\xbf", "utf-8-sig"), (b"\xff\xfe", "utf-16"), (b"\xfe\xff", "utf-16"))
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07]*\x07")


def open_bytes(file: Path) -> BinaryIO:
    """A file's bytes, decompressed if they are gzip's."""
    raw = file.open("rb")
    zipped = raw.read(2) == b"\x1f\x8b"
    raw.seek(0)
    return io.BufferedReader(gzip.GzipFile(fileobj=raw)) if zipped else raw


def head(file: Path) -> bytes:
    """The first `HEAD` bytes of a file.

    Raises:
        OSError, EOFError: the file cannot be read or its compression is broken.
    """
    with open_bytes(file) as raw:
        return raw.read(HEAD)


def encoding_of(start: bytes) -> str:
    """Encoding of a text by its first bytes. What is not valid is replaced when it is decoded."""
    for mark, name in _MARKS:
        if start.startswith(mark):
            return name
    if start[1:2] == b"\0" and start[3:4] == b"\0":
        return "utf-16-le"
    return "utf-8"


def lines(file: Path) -> Iterator[str]:
    r"""Lines of a file without their ends.

    Lines end at "\n" only: U+2028 and U+0085, at which `str.splitlines` ends a line, may stand within a value.
    """
    encoding = encoding_of(head(file))
    with open_bytes(file) as raw:
        text = io.TextIOWrapper(raw, encoding=encoding, errors="replace", newline="\n")
        for line in text:
            yield line.rstrip("\r\n")


def whole(file: Path) -> str:
    """The text of a file."""
    with open_bytes(file) as raw:
        content = raw.read()
    return content.decode(encoding_of(content[:HEAD]), errors="replace")


def plain(line: str) -> str:
    """A line without the escape sequences of a terminal."""
    return _ESCAPES.sub("", line) if "\x1b" in line else line
