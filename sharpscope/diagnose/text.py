"""Text of a log as lines: of a regular file, compressed or not, in the encodings that logs have, of bounded length."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import re
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from sharpscope.errors import first_line
from sharpscope.untrusted import (
    LONGEST_LINE,
    UnreadableError,
    bound,
    check_regular,
    read_up_to,
    too_large,
)

Bytes = gzip.GzipFile | bz2.BZ2File | lzma.LZMAFile | zipfile.ZipExtFile | io.BufferedReader
"""An open file, decompressed or as it is."""
HEAD = 1 << 22
"""Bytes by which the format of a file is recognized."""
LARGEST = 500_000_000
"""Largest text that is read at once, after decompression: one JSON value or a notebook [bytes]."""
LONGEST_TEXT = 2_000_000_000
"""Longest text that is read line by line, after decompression [characters]."""
BROKEN = (OSError, EOFError, zlib.error, lzma.LZMAError, zipfile.BadZipFile)
"""What a file raises that cannot be read or whose compression is broken."""
_MARKS = {
    b"\xef\xbb\xbf": "utf-8-sig",
    b"\xff\xfe\0\0": "utf-32",
    b"\0\0\xfe\xff": "utf-32",
    b"\xff\xfe": "utf-16",
    b"\xfe\xff": "utf-16",
}
"""First bytes of a text -> its encoding; a longer mark stands before one that it begins with."""
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07]*\x07")


XZ_MEMORY = 256 << 20
"""Memory that decompressing xz may take [bytes]; its own highest setting takes 65 MiB."""


def open_bytes(file: Path) -> Bytes:
    """A regular file's bytes, decompressed if they are those of gzip, bzip2, xz, or a zip of one file.

    Raises:
        UnreadableError: it is a pipe, a device or a folder, or a zip of several files or with a password.
        OSError: it cannot be opened.
        LZMAError: decompressing it would take more than `XZ_MEMORY`.
    """
    check_regular(file)
    with file.open("rb") as raw:
        start = raw.read(1 << 12)
    if start.startswith(b"\x1f\x8b"):
        return gzip.GzipFile(file)
    if start.startswith(b"BZh"):
        return bz2.BZ2File(file)
    if start.startswith(b"\xfd7zXZ"):
        # a header may ask for 4 GiB, which the reader of a file would take
        lzma.LZMADecompressor(memlimit=XZ_MEMORY).decompress(start, max_length=1)
        return lzma.LZMAFile(file)
    if start.startswith(b"PK\x03\x04"):
        return _zipped(file)
    return file.open("rb")


def _zipped(file: Path) -> zipfile.ZipExtFile:
    """The one file of a zip; folders and what macOS adds do not count."""
    with zipfile.ZipFile(file) as archive:
        listed = [name for name in archive.namelist() if not name.endswith("/")]
        names = [name for name in listed if not name.startswith("__MACOSX")]
        if len(names) != 1:
            what = f"is a zip of {len(names)} files; unpack it and give the folder"
            raise UnreadableError(file, what)
        if archive.getinfo(names[0]).compress_type == zipfile.ZIP_LZMA:  # may ask for 4 GiB
            raise UnreadableError(file, "is a zip with LZMA compression; unpack it")
        try:
            opened = archive.open(names[0])
        except (RuntimeError, NotImplementedError) as error:  # a password, an old compression
            raise UnreadableError(file, f"cannot be unpacked ({first_line(error)})") from error
        assert isinstance(opened, zipfile.ZipExtFile)
        return opened


def head(file: Path) -> bytes:
    """The first `HEAD` bytes of a file, or those before its compression breaks off.

    Raises:
        UnreadableError: it is no regular file.
        BROKEN: it cannot be read, or nothing of it can be decompressed.
    """
    found = io.BytesIO()
    with open_bytes(file) as raw:
        try:
            while found.tell() < HEAD and (piece := raw.read1(1 << 16)):
                found.write(piece)
        except BROKEN:
            if not found.tell():
                raise
    return found.getvalue()


def encoding_of(start: bytes) -> str:
    """Encoding of a text by its first bytes. What is not valid is replaced when it is decoded."""
    for mark, name in _MARKS.items():
        if start.startswith(mark):
            return name
    if start[1:2] == b"\0" and start[3:4] == b"\0":
        return "utf-16-le"
    if start[0:1] == b"\0" and start[2:3] == b"\0":
        return "utf-16-be"
    return "utf-8"


def lines(file: Path, notes: list[str]) -> Iterator[str]:
    r"""Lines of a file without their ends; of a file whose compression breaks off those before, which is added to `notes`.

    Lines end at "\n" only, since U+2028 and U+0085, at which `str.splitlines` ends a line, may stand within a value; in a text
    without any "\n" they end at "\r".

    Raises:
        UnreadableError: a line is longer than `LONGEST_LINE`, or all are longer than `LONGEST_TEXT`.
    """
    start = head(file)
    newline = "\r" if b"\r" in start and b"\n" not in start else "\n"
    longest = int(bound(LONGEST_LINE))
    largest = bound(LONGEST_TEXT)
    read = 0
    with open_bytes(file) as raw:
        text = io.TextIOWrapper(
            raw,
            encoding_of(start),
            errors="replace",
            newline=newline,
        )
        try:
            while line := text.readline(longest + 1):
                read += len(line)
                if len(line) > longest:
                    raise UnreadableError(
                        file,
                        too_large(
                            "a line",
                            len(line),
                            LONGEST_LINE,
                        ),
                    )
                if read > largest:
                    raise UnreadableError(file, too_large("its text", read, LONGEST_TEXT))
                yield line.rstrip("\r\n")
        except BROKEN as error:
            notes.append(f"The file breaks off: {first_line(error)}.")


def whole(file: Path) -> str:
    """The text of a file.

    Raises:
        UnreadableError: it is longer than `LARGEST`.
    """
    longest = int(bound(LARGEST))
    with open_bytes(file) as raw:
        content = read_up_to(raw, longest + 1)
    if len(content) > longest:
        raise UnreadableError(file, too_large("its text", len(content), LARGEST))
    return content.decode(encoding_of(content[:HEAD]), errors="replace")


def plain(line: str) -> str:
    """A line without the escape sequences of a terminal."""
    return _ESCAPES.sub("", line) if "\x1b" in line else line
