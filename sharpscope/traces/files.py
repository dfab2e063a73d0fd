"""Files that are whole or absent: written aside, fsynced, renamed; and the folder and run.json of a run."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sharpscope.errors import UserError
from sharpscope.traces.schema import SCHEMA_VERSION

RUN_FILE = "run.json"
CONFIG_FILE = "config.yaml"
TRACES = "traces"
STATUSES = ("running", "finished", "interrupted", "failed")
REQUIRED_INFO = ("method", "task", "seed", "config")
ASIDE = ".tmp"
STARTING = f".start{ASIDE}"
"""Marks a folder as ours from the first moment of a start until run.json is there; nothing else in it says so."""
_OF_A_START = (CONFIG_FILE, "tokenizer", "lock.json", TRACES)
_KINDS: dict[str, tuple[type, ...]] = {
    "name": (str,), "method": (str,), "task": (str,), "status": (str,), "started": (str,), "finished": (str,),
    "seed": (int,), "steps_done": (int,), "config": (dict,), "calibration": (dict,), "versions": (dict,), "notes": (list,),
    "probe_cost": (dict,),
}  # fmt: skip
"""What run.json's values must be, where there are any: readers rely on it."""
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._+=-]{0,118}[A-Za-z0-9_+=-])?")


def now() -> str:
    """The present time, UTC, ISO 8601 to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def sync_folder(path: Path) -> None:
    """Flush a file's content, or a folder's entries, to the disk, so that a rename in it survives a power loss."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    """Flush every file and folder below `folder`, and itself, to the disk."""
    for path in [*folder.rglob("*"), folder]:
        sync_folder(path)


def publish(aside: Path, final: Path) -> None:
    """Make a finished file visible under its name: fsync the file, rename, fsync the folder."""
    sync_folder(aside)
    aside.replace(final)
    sync_folder(final.parent)


def write_atomic(path: Path, data: str | bytes) -> None:
    """Replace `path` by `data` in one step: after a crash it holds the old content or the new, never a part."""
    content = data.encode("utf-8", "replace") if isinstance(data, str) else data
    aside = path.with_name(f".{path.name}.{os.getpid()}{ASIDE}")
    try:
        aside.write_bytes(content)
        publish(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def output_folder(out: str | Path) -> Path:
    """`out`, made where it is not there yet.

    Raises:
        UserError: if it cannot be made.
    """
    folder = Path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"out: {folder} cannot be made ({error.strerror}); choose another --out") from error
    return folder


def set_aside(folder: Path) -> Path:
    """Rename a folder that nothing goes on from, so that what it holds is kept and never merged; returns its new path.

    The new name begins with a dot, so that readers of runs pass over it.
    """
    number = 1
    while (target := folder.with_name(f".{folder.name}.aborted-{number}")).exists():
        number += 1
    folder.rename(target)
    sync_folder(target.parent)
    return target


def run_path(root: str | Path, name: str) -> Path:
    """`root/name` for a run name that is one plain folder name.

    Raises:
        UserError: for a name that could leave `root` or confuse a shell or terminal.
    """
    if not _NAME.fullmatch(name):
        raise UserError(
            f"name: {name!r} cannot name a run; use 1 to 120 letters, digits and . _ + = -, first a letter or digit"
        )
    return Path(root) / name


def create_run_dir(path: str | Path) -> Path:
    """Make the folder of a new run, with its `traces`; an empty folder may exist already, or a start that was killed.

    Raises:
        UserError: if the folder holds anything else, is a file, or cannot be made.
    """
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()) and not never_began(folder):
            what = "holds a run" if (folder / RUN_FILE).exists() else "is not empty"
            raise UserError(f"out: {folder} {what} and is not overwritten; choose another --out, or remove it first")
        (folder / STARTING).touch()
        (folder / TRACES).mkdir(exist_ok=True)
        sync_folder(folder)
        sync_folder(folder.parent)
    except FileExistsError as error:
        raise UserError(f"out: {folder} exists and is not a free folder; choose another --out") from error
    except OSError as error:
        raise UserError(f"out: {folder} cannot be written ({error.strerror}); choose another --out") from error
    return folder


def never_began(folder: Path) -> bool:
    """Whether a folder is what a run leaves that was killed before it wrote run.json: nothing is recorded in it.

    A folder that only looks like it, such as one in which a person keeps a config.yaml, is not.
    """
    left = set(folder.iterdir())
    if any(path.is_file() for path in (folder / TRACES).rglob("*")):
        return False
    # Without the mark it was killed, if it is ours at all, before the mark was on the disk: no file came earlier.
    return left <= {folder / TRACES} or (folder / STARTING in left and left == set(start_files(folder)))


def start_files(folder: Path) -> list[Path]:
    """What in a folder a start writes before run.json; anything else is a person's."""
    return [p for p in folder.iterdir() if p.name in _OF_A_START or (p.name[0] == "." and p.name.endswith(ASIDE))]


def create_run_info(run_dir: str | Path, info: Mapping[str, Any]) -> dict[str, Any]:
    """Write run.json of a new run: `info` plus schema_version, name, status and start; returns what was written.

    Raises:
        ValueError: if `info` lacks one of method, task, seed, config.
        FileExistsError: if there is a run.json.
    """
    path = Path(run_dir) / RUN_FILE
    missing = [key for key in REQUIRED_INFO if key not in info]
    if missing:
        raise ValueError(f"run.json needs {', '.join(missing)}")
    if path.exists():
        raise FileExistsError(f"{path} exists")
    head = {
        "schema_version": SCHEMA_VERSION,
        "name": Path(run_dir).resolve().name,
        "status": "running",
        "started": now(),
    }
    whole = {**head, "finished": None, "steps_done": 0, "parent": None, "calibration": None, "notes": [], **info}
    _write_info(path, whole)
    (path.parent / STARTING).unlink(missing_ok=True)
    return whole


def update_run_info(run_dir: str | Path, **changes: Any) -> dict[str, Any]:
    """Replace some keys of run.json in one step and return the whole.

    Raises:
        ValueError: for a status that is none of STATUSES.
    """
    path = Path(run_dir) / RUN_FILE
    whole = {**read_run_info(run_dir), **changes}
    _write_info(path, whole)
    return whole


def _write_info(path: Path, info: Mapping[str, Any]) -> None:
    if info["status"] not in STATUSES:
        raise ValueError(f"status {info['status']!r} is none of {', '.join(STATUSES)}")
    write_atomic(path, json.dumps(info, indent=2, default=str) + "\n")


def read_run_info(run_dir: str | Path) -> dict[str, Any]:
    """The content of run.json.

    Raises:
        UserError: if there is none, or it cannot be read as a JSON object.
    """
    path = Path(run_dir) / RUN_FILE
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise UserError(f"run: {run_dir} holds no {RUN_FILE}; give the folder of a run") from error
    except OSError as error:
        raise UserError(f"run: {path} cannot be read ({error.strerror})") from error
    return parse_run_info(content, path)


def parse_run_info(content: str | bytes, path: Path) -> dict[str, Any]:
    """The JSON object that run.json at `path` holds.

    Raises:
        UserError: if it is none, or a value is not of its kind.
    """
    try:
        info = json.loads(content)
    except ValueError as error:
        raise UserError(f"run: {path} is damaged ({error}); restore it, or leave this run out") from error
    if not isinstance(info, dict):
        raise UserError(f"run: {path} is damaged (not a JSON object); restore it, or leave this run out")
    for key, kinds in _KINDS.items():
        if not isinstance(info.get(key), (*kinds, type(None))):
            raise UserError(
                f"run: {path} is damaged ({key} is a {type(info[key]).__name__}); restore it, or leave this run out"
            )
    return info
