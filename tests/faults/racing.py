"""Two writers of one folder, locks left behind, a reader while a run writes."""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import time
from pathlib import Path

import psutil

from sharpscope.traces import load_run
from tests.faults.child import Death, Ended, run_child, start_child
from tests.faults.killing import Whole, turns
from tests.faults.setting import Tried, difference, holes


def race(policy: Path, whole: list[Whole], folder: Path, count: int, seed: int = 0) -> Tried:
    """`count` times two processes at once on one folder, in turn a new run and one to go on with."""
    tried = Tried(
        "two processes at once on one folder", "one writes, the other is told who does; equal to the uninterrupted run"
    )
    chooser = random.Random(f"{seed}/race")
    started = time.monotonic()
    for number, one in enumerate(turns(whole, count)):
        run_dir = folder / f"race-{number}" / "run"
        run_dir.parent.mkdir(parents=True)
        if number % 4 >= 2:
            run_child(policy, run_dir, one.setting, Death(operation=one.operations // 2))
        first = start_child(policy, run_dir, one.setting, None)
        time.sleep(chooser.uniform(0, 0.2))
        second = start_child(policy, run_dir, one.setting, None)
        failure = _one_wins([first.wait(), second.wait()]) or difference(one.run_dir, run_dir)
        tried.count(failure and f"{one.name}: {failure}")
        if not failure:
            shutil.rmtree(run_dir.parent)
    tried.seconds = time.monotonic() - started
    return tried


def _one_wins(both: list[Ended]) -> str:
    told = sorted(ended.outcome for ended in both)
    lost, won = (told[0], told[1]) if told[0].startswith("UserError") else (told[1], told[0])
    if any(ended.hung for ended in both):
        return "one hung"
    # the loser may also come so late that there is nothing left to do
    refusals = ("is being written by process", "is not overwritten", "is finished")
    if won.startswith("finished") and lost.startswith("UserError") and any(text in lost for text in refusals):
        return ""
    return f"{told}"


def stale_locks(policy: Path, whole: list[Whole], folder: Path) -> Tried:
    """Locks of dead processes, with reused numbers, empty, unreadable: taken over. Of another machine: respected."""
    tried = Tried("a lock left behind", "recognized as stale and replaced; one of another machine is respected")
    started = time.monotonic()
    one = whole[0]
    here, born = socket.gethostname(), psutil.Process().create_time()
    owner = {"pid": os.getpid(), "host": here, "since": "2026-01-01T00:00:00+00:00", "born": born}
    locks = {
        "a number that nobody has": json.dumps(owner | {"pid": 2**22 + 1}),
        "a number that another process has now": json.dumps(owner | {"born": born - 1000}),
        "empty": "",
        "rubbish": "\x00\x01{",
        "a list": "[1]",
    }
    for name, content in locks.items():
        run_dir = folder / f"lock-{len(name)}" / "run"
        run_child(policy, run_dir, one.setting, Death(operation=one.operations // 2))
        (run_dir / "lock.json").write_text(content)
        ended = run_child(policy, run_dir, one.setting)
        failure = "" if ended.outcome.startswith("finished") else ended.outcome
        tried.count((failure or difference(one.run_dir, run_dir)) and f"{name}: {failure}")
    run_dir = folder / "lock-elsewhere" / "run"
    run_child(policy, run_dir, one.setting, Death(operation=one.operations // 2))
    (run_dir / "lock.json").write_text(json.dumps(owner | {"host": "elsewhere"}))
    ended = run_child(policy, run_dir, one.setting)
    told = "on elsewhere since 2026-01-01" in ended.outcome and "remove" in ended.outcome
    tried.count("" if told else f"another machine's: {ended.outcome}")
    tried.seconds = time.monotonic() - started
    return tried


def read_while_writing(policy: Path, whole: list[Whole], folder: Path, runs: int) -> Tried:
    """Read everything of a run again and again while it is being written."""
    tried = Tried("a reader while the run writes", "whole parts only: no damage, no hole, every step that was told")
    started = time.monotonic()
    for number, one in enumerate(turns(whole, runs)):
        run_dir = folder / f"read-{number}" / "run"
        run_dir.parent.mkdir(parents=True)
        child = start_child(policy, run_dir, one.setting, None)
        while not child.outcome and time.monotonic() < started + 600:
            while child.hear(0.01):
                pass
            if child.began is None or child.outcome:
                continue
            told = child.told
            failure = holes(run_dir, told)
            status = load_run(run_dir).status
            if status not in ("running", "finished"):
                failure = failure or f"status {status}"
            tried.count(failure and f"{one.name}, after step {told}: {failure}")
        child.wait()
        shutil.rmtree(run_dir.parent)
    tried.seconds = time.monotonic() - started
    return tried
