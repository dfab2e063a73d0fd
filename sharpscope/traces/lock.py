"""Lock that allows one writer per run folder and ends with its process."""

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
ATTEMPTS, PAUSE_S = 40, 0.05
"""Number of attempts, and seconds between them, to read the owner of a lock whose file is still empty."""
_ACQUIRE_S = 10.0  # longest time between the creation of the lock file and writing its owner


@dataclass(frozen=True)
class Owner:
    """The process that holds a run folder.

    Attributes:
        pid: process ID.
        host: host name.
        since: UTC time at which it took the lock.
        born: start time of the process [s since 1970], which distinguishes reused process IDs.
    """

    pid: int
    host: str
    since: str
    born: float

    @property
    def alive(self) -> bool | None:
        """Whether the process is running; None if it is on another machine."""
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
    """Owner in a run folder's lock file, alive or not; None if there is no readable lock file."""
    try:
        return Owner(**json.loads((Path(run_dir) / LOCK_FILE).read_text("utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def has_writer(run_dir: str | Path) -> bool:
    """Whether a process holds a run's folder. An owner on another machine counts as alive.

    A new lock file that is still empty belongs to a writer that is acquiring the lock.
    """
    owner = lock_owner(run_dir)
    if owner is None:
        try:
            stat = (Path(run_dir) / LOCK_FILE).stat()
        except OSError:
            return False
        return stat.st_size == 0 and time.time() - stat.st_mtime < _ACQUIRE_S
    return owner.alive is not False


def held_text(run_dir: str | Path, owner: Owner | None) -> str:
    """Message with the writer of a run's folder (None: unknown) and the fix."""
    writer = str(owner) if owner else "another process"
    fix = "wait for it, stop it, or choose another folder"
    if owner is not None and owner.alive is None:
        fix = f"wait for it, or remove {Path(run_dir) / LOCK_FILE} if it has ended"
    return f"{run_dir} is being written by {writer}; {fix}"


class RunLock:
    """Context manager that locks a run folder against other writers.

    The lock is the kernel's lock on the file, which ends with the process; the file's content is for messages. An owner on
    another machine counts as alive, because a shared disk may not support locks.

    Attributes:
        path: the lock file.
        stale: the dead owner that this lock replaced, or None.
    """

    def __init__(self, run_dir: str | Path) -> None:
        self.path = Path(run_dir) / LOCK_FILE
        self.stale: Owner | None = None
        self._handle: int | None = None

    def acquire(self) -> RunLock:
        """Acquire the lock.

        Raises:
            UserError: another process holds the lock, or the folder is not writable.
        """
        attempts = 0
        while True:
            try:
                handle = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
            except OSError as error:
                raise UserError(
                    f"run: {self.path.parent} cannot be written ({error.strerror}); make it writable or copy the run"
                ) from error
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self._is_current(handle):
                    break
            except BlockingIOError as error:
                os.close(handle)
                owner, attempts = lock_owner(self.path.parent), attempts + 1
                if owner is None and attempts < ATTEMPTS:
                    time.sleep(PAUSE_S)  # the owner has not written its name yet, or is just releasing the lock
                    continue
                raise self._held(owner) from error
            except BaseException:
                os.close(handle)
                raise
            os.close(handle)  # the previous owner removed the file between our open and our lock: try again
        owner = lock_owner(self.path.parent)
        if owner is not None and owner.alive is None:
            os.close(handle)
            raise self._held(owner)
        self.stale = owner
        process = psutil.Process()
        owner = Owner(process.pid, socket.gethostname(), now(), process.create_time())
        try:
            os.ftruncate(handle, 0)
            os.pwrite(handle, json.dumps(asdict(owner)).encode(), 0)
        except OSError as error:
            os.close(handle)
            raise UserError(f"run: {self.path} cannot be written ({error.strerror}); free some space") from error
        self._handle = handle
        return self

    def release(self) -> None:
        """Release the lock and remove its file, if held."""
        if self._handle is not None:
            self.path.unlink(missing_ok=True)
            os.close(self._handle)
            self._handle = None

    def _is_current(self, handle: int) -> bool:
        """Whether the open file is still the one at `path`."""
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
