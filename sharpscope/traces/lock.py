"""One writer per run folder: a lock with owner, machine and time, that dies with its process."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

import psutil

from sharpscope.errors import UserError
from sharpscope.traces.files import now

LOCK_FILE = "lock.json"
_TAKING_S = 10.0


@dataclass(frozen=True)
class Owner:
    """Who holds a run folder. `born` is the process's start time [s since 1970], which tells reused numbers apart."""

    pid: int
    host: str
    since: str
    born: float

    @property
    def alive(self) -> bool | None:
        """Whether the process still runs; None if it lives on another machine, where nobody here can tell."""
        if self.host != socket.gethostname():
            return None
        try:
            return abs(psutil.Process(self.pid).create_time() - self.born) < 2.0
        except psutil.NoSuchProcess:
            return False
        except psutil.AccessDenied:
            return True

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.since}"


def lock_owner(run_dir: str | Path) -> Owner | None:
    """The owner that a run folder's lock names, alive or not; None without a readable lock."""
    try:
        return Owner(**json.loads((Path(run_dir) / LOCK_FILE).read_text("utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def has_writer(run_dir: str | Path) -> bool:
    """Whether a process holds a run's folder, as far as can be told: an owner on another machine counts as alive.

    A lock file that is new and still empty belongs to a writer that is just taking it.
    """
    owner = lock_owner(run_dir)
    if owner is None:
        try:
            found = (Path(run_dir) / LOCK_FILE).stat()
        except OSError:
            return False
        return found.st_size == 0 and time.time() - found.st_mtime < _TAKING_S
    return owner.alive is not False


def held_text(run_dir: str | Path, owner: Owner | None) -> str:
    """Who writes to a run's folder (None: nobody is named) and what a person can do about it."""
    who = str(owner) if owner else "another process"
    remedy = "wait for it, stop it, or choose another folder"
    if owner is not None and owner.alive is None:
        remedy = f"wait for it, or remove {Path(run_dir) / LOCK_FILE} if you know that it is dead"
    return f"{run_dir} is being written by {who}; {remedy}"


ATTEMPTS, PAUSE_S = 40, 0.05
"""How often, and how far apart [s], one looks who holds a lock that names nobody yet."""


class RunLock:
    """Context manager: holds a run folder against other writers; `stale` is the dead owner it replaced, or None.

    The kernel's lock on the file decides, and ends with the process however that ends; the content tells people who
    it is. An owner on another machine counts as alive, since a shared disk may not pass locks on.

    Raises:
        UserError: if another process holds the folder.
    """

    def __init__(self, run_dir: str | Path) -> None:
        self.path = Path(run_dir) / LOCK_FILE
        self.stale: Owner | None = None
        self._handle: int | None = None

    def acquire(self) -> RunLock:
        """Take the lock."""
        attempts = 0
        while True:
            try:
                handle = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
            except OSError as error:
                raise UserError(
                    f"run: {self.path.parent} cannot be written ({error.strerror}); make it a writable folder, or copy the run"
                ) from error
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self._still_named(handle):
                    break
            except BlockingIOError as error:
                os.close(handle)
                holder, attempts = lock_owner(self.path.parent), attempts + 1
                if holder is None and attempts < ATTEMPTS:
                    time.sleep(PAUSE_S)  # between its lock and its name, or between its last word and its end
                    continue
                raise self._held(holder) from error
            except BaseException:
                os.close(handle)
                raise
            os.close(
                handle
            )  # its owner removed it between our open and our lock: what we hold is not the folder's lock
        owner = lock_owner(self.path.parent)
        if owner is not None and owner.alive is None:
            os.close(handle)
            raise self._held(owner)
        self.stale = owner
        process = psutil.Process()
        mine = Owner(process.pid, socket.gethostname(), now(), process.create_time())
        try:
            os.ftruncate(handle, 0)
            os.pwrite(handle, json.dumps(asdict(mine)).encode(), 0)
        except OSError as error:
            os.close(handle)
            raise UserError(f"run: {self.path} cannot be written ({error.strerror}); free some space") from error
        self._handle = handle
        return self

    def release(self) -> None:
        """Give the lock back and remove its file; nothing happens when it is not held."""
        if self._handle is not None:
            self.path.unlink(missing_ok=True)
            os.close(self._handle)
            self._handle = None

    def _still_named(self, handle: int) -> bool:
        try:
            return os.path.samestat(os.fstat(handle), self.path.stat())
        except FileNotFoundError:
            return False

    def _held(self, owner: Owner | None) -> UserError:
        return UserError(f"run: {held_text(self.path.parent, owner)}")

    def __enter__(self) -> RunLock:
        return self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
