"""Parts with flipped bytes, cut parts, damaged checkpoints: named and set aside, never merged, the rest readable."""

from __future__ import annotations

import random
import shutil
import time
import warnings
from collections.abc import Iterable
from pathlib import Path

import pandas as pd

from sharpscope.traces import TABLES, Run, load_run, update_run_info
from sharpscope.training.checkpoint import checkpoints
from tests.faults.child import run_child
from tests.faults.killing import Whole
from tests.faults.setting import Tried, difference


def flip_bytes(whole: list[Whole], folder: Path, each: int, seed: int = 0) -> Tried:
    """Flip bits of single bytes of the first part of every table of a run: `each` at random, every one if there are no more."""
    tried = Tried("a byte flipped in a part", "the part is named and set aside, or no value changed; the rest is read")
    chooser = random.Random(f"{seed}/flip")
    started = time.monotonic()
    for table, part, rest, plain in _parts(whole[0], folder / "flipped"):
        content = part.read_bytes()
        places: Iterable[int] = range(len(content))
        if each < len(content):
            places = (chooser.randrange(len(content)) for _ in range(each))
        for place in places:
            damaged = bytearray(content)
            damaged[place] ^= chooser.randint(1, 255)
            part.write_bytes(damaged)
            failure = _read(part, table, rest, plain)
            tried.count(failure and f"{table}, byte {place}: {failure}")
        part.write_bytes(content)
    tried.seconds = time.monotonic() - started
    return tried


def cut_parts(whole: list[Whole], folder: Path, each: int, seed: int = 0) -> Tried:
    """Cut the first part of every table at `each` random lengths, and append rubbish."""
    tried = Tried("a part cut off, or with rubbish behind it", "the same")
    chooser = random.Random(f"{seed}/cut")
    started = time.monotonic()
    for table, part, rest, plain in _parts(whole[0], folder / "cut"):
        content = part.read_bytes()
        for number in range(each):
            rubbish = content + chooser.randbytes(chooser.randint(1, 64))
            part.write_bytes(rubbish if number % 4 == 3 else content[: chooser.randrange(len(content))])
            failure = _read(part, table, rest, plain)
            tried.count(failure and f"{table}, cut {number}: {failure}")
        part.write_bytes(content)
    tried.seconds = time.monotonic() - started
    return tried


def damage_checkpoints(policy: Path, whole: list[Whole], folder: Path, count: int, seed: int = 0) -> Tried:
    """Flip a byte in any file of the newest checkpoint of an interrupted run, or remove the file, then resume."""
    tried = Tried(
        "a damaged or missing file in the newest checkpoint",
        "it is named in run.json and set aside; resumed from the one before, equal to the uninterrupted run",
    )
    chooser = random.Random(f"{seed}/checkpoint")
    started = time.monotonic()
    for number in range(count):
        one = whole[number % len(whole)]
        run_dir = folder / f"checkpoint-{number}" / "run"
        shutil.copytree(one.run_dir, run_dir)
        update_run_info(run_dir, status="interrupted")  # nothing goes on with a finished one
        newest = checkpoints(run_dir)[-1]
        victim = chooser.choice(sorted(path for path in newest.rglob("*") if path.is_file()))
        if chooser.random() < 0.25:
            victim.unlink()
        else:
            content = bytearray(victim.read_bytes())
            content[chooser.randrange(len(content))] ^= chooser.randint(1, 255)
            victim.write_bytes(content)
        ended = run_child(policy, run_dir, one.setting)
        notes = load_run(run_dir).info.get("notes", [])
        failure = "" if ended.outcome.startswith("finished") else ended.outcome
        if not failure and victim.name != "trainer_state.json" and not any(newest.name in note for note in notes):
            failure = f"it is not named: {notes}"
        failure = failure or difference(one.run_dir, run_dir)
        tried.count(failure and f"{one.name}, {victim.name}: {failure}")
        if not failure:
            shutil.rmtree(run_dir.parent)
    tried.seconds = time.monotonic() - started
    return tried


def _parts(whole: Whole, folder: Path) -> Iterable[tuple[str, Path, pd.DataFrame, pd.DataFrame]]:
    """(table, its first part in a copy of the run, the table without that part, the whole table) for every table."""
    run_dir = folder / "run"
    shutil.copytree(whole.run_dir, run_dir)
    for table in TABLES:
        parts = sorted((run_dir / "traces" / table).glob("part-*.parquet"))
        if not parts:
            continue
        for later in parts[2:]:
            later.unlink()  # one to damage and one beside it are enough, and faster to read
        plain = _frame(load_run(run_dir), table)
        hidden = parts[0].rename(parts[0].with_suffix(".hidden"))
        rest = _frame(load_run(run_dir), table)
        hidden.rename(parts[0])
        yield table, parts[0], rest, plain


def _frame(run: Run, table: str) -> pd.DataFrame:
    frame = run.tokens() if table == "tokens" else getattr(run, table)
    return frame.reset_index(drop=True)


def _read(part: Path, table: str, rest: pd.DataFrame, plain: pd.DataFrame) -> str:
    """What is wrong with a reader's account of a run with a damaged part."""
    run_dir = part.parents[2]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            run = load_run(run_dir)
            frame = _frame(run, table)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    if not run.damaged:
        return "" if frame.equals(plain) else "values changed and nothing was said"
    if list(run.damaged) != [part.relative_to(run_dir).as_posix()]:
        return f"named: {list(run.damaged)}"
    return "" if frame.equals(rest) else "the rest is not what it was"
