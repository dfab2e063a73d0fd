"""Runs in processes of their own that die at a chosen instant: at a time, or at a chosen operation on files.

The children are forked from a server that has imported everything, so that one costs the run and nothing else. A child is
watched from within: the functions that change files are wrapped, counted, and made to end the process by SIGKILL before,
inside or after a chosen one. With a journal, every fsync is noted, so that the parent can take away what a loss of power
would have taken.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import pyarrow.parquet as pq
import torch

from sharpscope.training import Display, checkpoint, train
from tests.faults.setting import tiny_config
from tests.launched import server

Moment = Literal["before", "inside", "after", "refused"]
HANG_S = 180.0
_SLICE_S = 0.5
_FREES = ("unlink", "rmdir", "rmtree")  # a full disk lets these pass


@dataclass(frozen=True)
class Death:
    """When a child dies: `seconds` after it began to train, or at its `operation`-th change of a file (counted from 1).

    With the moment `refused` it does not die: that operation and all later ones fail with `error`, as on a full disk.
    """

    seconds: float | None = None
    operation: int | None = None
    moment: Moment = "before"
    error: int = errno.ENOSPC

    def __str__(self) -> str:
        if self.seconds is not None:
            return f"after {self.seconds:.3f} s"
        if self.moment == "refused":
            return f"{errno.errorcode[self.error]} from operation {self.operation} on"
        return f"{self.moment} operation {self.operation}"


@dataclass(frozen=True)
class Ended:
    """How a child ended: steps that it told as recorded, outcome (empty where it was killed), operations, seconds."""

    told: int
    outcome: str
    operations: int
    seconds: float
    hung: bool = False


class _Teller(Display):
    """Tells the parent when training begins and which steps are recorded."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe

    def start(self, title: str, steps: int, done: int) -> None:
        """Training begins."""
        self.pipe.send(("begin", done))

    def step(self, row: Mapping[str, Any]) -> None:
        """A step is recorded."""
        self.pipe.send(("step", int(row["step"])))


class Operations:
    """Counts what changes files and dies at a chosen one."""

    def __init__(self, death: Death | None, journal: Path | None = None) -> None:
        self.death, self.count = death, 0
        self._journal = None if journal is None else os.open(journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def install(self) -> None:
        """Wrap the functions; for a process that ends soon, so nothing is put back."""
        for owner, name in (
            (os, "replace"),
            (os, "rename"),
            (os, "unlink"),
            (os, "rmdir"),
            (os, "mkdir"),
            (os, "fsync"),
            (shutil, "rmtree"),
            (pq.ParquetWriter, "write_table"),
            (pq.ParquetWriter, "close"),
        ):
            setattr(owner, name, self._wrapped(getattr(owner, name), name))
        for owner, name, half in (
            (Path, "write_bytes", _half_of_content),
            (Path, "write_text", _half_of_content),
            (checkpoint, "save_file", _half_of_file),
        ):
            setattr(owner, name, self._wrapped(getattr(owner, name), name, half))

    def _wrapped(self, function: Any, name: str, half: Callable[..., None] | None = None) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            self.count += 1
            self._refuse(name)
            now = self.death is not None and self.count == self.death.operation
            moment = self.death.moment if self.death is not None else "before"
            now = now and moment != "refused"
            if now and (moment == "before" or (moment == "inside" and half is None)):
                _die()
            if now and moment == "inside" and half is not None:
                half(function, *arguments, **options)
                _die()
            found = function(*arguments, **options)
            if name == "fsync" and self._journal is not None:
                self._note(arguments[0])
            if now:
                _die()
            return found

        return call

    def _refuse(self, name: str) -> None:
        death = self.death
        if death is None or death.operation is None or death.moment != "refused" or name in _FREES:
            return
        if self.count >= death.operation:
            raise OSError(death.error, os.strerror(death.error))

    def _note(self, handle: int) -> None:
        """One line of the journal: what is on the disk for certain now."""
        assert self._journal is not None
        entry = journal_entry(Path(f"/proc/self/fd/{handle}").readlink())
        os.write(self._journal, (json.dumps(entry) + "\n").encode())


def journal_entry(path: Path) -> dict[str, Any]:
    """What is on the disk for certain after an fsync of a file (size, time of change) or a folder (names in it)."""
    state = path.stat()
    if path.is_dir():
        return {"inode": state.st_ino, "names": sorted(child.name for child in path.iterdir())}
    return {"inode": state.st_ino, "content": [state.st_size, state.st_mtime_ns]}


def _half_of_content(function: Any, path: Path, content: Any, *arguments: Any, **options: Any) -> None:
    function(path, content[: len(content) // 2], *arguments, **options)


def _half_of_file(function: Any, tensors: Any, path: Path) -> None:
    function(tensors, path)
    os.truncate(path, os.path.getsize(path) // 2)  # noqa: PTH202


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)  # the signal arrives before this ends


def _main(
    pipe: Connection,
    policy: str,
    run_dir: str,
    setting: dict[str, Any],
    changes: dict[str, Any],
    death: Death | None,
    journal: str | None,
    prepare: Callable[[], None] | None,
) -> None:
    torch.set_num_threads(1)
    sys.unraisablehook = lambda *_: None  # refused operations fail in destructors too
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    folder = Path(run_dir)
    config = tiny_config(Path(policy), folder, setting, **changes)
    operations = Operations(death, None if journal is None else Path(journal))
    operations.install()
    if prepare is not None:
        prepare()
    try:
        outcome = train(config, _Teller(pipe), resume=(folder / "run.json").exists())
        text = f"{outcome.status}: {outcome.reason}"
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    pipe.send(("end", text, operations.count))


def run_child(
    policy: Path,
    run_dir: Path,
    setting: Mapping[str, Any],
    death: Death | None = None,
    *,
    journal: Path | None = None,
    prepare: Callable[[], None] | None = None,
    **changes: Any,
) -> Ended:
    """Start the run in `run_dir`, or go on with the one that is there, and wait until it ends or dies.

    Args:
        policy: the initial policy's folder.
        run_dir: the run's folder.
        setting: field paths and values of the configuration.
        death: when it is killed; None: never.
        journal: a file outside the run's folder for every fsync.
        prepare: called in the child before it trains.
        changes: further fields, with `__` for the dot.
    """
    return start_child(policy, run_dir, setting, death, journal=journal, prepare=prepare, **changes).wait()


class Child:
    """A run in its own process."""

    def __init__(self, process: Any, pipe: Connection, death: Death | None) -> None:
        self.process, self.pipe, self.death = process, pipe, death
        self.told, self.outcome, self.operations = 0, "", 0
        self.began: float | None = None

    def wait(self) -> Ended:
        """Until it ends, dies or is killed; a child that hangs is killed after three minutes and said to hang.

        The minutes are counted in short waits, so that a machine which sleeps in between does not look like a hang.
        """
        started = time.monotonic()
        waited, kill_at = 0.0, None
        while waited < HANG_S and not self.outcome:
            if self.death is not None and self.death.seconds is not None and self.began is not None:
                kill_at = self.began + self.death.seconds
            left = _SLICE_S if kill_at is None else min(_SLICE_S, kill_at - time.monotonic())
            if left <= 0:
                break
            try:
                if self.pipe.poll(left):
                    self._hear(self.pipe.recv())
                else:
                    waited += left
            except (EOFError, ConnectionResetError):
                break
        if not self.outcome:
            self.process.kill()
            self._drain()
        self.process.join(HANG_S)
        seconds = time.monotonic() - (self.began or started)
        return Ended(self.told, self.outcome, self.operations, seconds, hung=waited >= HANG_S)

    def hear(self, seconds: float) -> bool:
        """Take one message if it comes within `seconds`."""
        try:
            if self.pipe.poll(seconds):
                self._hear(self.pipe.recv())
                return True
        except (EOFError, ConnectionResetError):
            pass
        return False

    def _drain(self) -> None:
        try:
            while self.pipe.poll(0):
                self._hear(self.pipe.recv())
        except (EOFError, ConnectionResetError):
            pass

    def _hear(self, message: tuple[Any, ...]) -> None:
        if message[0] == "begin":
            self.began = time.monotonic()
        elif message[0] == "step":
            self.told = max(self.told, message[1])
        else:
            _, self.outcome, self.operations = message


def start_child(
    policy: Path,
    run_dir: Path,
    setting: Mapping[str, Any],
    death: Death | None,
    *,
    journal: Path | None = None,
    prepare: Callable[[], None] | None = None,
    **changes: Any,
) -> Child:
    """As `run_child`, without waiting."""
    context = server()
    mine, theirs = context.Pipe(duplex=False)
    process = context.Process(
        target=_main,
        args=(theirs, str(policy), str(run_dir), dict(setting), changes, death, journal and str(journal), prepare),
        daemon=True,
    )
    process.start()
    theirs.close()
    return Child(process, mine, death)
