"""Atomic file writes, and the folder, run.json and lock of a run."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from sharpscope.errors import UserError
from sharpscope.traces.schema import SCHEMA_VERSION

RUN_FILE = "run.json"
CONFIG_FILE = "config.yaml"
LOCK_FILE = "lock.json"
TRACES = "traces"
STATUSES = ("running", "finished", "interrupted", "failed")
REQUIRED_INFO = ("method", "task", "seed", "config")
ASIDE = ".tmp"
STARTING = f".start{ASIDE}"
"""Marks a folder as a run's from its creation until run.json exists."""
_START_FILES = (CONFIG_FILE, "tokenizer", LOCK_FILE, TRACES)
_INFO_TYPES: dict[type, tuple[str, ...]] = {
    str: ("name", "method", "task", "status", "started", "finished"),
    int: ("seed", "steps_done"),
    dict: ("config", "calibration", "versions", "probe_radius"),
    list: ("notes",),
}
"""Type -> keys of run.json with this type. Their values may also be missing or null."""


def now() -> str:
    """Current UTC time in ISO 8601 format, in seconds."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def sync_folder(path: Path) -> None:
    """Flush a file's content, or a folder's entries, to the disk. A flushed rename survives a power loss."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    """Flush `folder` and every file and folder below it to the disk."""
    for path in [*folder.rglob("*"), folder]:
        sync_folder(path)


def publish(temporary: Path, final: Path) -> None:
    """Rename a complete file to its final name: fsync the file, rename, fsync the folder."""
    sync_folder(temporary)
    temporary.replace(final)
    sync_folder(final.parent)


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
    """Create the folder `out` if it does not exist, and return its path.

    Raises:
        UserError: the folder cannot be created.
    """
    folder = Path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"out: {folder} cannot be created ({error.strerror}); choose another --out") from error
    return folder


def free_name(path: str | Path) -> Path:
    """`path` if it is free for a new run, otherwise the first of path-2, path-3, … that is."""
    folder, number = Path(path), 2
    while folder.exists() and not (folder.is_dir() and never_began(folder)):
        folder, number = Path(f"{path}-{number}"), number + 1
    return folder


def check_free(path: str | Path) -> None:
    """Check that a new run can be written to a folder.

    Raises:
        UserError: the folder has content or lies inside the folder of a run; the message names a free folder.
    """
    folder = Path(path)
    around = next((parent for parent in folder.absolute().parents if (parent / RUN_FILE).exists()), None)
    if around is not None:
        raise UserError(f"out: {folder} is inside the run {around}; use --out {free_name(around)}")
    if folder.is_dir() and not never_began(folder):
        problem = "contains a run" if (folder / RUN_FILE).exists() else "is not empty"
        raise UserError(f"out: {folder} {problem} and is not overwritten; use --out {free_name(folder)}")


def set_aside(folder: Path) -> Path:
    """Rename the folder of an attempt that is not continued; readers skip the new name, which starts with a dot."""
    number = 1
    while (target := folder.with_name(f".{folder.name}.aborted-{number}")).exists():
        number += 1
    folder.rename(target)
    sync_folder(target.parent)
    return target


def create_run_dir(path: str | Path) -> Path:
    """Create the folder of a new run and its `traces` folder.

    The folder may exist if it is empty or left by a run that was killed before it wrote run.json.

    Raises:
        UserError: the folder has other content, is inside another run, is a file, or cannot be created.
    """
    folder = Path(path)
    check_free(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / STARTING).touch()
        (folder / TRACES).mkdir(exist_ok=True)
        sync_folder(folder.parent)
    except FileExistsError as error:
        raise UserError(f"out: {folder} is a file; choose another --out") from error
    except OSError as error:
        raise UserError(f"out: {folder} cannot be written ({error.strerror}); choose another --out") from error
    return folder


def never_began(folder: Path) -> bool:
    """Whether a folder is empty or left by a run that was killed before it wrote run.json.

    False for a user's folder with similar content, such as a config.yaml.
    """
    content = set(folder.iterdir())
    if any(path.is_file() for path in (folder / TRACES).rglob("*")):
        return False
    # The marker is the first file of a run: without it the folder has no other file.
    return content <= {folder / TRACES} or (folder / STARTING in content and content == set(start_files(folder)))


def start_files(folder: Path) -> list[Path]:
    """Files and folders in `folder` that a run creates before run.json."""
    return [p for p in folder.iterdir() if p.name in _START_FILES or (p.name[0] == "." and p.name.endswith(ASIDE))]


def create_run_info(run_dir: str | Path, info: Mapping[str, Any]) -> dict[str, Any]:
    """Write run.json of a new run and return its content.

    Args:
        run_dir: folder of the run.
        info: content; schema_version, name, status and start time are added.

    Raises:
        ValueError: `info` lacks method, task, seed or config.
        FileExistsError: run.json exists.
    """
    path = Path(run_dir) / RUN_FILE
    missing = [key for key in REQUIRED_INFO if key not in info]
    if missing:
        raise ValueError(f"run.json needs {', '.join(missing)}")
    if path.exists():
        raise FileExistsError(f"{path} exists")
    content = {
        "schema_version": SCHEMA_VERSION,
        "name": Path(run_dir).resolve().name,
        "status": "running",
        "started": now(),
        "finished": None,
        "steps_done": 0,
        "parent": None,
        "calibration": None,
        "notes": [],
        **info,
    }
    _write_info(path, content)
    (path.parent / STARTING).unlink(missing_ok=True)
    return content


def update_run_info(run_dir: str | Path, **changes: Any) -> dict[str, Any]:
    """Replace some keys of run.json atomically and return its new content.

    Raises:
        ValueError: the status is not one of STATUSES.
    """
    content = {**read_run_info(run_dir), **changes}
    _write_info(Path(run_dir) / RUN_FILE, content)
    return content


def _write_info(path: Path, info: Mapping[str, Any]) -> None:
    if info["status"] not in STATUSES:
        raise ValueError(f"status {info['status']!r} is not one of {', '.join(STATUSES)}")
    write_atomic(path, json.dumps(info, indent=2, default=str) + "\n")


def read_run_info(run_dir: str | Path) -> dict[str, Any]:
    """Read run.json.

    Raises:
        UserError: the file is missing, or is not a JSON object with the expected types.
    """
    path = Path(run_dir) / RUN_FILE
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise UserError(f"run: {run_dir} has no {RUN_FILE}; give the folder of a run") from error
    except OSError as error:
        raise UserError(f"run: {path} cannot be read ({error.strerror})") from error
    return parse_run_info(content, path)


def parse_run_info(content: str | bytes, path: Path) -> dict[str, Any]:
    """Parse the content of run.json; `path` is for the error message.

    Raises:
        UserError: the content is not a JSON object with the expected types.
    """
    try:
        info = json.loads(content)
        problem = "" if isinstance(info, dict) else "not a JSON object"
    except ValueError as error:
        info, problem = None, str(error)
    for type_, keys in _INFO_TYPES.items() if not problem else ():
        wrong = [key for key in keys if not isinstance(info.get(key), type_ | None)]
        problem = f"{wrong[0]} is a {type(info[wrong[0]]).__name__}" if wrong else problem
    if problem:
        raise UserError(f"run: {path} is damaged ({problem}); restore it or exclude this run")
    return dict(info)


def has_writer(run_dir: str | Path) -> bool:
    """Whether a process holds a run's folder."""
    try:
        with (Path(run_dir) / LOCK_FILE).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def held_text(run_dir: str | Path) -> str:
    """Message with the writer of a run's folder, as its lock file names it, and the fix."""
    try:
        writer = (Path(run_dir) / LOCK_FILE).read_text("utf-8", "replace").strip()
    except OSError:
        writer = ""
    return (
        f"{run_dir} is being written by {writer or 'another process'}; wait for it, stop it, or choose another folder"
    )


class RunLock:
    """Context manager that locks a run folder against other writers, by the kernel's lock on a file, which ends with the process.

    Attributes:
        path: the lock file; its content is for messages.
    """

    def __init__(self, run_dir: str | Path) -> None:
        self.path = Path(run_dir) / LOCK_FILE
        self._handle: int | None = None

    def acquire(self, attempts: int = 20) -> RunLock:
        """Acquire the lock; a reader may hold it for an instant, so there are several attempts.

        Raises:
            UserError: another process holds the lock, or the folder is not writable.
        """
        for _ in range(attempts):
            handle = -1
            try:
                handle = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Unless the owner before removed the file between our open and our lock.
                if self.path.exists() and os.path.samestat(os.fstat(handle), self.path.stat()):
                    os.ftruncate(handle, 0)
                    os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()} since {now()}".encode(), 0)
                    self._handle, handle = handle, -1
                    return self
            except BlockingIOError:
                time.sleep(0.02)
            except OSError as error:
                raise UserError(
                    f"run: {self.path} cannot be written ({error.strerror}); free some space or make the folder writable"
                ) from error
            finally:
                if handle >= 0:
                    os.close(handle)
        raise UserError(f"run: {held_text(self.path.parent)}")

    def release(self) -> None:
        """Release the lock and remove its file, if held."""
        if self._handle is not None:
            self.path.unlink(missing_ok=True)
            os.close(self._handle)
            self._handle = None

    def __enter__(self) -> RunLock:
        return self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
