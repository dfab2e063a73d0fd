"""The runs that a path holds: each is read and judged alone, and nothing is merged or chosen without a note."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from glob import escape
from pathlib import Path

import numpy as np

from sharpscope.diagnose.formats import READS, events, read_file, scalars
from sharpscope.diagnose.steps import CLOCKS, step_keys
from sharpscope.diagnose.tables import Column, Table
from sharpscope.diagnose.text import BROKEN, whole
from sharpscope.errors import UserError, nearest

ENDINGS = frozenset(
    ["jsonl", "json", "csv", "tsv", "log", "txt", "out", "ipynb", "gz", "zip", "md"]
)
"""Endings of the files of a folder that are looked at."""
MOST = 40
"""Files of a folder that are read."""
MOST_ENTRIES = 20_000
"""Entries of subfolders that are looked at."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """One run as it was found."""

    path: Path  # the file or folder that was read
    table: Table
    format: str  # in words
    name: str = ""  # of the run, where the path holds several
    framework: str | None = None  # who wrote it, if that is certain
    notes: tuple[str, ...] = field(default=())


def sources(path: Path) -> list[Source]:
    """The runs of a file or folder, in the order in which they are judged.

    Raises:
        UserError: nothing there can be read.
    """
    if not path.exists():
        # transformers writes trainer_state.json into the folder of each checkpoint
        below = any(path.parent.glob(f"*/{escape(path.name)}"))
        near = f"; give {path.parent}, which has it below" if below else f"; give {READS}"
        raise UserError(f"{path}: does not exist{near}")
    if path.is_dir() and (path / "run.json").is_file():
        from sharpscope.diagnose.own import own_run

        return [
            Source(
                path=path,
                table=own_run(path),
                format="recorded run",
                framework="sharpscope",
            )
        ]
    if not path.is_dir():
        if not path.is_file():
            raise UserError(f"{path}: is no file or folder; give {READS}")
        return _of_file(path, path.name)
    return _of_folder(path)


def _of_file(file: Path, name: str) -> list[Source]:
    content = read_file(file)
    tables = split(content.table)
    return [
        Source(
            path=file,
            table=table,
            format=content.format,
            name=run or name,
        )
        for run, table in tables.items()
    ]


def _of_folder(folder: Path) -> list[Source]:
    states = _files(folder, "trainer_state.json")
    if states:
        return _states(folder, states)
    event_files = _files(folder, "*tfevents*")
    if event_files:
        return _event_runs(folder, event_files)
    found: list[Source] = []
    refused: list[str] = []
    for file in _log_files(folder):
        try:
            found.extend(_of_file(file, str(file.relative_to(folder))))
        except UserError as error:
            refused.append(str(error))
    if found:
        return _with_series_joined(found)
    what = f"none of its files can be read ({refused[0]})" if refused else "holds no log"
    raise UserError(f"{folder}: {what}; diagnose reads {READS}")


def _files(folder: Path, pattern: str) -> list[Path]:
    return sorted(file for file in folder.rglob(pattern) if file.is_file())


def _log_files(folder: Path) -> list[Path]:
    """The files of a folder that may be logs, at most `MOST`; without any those of its subfolders."""
    below = itertools.islice(folder.rglob("*"), MOST_ENTRIES)
    for entries in (folder.iterdir(), below):
        files = [entry for entry in sorted(entries) if _may_be_log(entry, folder)]
        if files:
            return files[:MOST]
    return []


def _may_be_log(file: Path, folder: Path) -> bool:
    """By its name; files of MLflow have no ending, in a folder `metrics` of `folder`."""
    above = {folder.name, *file.relative_to(folder).parts[:-1]}
    of_mlflow = not file.suffix and "metrics" in above
    return file.is_file() and (of_mlflow or file.suffix.lstrip(".").lower() in ENDINGS)


def _with_series_joined(found: list[Source]) -> list[Source]:
    """Runs of which files with one quantity each, as TensorBoard exports them and MLflow keeps them, are one."""
    groups: dict[tuple[Path, str], list[Source]] = {}
    others = []
    for source in found:
        keys = source.table.columns.keys() - {*step_keys(source.table), *CLOCKS}
        if len(keys) == 1:
            path = source.path
            place = next((p for p in path.parents if p.name == "metrics"), path.parent)
            groups.setdefault((place, path.stem.rpartition("tag-")[0]), []).append(source)
        else:
            others.append(source)
    for (place, name), series in groups.items():
        joined = _joined_series(place, name, series)
        others.extend(series if joined is None else [joined])
    return others


def _joined_series(place: Path, name: str, found: list[Source]) -> Source | None:
    """The run whose quantities stand in a file each; None if there is but one file, or if two have the same quantity."""
    keys = Counter(key for source in found for key in source.table.columns)
    of_one = [key for key, files in keys.items() if files == 1]
    if len(found) < 2 or len(of_one) < len(found):
        return None
    table = Table()
    for source in found:
        table.append(source.table)
    files = ", ".join(source.path.name for source in found)
    notes = (f"{len(found)} files with one quantity each are one run: {files}.",)
    return replace(
        found[0],
        path=place,
        table=table,
        name=name or str(place),
        notes=notes,
    )


# -- transformers


def _states(folder: Path, files: Sequence[Path]) -> list[Source]:
    """Of the trainer_state.json of each run the one with the highest step: it holds the history of the others."""
    runs: dict[Path, list[Path]] = {}
    for file in files:
        parent = file.parent
        root = parent.parent if re.fullmatch(r"checkpoint-\d+", parent.name) else parent
        runs.setdefault(root if parent != folder else folder, []).append(file)
    found = []
    problems = []
    for root, states in sorted(runs.items()):
        best = max(states, key=_reached)
        try:
            (source,) = _of_file(best, _name(root, folder))
        except UserError as error:
            problems.append(error)
            continue
        notes: tuple[str, ...] = ()
        if len(states) > 1:
            notes = (f"Of {len(states)} trainer_state.json the one with the highest step is read.",)
        found.append(replace(source, notes=notes))
    if not found:
        raise problems[0]
    return found


def _reached(file: Path) -> tuple[int, int]:
    """The step that a trainer_state.json has reached; also by the name of its folder, should its content be broken."""
    number = re.search(r"-(\d+)$", file.parent.name)
    try:
        state = json.loads(whole(file))
        step = state.get("global_step") if isinstance(state, dict) else None
    except (*BROKEN, ValueError, RecursionError, UserError):
        step = None
    return (step if isinstance(step, int) else -1), int(number[1]) if number else 0


def _name(place: Path, folder: Path) -> str:
    return str(place.relative_to(folder)) if place != folder else folder.name


# -- TensorBoard


def _event_runs(folder: Path, files: Sequence[Path]) -> list[Source]:
    """The runs of event files: files of one folder are one run only where one goes on where another ends, or has other tags."""
    places: dict[Path, list[Path]] = {}
    for file in files:
        places.setdefault(file.parent, []).append(file)
    found = []
    for place, written in sorted(places.items()):
        groups = _joined([(file, scalars(file)) for file in written])
        for number, group in enumerate(groups, 1):
            name = _name(place, folder)
            if len(groups) > 1:
                name = f"{name} ({number})" if name else f"({number})"
            notes: tuple[str, ...] = ()
            if len(group) > 1:
                names = ", ".join(file.name for file in group)
                notes = (
                    f"{len(group)} event files are one run, each goes on after another: {names}.",
                )
            table = events(group)
            path = group[0] if len(group) == 1 else place
            found.append(
                Source(
                    path=path,
                    table=table,
                    format="TensorBoard events",
                    name=name,
                    notes=notes,
                )
            )
    if not found:
        raise UserError(f"{folder}: its TensorBoard events hold no scalars")
    return found


def _joined(files: Iterable[tuple[Path, Mapping[str, Mapping[int, float]]]]) -> list[list[Path]]:
    """Event files of one folder as runs; files without scalars are left out."""
    runs: list[list[Path]] = []
    reached: list[dict[str, tuple[int, int]]] = []  # of each run: tag -> first and last step
    for file, tags in files:
        spans = {tag: (min(points), max(points)) for tag, points in tags.items() if points}
        if not spans:
            continue
        begins = min(first for first, _ in spans.values())
        before = [at for at, seen in enumerate(reached) if _goes_on(seen, spans)]
        if not before:
            runs.append([file])
            reached.append(dict(spans))
            continue
        # of several the one that ends nearest to where this one begins
        run = min(
            before, key=lambda at: abs(begins - max(last for _, last in reached[at].values()))
        )
        runs[run].append(file)
        for tag, (first, last) in spans.items():
            begun, ended = reached[run].get(tag, (first, last))
            reached[run][tag] = min(begun, first), max(ended, last)
    return runs


def _goes_on(seen: Mapping[str, tuple[int, int]], spans: Mapping[str, tuple[int, int]]) -> bool:
    """Whether a file's tags begin well after the beginning of a run's, or are none of its tags."""
    shared = [(seen[tag], spans[tag]) for tag in spans if tag in seen]
    return all(new[0] > old[0] + 0.1 * (old[1] - old[0]) for old, new in shared)


# -- tables of several runs


def split(table: Table) -> dict[str, Table]:
    """The runs of a table by name; of a table of one run, "" and the table.

    An export of W&B's charts has columns "run - key", with __MIN and __MAX of the same; other tables say in a column which run a row
    is of.

    Args:
        table: all rows of a file.

    Returns:
        Name -> rows, in the order in which the runs first appear.
    """
    runs = table.runs + [""] * (table.count - len(table.runs))
    names = list(dict.fromkeys(name for name in runs if name))
    if len(names) > 1:
        of_row = np.array(runs)
        return {name: table.part(of_row == name) for name in names}
    charts: dict[str, dict[str, str]] = {}
    shared: dict[str, Column] = {}
    for key, column in table.columns.items():
        if key.endswith(("__MIN", "__MAX")):
            continue
        run, separator, rest = key.partition(" - ")
        if separator:
            charts.setdefault(run, {}).setdefault(rest, key)
        else:
            shared[key] = column
    if not charts:
        return {"": table}
    made = {}
    for run, keys in charts.items():
        columns = {**shared, **{rest: table.columns[key] for rest, key in keys.items()}}
        made[run if len(charts) > 1 else ""] = replace(
            table,
            columns=columns,
            texts=set(),
            runs=[],
            notes=list(table.notes),
        )
    return made


def chosen(found: list[Source], name: str | None, path: Path) -> list[Source]:
    """The run with a name, or all.

    Args:
        found: all runs of the path.
        name: what the user asked for; None for all.
        path: for the message.

    Raises:
        UserError: there is no such run.
    """
    if name is None:
        return found
    names = [source.name for source in found]
    kept = [source for source in found if name in (source.name, str(source.path))]
    if not kept:
        raise UserError(f"{path}: has no run {name!r}{nearest(name, names)}")
    return kept
