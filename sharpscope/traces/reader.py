"""Runs as pandas frames: `load_run`, `load_runs`. Readers never change a run's folder."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa

from sharpscope.errors import UserError, nearest
from sharpscope.traces.files import CONFIG_FILE, RUN_FILE, TRACES, read_run_info
from sharpscope.traces.html import run_html, runs_html
from sharpscope.traces.lock import has_writer
from sharpscope.traces.packs import Pack, is_pack, open_pack
from sharpscope.traces.parts import DamagedPartError, Part, names, open_part
from sharpscope.traces.reductions import Reduction, read_reductions
from sharpscope.traces.schema import SCHEMA_VERSION, TABLES, arrow_schema

_DEPTH = 4
GONE = "it was listed and could not be opened, twice"


class DamagedPartWarning(UserWarning):
    """A part was set aside; everything else of the run was read."""


class Run:
    """One recorded run. Frames are read when first asked for, then kept; `tokens` is read anew at each call.

    A run may be written, or wound back by `--resume`, while it is read: parts are listed anew at each read, and once more
    where one is gone. The footer of a part that was there before is not read again.

    Attributes:
        path: its folder; of a run in a pack, the pack's folder and the run's name.
        info: run.json.
        damaged: part (relative to the run's folder) -> why it was set aside. Grows when a page that is read fails
            its check; `verify` looks at every page.
    """

    def __init__(self, path: str | Path, pack: Pack | None = None) -> None:
        self.path = Path(path)
        self._pack = pack
        self._key = "" if pack is None else self.path.relative_to(pack.folder).as_posix()
        self.info = read_run_info(self.path) if pack is None else pack.info(self._key)
        version = self.info.get("schema_version")
        if version != SCHEMA_VERSION:
            raise UserError(
                f"run: {self.path} has schema version {version}, this program reads {SCHEMA_VERSION}; "
                "read it with the sharpscope that its run.json names under versions"
            )
        self.damaged: dict[str, str] = {}
        self._parts: dict[str, dict[str, Part]] = {}  # table -> file name -> part

    name = property(lambda self: str(self.info.get("name", self.path.name)), doc="Name of the run.")
    method = property(lambda self: str(self.info.get("method")), doc="Name of the method it trained with.")
    task = property(lambda self: str(self.info.get("task")), doc="Name of the task it trained on.")
    seed = property(lambda self: self.info.get("seed"), doc="Seed of the run.")

    @property
    def config(self) -> dict[str, Any]:
        """The resolved configuration."""
        return dict(self.info.get("config") or {})

    @property
    def config_text(self) -> str | None:
        """The content of config.yaml, from which the run can be repeated; None where there is none."""
        if self._pack is not None:
            return self._pack.config_text(self._key)
        file = self.path / CONFIG_FILE
        return file.read_text("utf-8") if file.is_file() else None

    @property
    def status(self) -> str:
        """running | finished | interrupted | failed | died (said to be running, by a process that is gone)."""
        said = str(self.info.get("status", "failed"))
        return "died" if said == "running" and not has_writer(self.path) else said

    @cached_property
    def steps(self) -> pd.DataFrame:
        """Table `steps`, in order."""
        return self._frame("steps")

    @cached_property
    def eval(self) -> pd.DataFrame:
        """Table `eval`."""
        return self._frame("eval")

    @cached_property
    def rollouts(self) -> pd.DataFrame:
        """Table `rollouts`; `reward_parts` is a JSON object as text."""
        return self._frame("rollouts")

    @cached_property
    def probes(self) -> pd.DataFrame:
        """Table `probes`."""
        return self._frame("probes")

    @cached_property
    def events(self) -> pd.DataFrame:
        """Table `events`."""
        return self._frame("events")

    def tokens(self, steps: Iterable[int] | int | None = None, columns: Sequence[str] | None = None) -> pd.DataFrame:
        """Table `tokens` for `steps` (None: all) and `columns` (None: all); nothing else is read from the disk.

        Raises:
            UserError: for an unknown column.
        """
        return self._frame("tokens", steps, columns)

    def iter_tokens(
        self,
        steps: Iterable[int] | int | None = None,
        columns: Sequence[str] | None = None,
        required: Sequence[str] = (),
    ) -> Iterator[pd.DataFrame]:
        """The same one part after the other, so that memory holds one part's chosen columns.

        Steps in which a `required` column was not recorded at all are left out without being read.
        """
        for table in self._tables("tokens", _steps(steps), _columns("tokens", columns), _columns("tokens", required)):
            yield _pandas(table)

    def arrow(self, table: str, steps: Iterable[int] | int | None = None) -> pa.Table:
        """A table with all its columns as Arrow, where null ("not recorded") and NaN (recorded) differ."""
        return pa.concat_tables(
            [arrow_schema(table).empty_table(), *self._tables(table, _steps(steps), _columns(table, None))]
        )

    @cached_property
    def reductions(self) -> list[Reduction] | None:
        """What was made of the whole token table, where that was not kept (`sharpscope reduce`); None where it was."""
        return read_reductions(self.path) if self._pack is None else self._pack.reductions(self._key)

    @property
    def reduced(self) -> dict[str, Any] | None:
        """Of a reduced run: `tokens` it had, `sampled` that were kept, and by which `rule`; None of a whole one."""
        return self.info.get("reduced")

    def rows(self, table: str) -> int:
        """Number of rows of a table, from the footers alone."""
        return sum(part.rows for part in self._open("tokens" if table == "tokens" else table))

    @property
    def token_steps(self) -> list[int]:
        """Steps that have token rows, from the footers alone where a part holds one step a row group."""
        groups = {(g.first_step, g.last_step) for part in self._open("tokens") for g in part.groups}
        if any(first != last for first, last in groups):
            return sorted(self.tokens(columns=["step"])["step"].unique().tolist())
        return sorted({first for first, _ in groups})

    def verify(self) -> dict[str, str]:
        """Read every page of every part and return `damaged`."""
        for table in TABLES:
            for _ in self._tables(table, None, TABLES[table].names):
                pass
        return self.damaged

    def _frame(
        self, table: str, steps: Iterable[int] | int | None = None, columns: Sequence[str] | None = None
    ) -> pd.DataFrame:
        chosen = _columns(table, columns)
        empty = pa.schema([arrow_schema(table).field(name) for name in chosen]).empty_table()
        tables = list(self._tables(table, _steps(steps), chosen))
        return _pandas(pa.concat_tables([empty, *tables]))

    def _tables(
        self, table: str, steps: set[int] | None, columns: list[str], required: Sequence[str] = ()
    ) -> Iterator[pa.Table]:
        schema = pa.schema([arrow_schema(table).field(name) for name in columns])
        waiting, missed = self._open(table), Path()
        while waiting:
            part = waiting.pop(0)
            if not part.wanted(steps, required):
                continue
            try:
                rows = part.read(columns, steps, required)
            except FileNotFoundError:
                if part.path == missed:
                    self._set_aside(part.path, DamagedPartError(GONE))
                    continue
                # A resumed run has taken it away since the folder was listed, or written its first rows under a new name.
                missed = part.path
                waiting = [other for other in self._open(table) if other.number >= part.number]
                continue
            except DamagedPartError as error:
                self._set_aside(part.path, error)
                continue
            if rows.num_rows:
                yield rows.cast(schema)

    def _open(self, table: str) -> list[Part]:
        """The parts in the folder now, in order, but those that were set aside."""
        if self._pack is not None:
            return [part for part in self._pack.parts(table, self._key) if part.path.name not in self.damaged]
        gone, missed = self._list(table), set[str]()
        while not missed.issuperset(gone):
            missed.update(gone)
            gone = self._list(table)
        for name in gone:
            self._set_aside(self.path / TRACES / table / name, DamagedPartError(GONE))
        found: dict[int, Part] = {}
        for part in self._parts[table].values():
            # two parts of one number: a rewind was interrupted, and the shorter is what it kept
            if part.number not in found or part.rows < found[part.number].rows:
                found[part.number] = part
        aside = self._aside(table)
        return [part for _, part in sorted(found.items()) if part.path.name not in aside]

    def _list(self, table: str) -> list[str]:
        """Set the table's parts to those in the folder; returns names that were gone before their footer was read."""
        folder, known, aside = self.path / TRACES / table, self._parts.get(table, {}), self._aside(table)
        parts: dict[str, Part] = {}
        gone = []
        for name in names(folder):
            if name.startswith(".") or not name.endswith(".parquet"):
                continue  # being written, or left by a crash: never published
            if name in known:  # a name holds its footer's checksum
                parts[name] = known[name]
            elif name not in aside:
                try:
                    parts[name] = open_part(folder / name)
                except FileNotFoundError:
                    gone.append(name)
                except DamagedPartError as error:
                    self._set_aside(folder / name, error)
        self._parts[table] = parts
        return gone

    def _aside(self, table: str) -> set[str]:
        """File names of the table's parts that were set aside."""
        folder = f"{TRACES}/{table}/"
        return {name.removeprefix(folder) for name in self.damaged if name.startswith(folder)}

    def _set_aside(self, path: Path, error: DamagedPartError) -> None:
        name = path.relative_to(self.path).as_posix() if self._pack is None else path.name
        if name not in self.damaged:
            self.damaged[name] = str(error)
            warnings.warn(f"{self.name}: {name} is set aside: {error}", DamagedPartWarning, stacklevel=4)

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}, method={self.method!r}, seed={self.seed}, status={self.status!r})"

    def _repr_html_(self) -> str:
        return run_html(self)


class Runs(Sequence[Run]):
    """Several runs; each frame has the columns `run` (folder below the root), `method` and `seed` before its own.

    Attributes:
        root: the folder that was searched.
        skipped: folder -> why that run could not be read.
    """

    def __init__(self, root: str | Path, runs: dict[str, Run], skipped: dict[str, str]) -> None:
        self.root = Path(root)
        self.by_name = runs
        self.skipped = skipped

    def __getitem__(self, index: Any) -> Any:
        """Run by position, or by name as in the column `run`."""
        return self.by_name[index] if isinstance(index, str) else list(self.by_name.values())[index]

    def __len__(self) -> int:
        return len(self.by_name)

    steps = property(lambda self: self._joined("steps"), doc="Table `steps` of all runs.")
    eval = property(lambda self: self._joined("eval"), doc="Table `eval` of all runs.")
    rollouts = property(lambda self: self._joined("rollouts"), doc="Table `rollouts` of all runs.")
    probes = property(lambda self: self._joined("probes"), doc="Table `probes` of all runs.")
    events = property(lambda self: self._joined("events"), doc="Table `events` of all runs.")

    def tokens(self, steps: Iterable[int] | int | None = None, columns: Sequence[str] | None = None) -> pd.DataFrame:
        """Table `tokens` of all runs, as Run.tokens."""
        steps = _steps(steps)
        return self._concat({name: run.tokens(steps, columns) for name, run in self.by_name.items()})

    @property
    def table(self) -> pd.DataFrame:
        """One row a run: run, method, seed, task, status, steps_done, started, finished, damaged (number of parts)."""
        rows = [
            {"run": name, "method": run.method, "seed": run.seed, "task": run.task, "status": run.status,
             "steps_done": run.info.get("steps_done"), "started": run.info.get("started"),
             "finished": run.info.get("finished"), "damaged": len(run.damaged)}
            for name, run in self.by_name.items()
        ]  # fmt: skip
        columns = ["run", "method", "seed", "task", "status", "steps_done", "started", "finished", "damaged"]
        return pd.DataFrame(rows, columns=columns)

    def _joined(self, table: str) -> pd.DataFrame:
        return self._concat({name: getattr(run, table) for name, run in self.by_name.items()})

    def _concat(self, frames: dict[str, pd.DataFrame]) -> pd.DataFrame:
        named = [
            frame.assign(run=name, method=self.by_name[name].method, seed=self.by_name[name].seed)
            for name, frame in frames.items()
        ]
        if not named:
            return pd.DataFrame(columns=["run", "method", "seed"])
        whole = pd.concat([frame for frame in named if len(frame)] or named[:1], ignore_index=True)
        return whole[["run", "method", "seed", *(c for c in whole if c not in ("run", "method", "seed"))]]

    def __repr__(self) -> str:
        return f"Runs({str(self.root)!r}, {len(self)} runs, {len(self.skipped)} skipped)"

    def _repr_html_(self) -> str:
        return runs_html(self)


def load_run(path: str | Path) -> Run:
    """Open one run's folder, also while it is being written, or one run of a pack: `pack/name`.

    Raises:
        UserError: if it holds no readable run.json, or one of another schema version.
    """
    folder = Path(path)
    if not folder.exists():
        for parent in list(folder.parents)[:_DEPTH]:
            if is_pack(parent):
                pack = open_pack(parent)
                name = folder.relative_to(parent).as_posix()
                if name not in pack.names:
                    raise UserError(f"run: the pack {parent} holds no run {name!r}{nearest(name, pack.names)}")
                return Run(folder, pack)
    return Run(folder)


def load_runs(path: str | Path | Iterable[str | Path]) -> Runs:
    """Open every run below a folder (itself included, four levels deep), packs too, or a list of run folders.

    A run that cannot be read (damaged run.json, another schema version) is left out, named in `skipped`, and warned of.

    Raises:
        UserError: if the folder does not exist.
    """
    if isinstance(path, str | Path):
        root = Path(path)
        if not root.is_dir():
            raise UserError(f"runs: {root} is no folder; give the folder that holds your runs")
        folders = list(_run_folders(root, _DEPTH))
        labels = [folder.relative_to(root).as_posix() if folder != root else root.resolve().name for folder in folders]
    else:
        folders = [Path(item) for item in path]
        root = folders[0].parent if folders else Path()
        short = [folder.name for folder in folders]
        labels = short if len(set(short)) == len(short) else [str(folder) for folder in folders]
    runs: dict[str, Run] = {}
    skipped: dict[str, str] = {}
    for label, folder in zip(labels, folders, strict=True):
        try:
            runs[label] = load_run(folder)
        except UserError as error:
            skipped[label] = str(error)
            warnings.warn(f"{label} is left out: {error}", UserWarning, stacklevel=2)
    return Runs(root, runs, skipped)


def _run_folders(folder: Path, depth: int) -> Iterator[Path]:
    if (folder / RUN_FILE).is_file():
        yield folder  # what lies below a run belongs to it
    elif is_pack(folder):
        yield from (folder / name for name in open_pack(folder).names)
    elif depth:
        for child in sorted(child for child in folder.iterdir() if child.is_dir() and not child.name.startswith(".")):
            yield from _run_folders(child, depth - 1)


def _steps(steps: Iterable[int] | int | None) -> set[int] | None:
    if steps is None:
        return None
    return {int(steps)} if isinstance(steps, int) or not isinstance(steps, Iterable) else {int(step) for step in steps}


def _columns(table: str, columns: Sequence[str] | None) -> list[str]:
    valid = TABLES[table].names
    if columns is None:
        return valid
    chosen = [columns] if isinstance(columns, str) else list(columns)
    for name in chosen:
        if name not in valid:
            raise UserError(f"columns: {table} has no column {name!r}{nearest(name, valid)}")
    return chosen


def _pandas(table: pa.Table) -> pd.DataFrame:
    return table.to_pandas(ignore_metadata=True, split_blocks=True, self_destruct=False)
