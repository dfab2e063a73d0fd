"""Atomic file writes, and the folder, run.json and lock of a run."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from itertools import chain, count
from pathlib import Path
from typing import Any, BinaryIO

from filelock import lock_descriptor, unlock_descriptor

from sharpscope.errors import UserError
from sharpscope.traces.info import LARGEST_INFO, parse_run_info
from sharpscope.traces.schema import SCHEMA_VERSION
from sharpscope.untrusted import UnreadableError, open_regular, read_bytes

RUN_FILE = "run.json"
CONFIG_FILE = "config.yaml"
LOCK_FILE = "lock.json"
TRACES = "traces"
ASIDE = ".tmp"
STARTING = f".start{ASIDE}"
"""Marks a folder as a run's from its creation until run.json exists."""


def now() -> str:
    """Current UTC time in ISO 8601 format, in seconds."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def publish(temporary: Path, final: Path) -> None:
    """Flush a complete file to the disk and rename it to its final name."""
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    temporary.replace(final)


def write_atomic(path: Path, data: str | bytes) -> None:
    """Write `data` to `path` atomically: after a crash the file has either the old or the new content."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}{ASIDE}")
    try:
        temporary.write_bytes(data.encode("utf-8", "replace") if isinstance(data, str) else data)
        publish(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def output_folder(out: str | Path) -> Path:
    """Create the folder `out` if it does not exist, and return its path."""
    folder = Path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"out: {folder} cannot be created ({error.strerror}); choose another --out"
        ) from error
    return folder


def free_name(path: str | Path) -> Path:
    """`path` if it is free for a new run, otherwise the first of path-2, path-3, … that is."""
    names = chain([Path(path)], (Path(f"{path}-{number}") for number in count(2)))
    return next(
        name for name in names if not name.exists() or (name.is_dir() and never_began(name))
    )


def check_free(path: str | Path) -> None:
    """Refuse a folder for a new run that has content or lies inside a run, and name a free one."""
    folder = Path(path)
    around = next(
        (parent for parent in folder.absolute().parents if (parent / RUN_FILE).exists()), None
    )
    if around is not None:
        raise UserError(f"out: {folder} is inside the run {around}; use --out {free_name(around)}")
    if folder.is_dir() and not never_began(folder):
        problem = "contains a run" if (folder / RUN_FILE).exists() else "is not empty"
        raise UserError(
            f"out: {folder} {problem} and is not overwritten; use --out {free_name(folder)}"
        )


def set_aside(folder: Path) -> Path:
    """Rename the folder of an attempt that is not continued; readers skip the new name, which starts with a dot."""
    names = (folder.with_name(f".{folder.name}.aborted-{number}") for number in count(1))
    return folder.rename(next(name for name in names if not name.exists()))


def create_run_dir(path: str | Path) -> Path:
    """Create the folder of a new run, which must be free (see `check_free`), and its `traces` folder."""
    check_free(path)
    folder = output_folder(path)
    _mark(folder)
    return folder


def _mark(folder: Path) -> None:
    """Mark a folder as a run's and create its `traces` folder."""
    try:
        (folder / STARTING).touch()
        (folder / TRACES).mkdir(exist_ok=True)
    except OSError as error:
        raise UserError(
            f"out: {folder} cannot be written ({error.strerror}); choose another --out"
        ) from error


def claim_run_dir(path: str | Path) -> tuple[Path, RunLock]:
    """Create and lock the folder of a new run at the first free name of `free_name`, also where others do so at once.

    The caller releases the lock.
    """
    while True:
        folder = output_folder(free_name(path))
        lock = RunLock(folder)
        try:
            lock.__enter__()
        except UserError:
            if has_writer(folder) or not never_began(folder):
                continue  # another process was first
            raise
        if (folder / RUN_FILE).exists():  # it began, and has ended
            lock.__exit__()
            continue
        try:
            _mark(folder)
        except UserError:
            lock.__exit__()
            raise
        return folder, lock


def never_began(folder: Path) -> bool:
    """Whether a folder is empty or left by a run that was killed before it wrote run.json."""
    content = set(folder.iterdir())
    if any(path.is_file() for path in (folder / TRACES).rglob("*")):
        return False
    return content <= {folder / TRACES} or (
        folder / STARTING in content and content == set(start_files(folder))
    )


def start_files(folder: Path) -> list[Path]:
    """Files and folders in `folder` that a run creates before run.json."""
    names = (CONFIG_FILE, "tokenizer", LOCK_FILE, TRACES)
    return [
        p
        for p in folder.iterdir()
        if p.name in names or (p.name[0] == "." and p.name.endswith(ASIDE))
    ]


def create_run_info(run_dir: str | Path, info: Mapping[str, object]) -> dict[str, Any]:
    """Write run.json of a new run: `info`, schema version, name, status and start time; returns it."""
    path = Path(run_dir) / RUN_FILE
    if path.exists():
        raise FileExistsError(f"{path} exists")
    content = {
        "schema_version": SCHEMA_VERSION,
        "name": Path(run_dir).resolve().name,
        "status": "running",
    }
    content |= {
        "started": now(),
        "finished": None,
        "steps_done": 0,
        "parent": None,
        "calibration": None,
        "notes": [],
    }
    content = _write_info(path, {**content, **info})
    (path.parent / STARTING).unlink(missing_ok=True)
    return content


def update_run_info(run_dir: str | Path, **changes: object) -> dict[str, Any]:
    """Replace some keys of run.json atomically and return its new content."""
    return _write_info(Path(run_dir) / RUN_FILE, {**read_run_info(run_dir), **changes})


def _write_info(path: Path, content: dict[str, Any]) -> dict[str, Any]:
    write_atomic(path, json.dumps(content, indent=2, default=str) + "\n")
    return content


def read_run_info(run_dir: str | Path) -> dict[str, Any]:
    """Read run.json.

    Raises:
        UserError: it is missing, not a regular file, damaged, or has a schema version that is not read.
    """
    path = Path(run_dir) / RUN_FILE
    try:
        return parse_run_info(read_bytes(path, LARGEST_INFO, path.parent), path)
    except FileNotFoundError as error:
        raise UserError(f"run: {run_dir} has no {RUN_FILE}; give the folder of a run") from error
    except UnreadableError as error:
        raise UserError(f"run: {error}; restore it or exclude this run") from error
    except OSError as error:
        raise UserError(f"run: {path} cannot be read ({error.strerror})") from error


def has_writer(run_dir: str | Path) -> bool:
    """Whether a process holds a run's folder."""
    try:
        with open_regular(Path(run_dir) / LOCK_FILE, LARGEST_INFO) as file:
            if not _locked(file):
                return True
            unlock_descriptor(file.fileno())
    except (OSError, UnreadableError):
        pass
    return False


def _locked(file: BinaryIO) -> bool:
    """Lock an open file, as far as no other process holds it; readers hold it for an instant."""
    for _ in range(20):
        if lock_descriptor(file.fileno(), blocking=False):
            return True
        time.sleep(0.002)
    return False


def held_text(run_dir: str | Path) -> str:
    """Message with the writer of a run's folder, as its lock file names it, and the fix."""
    try:
        content = read_bytes(Path(run_dir) / LOCK_FILE, LARGEST_INFO)
        writer = content[:200].decode("utf-8", "replace").strip()
    except (OSError, UnreadableError):
        writer = ""
    return f"{run_dir} is being written by {writer or 'another process'}; wait for it, or choose another folder"


class RunLock:
    """Context manager that locks a run folder against other writers, by the kernel's lock on a file, which ends with the process."""

    def __init__(self, run_dir: str | Path) -> None:
        self.path = Path(run_dir) / LOCK_FILE  # its content is for messages

    def __enter__(self) -> RunLock:
        """Acquire the lock; UserError if another process holds it, or the folder is not writable."""
        try:
            while self._open_locked():
                # Unless the owner before removed the file between our open and our lock.
                if self.path.exists() and os.path.samestat(
                    os.fstat(self._file.fileno()), self.path.stat()
                ):
                    self._file.truncate(0)
                    self._file.write(
                        f"process {os.getpid()} on {socket.gethostname()} since {now()}".encode()
                    )
                    self._file.flush()
                    return self
                self._file.close()
        except OSError as error:
            fix = "free some space or make the folder writable"
            raise UserError(
                f"run: {self.path} cannot be written ({error.strerror}); {fix}"
            ) from error
        self._file.close()
        raise UserError(f"run: {held_text(self.path.parent)}")

    def _open_locked(self) -> bool:
        """Open the file; whether it could be locked."""
        self._file = self.path.open("a+b")
        return _locked(self._file)

    def __exit__(self, *error: object) -> None:
        self.path.unlink(missing_ok=True)
        self._file.close()
