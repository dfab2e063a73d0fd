"""Disks that take no more: full, limited, read-only. What was flushed stays readable, and the run goes on afterwards."""

from __future__ import annotations

import errno
import random
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from tests.faults.child import Death, Ended, run_child
from tests.faults.killing import Whole, turns
from tests.faults.setting import Tried, difference, holes

_SURVIVED = "one line with the reason; what was flushed is readable; resumed later, equal to the uninterrupted run"


def refuse_operations(policy: Path, whole: list[Whole], folder: Path, count: int, seed: int = 0) -> Tried:
    """`count` runs in which every write, fsync and rename fails from a random one on."""
    tried = Tried("every write fails from a random one on (ENOSPC, EDQUOT, EROFS, EIO)", _SURVIVED)
    chooser = random.Random(f"{seed}/refused")
    errors = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)

    def interrupt(one: Whole, place: Path) -> tuple[Ended, str]:
        death = Death(operation=chooser.randint(1, one.operations), moment="refused", error=chooser.choice(errors))
        return run_child(policy, place / "run", one.setting, death), str(death)

    return _all(tried, policy, whole, folder / "refused", count, interrupt)


def limit_file_size(policy: Path, whole: list[Whole], folder: Path, count: int, seed: int = 0) -> Tried:
    """`count` runs whose files may not grow beyond a random size, whoever writes them (RLIMIT_FSIZE)."""
    tried = Tried("no file may grow beyond a random size (RLIMIT_FSIZE)", _SURVIVED)
    chooser = random.Random(f"{seed}/limit")

    def interrupt(one: Whole, place: Path) -> tuple[Ended, str]:
        sizes = sorted(path.stat().st_size for path in one.run_dir.rglob("*") if path.is_file())
        size = chooser.choice(sizes) - 1
        ended = run_child(policy, place / "run", one.setting, prepare=partial(_limit, size))
        return ended, f"{size} bytes"

    return _all(tried, policy, whole, folder / "limited", count, interrupt)


def fill_disk(policy: Path, whole: list[Whole], folder: Path, count: int, seed: int = 0) -> Tried:
    """`count` runs on a small memory disk that fills up; it grows before the run goes on. Needs the right to mount."""
    tried = Tried("a real disk (tmpfs) that fills up", _SURVIVED)
    chooser = random.Random(f"{seed}/full")
    place = folder / "disk"
    place.mkdir(parents=True)
    if not _mount(place, 1 << 20):
        tried.note = "not tried: this process may not mount a disk"
        return tried
    _unmount(place)

    def interrupt(one: Whole, place: Path) -> tuple[Ended, str]:
        total = sum(path.stat().st_size for path in one.run_dir.rglob("*") if path.is_file())
        size = chooser.randint(total // 10, total)
        _mount(place, size)
        return run_child(policy, place / "run", one.setting), f"{size} bytes"

    def mend(place: Path) -> None:
        subprocess.run(["mount", "-o", "remount,size=1g", str(place)], check=True, capture_output=True)

    try:
        return _all(tried, policy, whole, folder / "full", count, interrupt, mend, _unmount)
    finally:
        for left in (folder / "full").glob("*"):
            _unmount(left)


def read_only(policy: Path, whole: list[Whole], folder: Path) -> Tried:
    """A new run in, and a continuation of a run on, a read-only disk: one line, nothing changed, everything readable."""
    tried = Tried("a read-only disk", "one line that says so; the run on it is read")
    place = folder / "read-only"
    place.mkdir(parents=True)
    if not _mount(place, 1 << 26):
        tried.note = "not tried: this process may not mount a disk"
        return tried
    try:
        for one in whole:
            shutil.copytree(one.run_dir, place / one.run_dir.name)
        subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True, capture_output=True)
        for one in whole:
            for name in (one.run_dir.name, "new"):
                ended = run_child(policy, place / name, one.setting)
                good = ended.outcome.startswith("UserError") and "cannot be written (Read-only" in ended.outcome
                tried.count("" if good else f"{name}: {ended.outcome}")
            tried.count(difference(one.run_dir, place / one.run_dir.name))
    finally:
        _unmount(place)
    return tried


def _all(
    tried: Tried,
    policy: Path,
    whole: list[Whole],
    folder: Path,
    count: int,
    interrupt: Callable[[Whole, Path], tuple[Ended, str]],
    mend: Callable[[Path], None] = lambda place: None,
    clear: Callable[[Path], None] = lambda place: None,
) -> Tried:
    started = time.monotonic()
    for number, one in enumerate(turns(whole, count)):
        place = folder / str(number)
        place.mkdir(parents=True)
        ended, what = interrupt(one, place)
        failure = _check(ended, place / "run")
        if not failure and not ended.outcome.startswith("finished"):
            mend(place)
            again = run_child(policy, place / "run", one.setting)
            if not again.outcome.startswith("finished"):
                failure = f"afterwards: {again.outcome}"
        failure = failure or difference(one.run_dir, place / "run")
        tried.count(failure and f"{one.name}, {what}: {failure}")
        clear(place)
        if not failure:
            shutil.rmtree(place)
    tried.seconds = time.monotonic() - started
    return tried


def _check(ended: Ended, run_dir: Path) -> str:
    """What is wrong with the way in which a run met its refusal."""
    if ended.hung:
        return "it hung"
    told = ended.outcome
    if not told.startswith(("finished", "failed: ", "UserError: ")) or "\n" in told:
        return f"it ended with {told!r}"
    if not told.startswith("finished") and "cannot be written (" not in told:
        return f"it does not say that the disk refused: {told!r}"
    if (run_dir / "run.json").exists():
        return holes(run_dir, ended.told)
    return f"{ended.told} steps were told, and there is no run.json" if ended.told else ""


def _limit(size: int) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # so that the write fails instead
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def _mount(place: Path, size: int) -> bool:
    try:
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def _unmount(place: Path) -> None:
    with suppress(OSError):
        subprocess.run(["umount", str(place)], capture_output=True, check=False)
