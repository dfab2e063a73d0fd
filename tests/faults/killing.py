"""Runs killed at random instants, or cut off by a loss of power: each is read, resumed and compared with a whole one."""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sharpscope.traces import load_run
from tests.faults.child import Death, Moment, journal_entry, run_child
from tests.faults.setting import SETTINGS, Tried, difference, holes, tiny_policy

AGAIN = 0.3  # share of the interrupted runs whose continuation is interrupted too


@dataclass(frozen=True)
class Whole:
    """An uninterrupted run to compare with, its changes of files and its seconds."""

    name: str
    setting: dict[str, Any]
    run_dir: Path
    operations: int
    seconds: float


def whole_runs(folder: Path, settings: int = len(SETTINGS)) -> tuple[Path, list[Whole]]:
    """(the initial policy's folder, one uninterrupted run of each of the first `settings` settings)."""
    policy = tiny_policy(folder / "policy")
    found = []
    for number, (name, setting) in enumerate(list(SETTINGS.items())[:settings]):
        ended = run_child(policy, folder / f"whole-{number}", setting)
        if not ended.outcome.startswith("finished"):
            raise RuntimeError(f"the uninterrupted run did not finish: {ended.outcome}")
        found.append(Whole(name, setting, folder / f"whole-{number}", ended.operations, ended.seconds))
    return policy, found


def kill_at_times(policy: Path, whole: list[Whole], folder: Path, count: int, seed: int = 0) -> Tried:
    """`count` runs killed -9 at a uniformly random time."""
    tried = Tried("`kill -9` at a random time", "read whole, resumed, equal row by row to the uninterrupted run")
    chooser = random.Random(f"{seed}/times")
    deaths = ((one, Death(seconds=chooser.uniform(0, one.seconds))) for one in turns(whole, count))
    return _kill_all(tried, policy, deaths, folder, chooser)


def kill_at_operations(policy: Path, whole: list[Whole], folder: Path, count: int, seed: int = 0) -> Tried:
    """`count` runs killed before, inside or after a random change of a file (write, fsync, rename, removal)."""
    tried = Tried("`kill -9` inside a write, a rename or a checkpoint", "the same")
    chooser = random.Random(f"{seed}/operations")
    moments: tuple[Moment, ...] = ("before", "inside", "after")
    deaths = (
        (one, Death(operation=chooser.randint(1, one.operations), moment=chooser.choice(moments)))
        for one in turns(whole, count)
    )
    return _kill_all(tried, policy, deaths, folder, chooser)


def lose_power_at_operations(policy: Path, whole: list[Whole], folder: Path, count: int, seed: int = 0) -> Tried:
    """`count` runs cut off at a random change of a file, after which all that was not fsynced may be gone.

    Files not fsynced since their last change are kept, cut in half or emptied; entries that a folder got since its last
    fsync are kept or removed. (Removals that were not fsynced are not taken back.)
    """
    tried = Tried("loss of power: what was not fsynced is lost", "the same")
    chooser = random.Random(f"{seed}/power")
    deaths = ((one, Death(operation=chooser.randint(1, one.operations))) for one in turns(whole, count))
    return _kill_all(tried, policy, deaths, folder, chooser, power=True)


def turns(whole: list[Whole], count: int) -> Iterator[Whole]:
    """`count` runs to interrupt, of each setting in turn."""
    for number in range(count):
        yield whole[number % len(whole)]


def _kill_all(
    tried: Tried,
    policy: Path,
    deaths: Iterator[tuple[Whole, Death]],
    folder: Path,
    chooser: random.Random,
    power: bool = False,
) -> Tried:
    started = time.monotonic()
    for number, (whole, death) in enumerate(deaths):
        place = folder / f"{'power' if power else 'killed'}-{number}"
        place.mkdir(parents=True)
        failure = _one(policy, whole, death, place, chooser, power)
        tried.count(failure and f"{whole.name}, {death}: {failure}")
        if not failure:
            shutil.rmtree(place)
    tried.seconds = time.monotonic() - started
    return tried


def _one(policy: Path, whole: Whole, death: Death, place: Path, chooser: random.Random, power: bool) -> str:
    """Interrupt, read, go on (and perhaps again), compare; returns what went wrong."""
    run_dir, journal = place / "run", place / "journal" if power else None
    next_death: Death | None = death
    while True:
        ended = run_child(policy, run_dir, whole.setting, next_death, journal=journal)
        if ended.hung:
            return "it hung"
        if journal is not None and not ended.outcome:
            lose_power(place, journal, chooser)
        if (run_dir / "run.json").exists():
            # a continuation takes away what lies after its checkpoint, so only what this process told must be there
            problem = holes(run_dir, ended.told)
        else:
            problem = f"{ended.told} steps were told, and there is no run.json" if ended.told else ""
        if problem:
            return problem
        if ended.outcome or next_death is None:
            break
        if (run_dir / "run.json").exists() and load_run(run_dir).status == "finished":
            return difference(whole.run_dir, run_dir) or _leftovers(run_dir)  # killed after its last word
        next_death = death if chooser.random() < AGAIN else None
    if not ended.outcome.startswith("finished"):
        return ended.outcome or "it did not end"
    return difference(whole.run_dir, run_dir) or _leftovers(run_dir)


def _leftovers(run_dir: Path) -> str:
    found = [p.name for p in run_dir.rglob("*") if p.name.endswith(".tmp") or p.name.startswith(".step-")]
    return f"left behind: {', '.join(found)}" if found else ""


def lose_power(root: Path, journal: Path, chooser: random.Random) -> None:
    """Change what is below `root` to what a disk might hold after a loss of power, by the journal of the fsyncs.

    What is left is on the disk from then on, and the journal says so.
    """
    contents: dict[int, list[int]] = {}
    entries: dict[int, set[str]] = {}
    for line in journal.read_text().splitlines() if journal.exists() else ():
        entry = json.loads(line)
        if "names" in entry:
            entries[entry["inode"]] = set(entry["names"])
        else:
            contents[entry["inode"]] = entry["content"]
    for path in sorted(path for path in root.rglob("*") if path.is_file() and path != journal):
        state = path.stat()
        if contents.get(state.st_ino) != [state.st_size, state.st_mtime_ns]:
            with path.open("r+b") as file:
                file.truncate(chooser.choice((0, state.st_size // 2, state.st_size)))
    for folder in sorted((path for path in [root, *root.rglob("*")] if path.is_dir()), reverse=True):
        for child in sorted(folder.iterdir()):
            durable = child.name in entries.get(folder.stat().st_ino, set())
            if child != journal and not durable and chooser.random() < 0.5:
                shutil.rmtree(child) if child.is_dir() else child.unlink()
    with journal.open("a") as lines:
        for path in [root, *root.rglob("*")]:
            lines.write(json.dumps(journal_entry(path)) + "\n")
