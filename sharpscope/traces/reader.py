"""Read recorded runs as pandas data frames: `load_run` and `load_runs`. Reading never changes a run's folder."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa

from sharpscope.errors import UserError, nearest
from sharpscope.traces.files import CONFIG_FILE, RUN_FILE, TRACES, read_run_info
from sharpscope.traces.lock import has_writer
from sharpscope.traces.packs import Pack, is_pack, open_pack
from sharpscope.traces.parts import DamagedPartError, Part, names, open_part
from sharpscope.traces.reductions import Reduction, read_reductions
from sharpscope.traces.schema import READABLE_VERSIONS, TABLES, arrow_schema

_DEPTH = 4
MISSING = "it was listed but could not be opened, twice"


class DamagedPartWarning(UserWarning):
    """A damaged part was skipped; the rest of the run was read."""


class Run:
    """One recorded run. Data frames are read at first access and cached, except `tokens`, which is read at each call.

    A run may be written or rewound by `--resume` while it is read: each read lists the parts again, and once more if one
    has disappeared. Footers that were read before are reused.

    Attributes:
        path: folder of the run; for a run in a pack, the pack's folder and the run's name.
        info: content of run.json.
        damaged: skipped part (relative to the run's folder) -> reason. Updated when a page fails its check on reading;
            `verify` checks every page.
    """

    def __init__(self, path: str | Path, pack: Pack | None = None) -> None:
        self.path = Path(path)
        self._pack = pack
        self._key = "" if pack is None else self.path.relative_to(pack.folder).as_posix()
        self.info = read_run_info(self.path) if pack is None else pack.info(self._key)
        version = self.info.get("schema_version")
        if version not in READABLE_VERSIONS:
            raise UserError(
                f"run: {self.path} has schema version {version}, this version reads {READABLE_VERSIONS}; "
                "use the sharpscope version in its run.json under versions"
            )
        self.damaged: dict[str, str] = {}
        self._parts: dict[str, dict[str, Part]] = {}  # table -> file name -> part

    name = property(lambda self: str(self.info.get("name", self.path.name)), doc="Name of the run.")
    method = property(lambda self: str(self.info.get("method")), doc="Name of the training method.")
    task = property(lambda self: str(self.info.get("task")), doc="Name of the training task.")
    seed = property(lambda self: self.info.get("seed"), doc="Seed of the run.")

    @property
    def config(self) -> dict[str, Any]:
        """The resolved configuration."""
        return dict(self.info.get("config") or {})

    @property
    def config_text(self) -> str | None:
        """Content of config.yaml, which reproduces the run; None if there is none."""
        if self._pack is not None:
            return self._pack.config_text(self._key)
        file = self.path / CONFIG_FILE
        return file.read_text("utf-8") if file.is_file() else None

    @property
    def status(self) -> str:
        """Running | finished | interrupted | failed | died (run.json has "running", but its process has ended)."""
        status = str(self.info.get("status", "failed"))
        return "died" if status == "running" and not has_writer(self.path) else status

    @cached_property
    def steps(self) -> pd.DataFrame:
        """Table `steps`, in order of steps."""
        return self._frame("steps")

    @cached_property
    def updates(self) -> pd.DataFrame:
        """Table `updates`, in order of steps; empty for runs of version 0.1."""
        return self._frame("updates")

    @cached_property
    def eval(self) -> pd.DataFrame:
        """Table `eval`."""
        return self._frame("eval")

    @cached_property
    def rollouts(self) -> pd.DataFrame:
        """Table `rollouts`; `reward_parts` is a JSON object as text."""
        return self._frame("rollouts")

    @cached_property
    def uses(self) -> pd.DataFrame:
        """Table `uses`: ratio, clip and coefficient of tokens that several updates of a step used (PPO epochs)."""
        return self._frame("uses")

    @cached_property
    def probes(self) -> pd.DataFrame:
        """Table `probes`."""
        return self._frame("probes")

    @cached_property
    def probe_prompts(self) -> pd.DataFrame:
        """Table `probe_prompts`."""
        return self._frame("probe_prompts")

    @cached_property
    def events(self) -> pd.DataFrame:
        """Table `events`."""
        return self._frame("events")

    @cached_property
    def forks(self) -> pd.DataFrame:
        """Table `forks`."""
        return self._frame("forks")

    def tokens(self, steps: Iterable[int] | int | None = None, columns: Sequence[str] | None = None) -> pd.DataFrame:
        """Table `tokens`. Other steps and columns are not read from the disk.

        Args:
            steps: steps to read; None reads all.
            columns: columns to read; None reads all.

        Raises:
            UserError: a column does not exist.
        """
        return self._frame("tokens", steps, columns)

    def iter_tokens(
        self,
        steps: Iterable[int] | int | None = None,
        columns: Sequence[str] | None = None,
        required: Sequence[str] = (),
    ) -> Iterator[pd.DataFrame]:
        """Table `tokens` as one data frame per part, so that only one part is in memory.

        Args:
            steps: steps to read; None reads all.
            columns: columns to read; None reads all.
            required: skip steps in which one of these columns was not recorded.

        Raises:
            UserError: a column does not exist.
        """
        for table in self._tables("tokens", _steps(steps), _columns("tokens", columns), _columns("tokens", required)):
            yield _pandas(table)

    def arrow(self, table: str, steps: Iterable[int] | int | None = None) -> pa.Table:
        """A table with all columns in Arrow format, which distinguishes null (not recorded) from NaN (recorded)."""
        return pa.concat_tables(
            [arrow_schema(table).empty_table(), *self._tables(table, _steps(steps), _columns(table, None))]
        )

    @cached_property
    def reductions(self) -> list[Reduction] | None:
        """Results computed from the full token table before `sharpscope reduce` removed it; None for other runs."""
        return read_reductions(self.path) if self._pack is None else self._pack.reductions(self._key)

    @property
    def reduced(self) -> dict[str, Any] | None:
        """For a reduced run: number of `tokens` it had, number `sampled` that were kept and their `rule`; otherwise None."""
        return self.info.get("reduced")

    def rows(self, table: str) -> int:
        """Number of rows of a table; reads footers only."""
        return sum(part.rows for part in self._open(table))

    @property
    def token_steps(self) -> list[int]:
        """Steps with token rows; reads footers only if every row group holds one step."""
        groups = {(g.first_step, g.last_step) for part in self._open("tokens") for g in part.groups}
        if any(first != last for first, last in groups):
            return sorted(self.tokens(columns=["step"])["step"].unique().tolist())
        return sorted({first for first, _ in groups})

    def verify(self) -> dict[str, str]:
        """Read and check every page of every part; returns `damaged`."""
        for table in TABLES:
            for _ in self._tables(table, None, TABLES[table].names):
                pass
        return self.damaged

    def _frame(
        self, table: str, steps: Iterable[int] | int | None = None, columns: Sequence[str] | None = None
    ) -> pd.DataFrame:
        selected = _columns(table, columns)
        empty = pa.schema([arrow_schema(table).field(name) for name in selected]).empty_table()
        tables = list(self._tables(table, _steps(steps), selected))
        return _pandas(pa.concat_tables([empty, *tables]))

    def _tables(
        self, table: str, steps: set[int] | None, columns: list[str], required: Sequence[str] = ()
    ) -> Iterator[pa.Table]:
        schema = pa.schema([arrow_schema(table).field(name) for name in columns])
        pending, missing = self._open(table), Path()
        while pending:
            part = pending.pop(0)
            if not part.select(steps, required):
                continue
            try:
                rows = part.read(columns, steps, required)
            except FileNotFoundError:
                if part.path == missing:
                    self._set_aside(part.path, DamagedPartError(MISSING))
                    continue
                # A resumed run removed or rewrote the part since the folder was listed.
                missing = part.path
                pending = [other for other in self._open(table) if other.number >= part.number]
                continue
            except DamagedPartError as error:
                self._set_aside(part.path, error)
                continue
            if rows.num_rows:
                yield rows.cast(schema)

    def _open(self, table: str) -> list[Part]:
        """Current parts of the folder, in order, without skipped ones."""
        if self._pack is not None:
            return [part for part in self._pack.parts(table, self._key) if part.path.name not in self.damaged]
        missing, previous = self._list(table), set[str]()
        while not previous.issuperset(missing):
            previous.update(missing)
            missing = self._list(table)
        for name in missing:
            self._set_aside(self.path / TRACES / table / name, DamagedPartError(MISSING))
        parts: dict[int, Part] = {}
        for part in self._parts[table].values():
            # Two parts with one number: a rewind was interrupted, and the shorter one has the rows that it keeps.
            if part.number not in parts or part.rows < parts[part.number].rows:
                parts[part.number] = part
        skipped = self._skipped(table)
        return [part for _, part in sorted(parts.items()) if part.path.name not in skipped]

    def _list(self, table: str) -> list[str]:
        """Update the table's parts from the folder; returns names that disappeared before their footer was read."""
        folder, known, skipped = self.path / TRACES / table, self._parts.get(table, {}), self._skipped(table)
        parts: dict[str, Part] = {}
        missing = []
        for name in names(folder):
            if name.startswith(".") or not name.endswith(".parquet"):
                continue  # being written, or left by a crash
            if name in known:  # a name includes the checksum of its footer
                parts[name] = known[name]
            elif name not in skipped:
                try:
                    parts[name] = open_part(folder / name)
                except FileNotFoundError:
                    missing.append(name)
                except DamagedPartError as error:
                    self._set_aside(folder / name, error)
        self._parts[table] = parts
        return missing

    def _skipped(self, table: str) -> set[str]:
        """File names of the table's skipped parts."""
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
        """Table with the run's setting, status, rows, final reward and accuracy, and skipped parts."""
        rows = {
            "method": self.method,
            "task": self.task,
            "seed": self.seed,
            "status": self.status,
            "folder": self.path,
            "steps": len(self.steps),
            "rows": ", ".join(f"{name} {self.rows(name):,}" for name in TABLES),
        }
        if len(self.steps):
            tail = self.steps.tail(max(1, len(self.steps) // 3))
            if tail["reward_mean"].notna().any():
                rows["reward, last third"] = f"{tail['reward_mean'].mean():.3f}"
                rows["accuracy, last third"] = f"{tail['accuracy'].mean():.1%}"
        rows |= {f"set aside: {part}": reason for part, reason in self.damaged.items()}
        body = "".join(
            f"<tr><th>{escape(str(key))}</th><td>{escape(str(cell))}</td></tr>" for key, cell in rows.items()
        )
        return f"<table><caption>{escape(self.name)}</caption>{body}</table>"


class Runs(Sequence[Run]):
    """Several runs. Each data frame starts with the columns `run` (folder relative to the root), `method` and `seed`.

    Attributes:
        root: folder that was searched.
        by_name: value of the column `run` -> run.
        skipped: folder -> reason why that run could not be read.
    """

    def __init__(self, root: str | Path, runs: dict[str, Run], skipped: dict[str, str]) -> None:
        self.root = Path(root)
        self.by_name = runs
        self.skipped = skipped

    def __getitem__(self, index: Any) -> Any:
        """Run by position, or by its value in the column `run`."""
        return self.by_name[index] if isinstance(index, str) else list(self.by_name.values())[index]

    def __len__(self) -> int:
        return len(self.by_name)

    steps = property(lambda self: self._joined("steps"), doc="Table `steps` of all runs.")
    updates = property(lambda self: self._joined("updates"), doc="Table `updates` of all runs.")
    eval = property(lambda self: self._joined("eval"), doc="Table `eval` of all runs.")
    rollouts = property(lambda self: self._joined("rollouts"), doc="Table `rollouts` of all runs.")
    probes = property(lambda self: self._joined("probes"), doc="Table `probes` of all runs.")
    probe_prompts = property(lambda self: self._joined("probe_prompts"), doc="Table `probe_prompts` of all runs.")
    events = property(lambda self: self._joined("events"), doc="Table `events` of all runs.")
    forks = property(lambda self: self._joined("forks"), doc="Table `forks` of all runs.")

    def tokens(self, steps: Iterable[int] | int | None = None, columns: Sequence[str] | None = None) -> pd.DataFrame:
        """Table `tokens` of all runs; see `Run.tokens`."""
        steps = _steps(steps)
        return self._concat({name: run.tokens(steps, columns) for name, run in self.by_name.items()})

    @property
    def table(self) -> pd.DataFrame:
        """One row per run: run, method, seed, task, status, steps_done, started, finished, damaged (number of parts)."""
        rows = [
            {
                "run": name,
                **{key: getattr(run, key) for key in ("method", "seed", "task", "status")},
                **{key: run.info.get(key) for key in ("steps_done", "started", "finished")},
                "damaged": len(run.damaged),
            }
            for name, run in self.by_name.items()
        ]
        columns = ["run", "method", "seed", "task", "status", "steps_done", "started", "finished", "damaged"]
        return pd.DataFrame(rows, columns=columns)

    def _joined(self, table: str) -> pd.DataFrame:
        return self._concat({name: getattr(run, table) for name, run in self.by_name.items()})

    def _concat(self, frames: dict[str, pd.DataFrame]) -> pd.DataFrame:
        labeled = [
            frame.assign(run=name, method=self.by_name[name].method, seed=self.by_name[name].seed)
            for name, frame in frames.items()
        ]
        if not labeled:
            return pd.DataFrame(columns=["run", "method", "seed"])
        joined = pd.concat([frame for frame in labeled if len(frame)] or labeled[:1], ignore_index=True)
        return joined[["run", "method", "seed", *(c for c in joined if c not in ("run", "method", "seed"))]]

    def __repr__(self) -> str:
        return f"Runs({str(self.root)!r}, {len(self)} runs, {len(self.skipped)} skipped)"

    def _repr_html_(self) -> str:
        """Table with one row per run, followed by the runs that could not be read."""
        skipped = "".join(f"<p>left out: {escape(name)}: {escape(why)}</p>" for name, why in self.skipped.items())
        return self.table.to_html(index=False, escape=True) + skipped


def load_run(path: str | Path) -> Run:
    """Open one run.

    Args:
        path: folder of the run, which may still be written, or `pack/name` for a run in a pack.

    Raises:
        UserError: run.json is missing, unreadable or has another schema version.

    Examples:
        >>> import sharpscope
        >>> run = sharpscope.load_run("data/example/grpo-s0")
        >>> run.method, run.status
        ('grpo', 'finished')
        >>> list(run.tokens(steps=[1], columns=["logp", "advantage"]))
        ['logp', 'advantage']
    """
    folder = Path(path)
    if not folder.exists():
        for parent in list(folder.parents)[:_DEPTH]:
            if is_pack(parent):
                pack = open_pack(parent)
                name = folder.relative_to(parent).as_posix()
                if name not in pack.names:
                    raise UserError(f"run: the pack {parent} has no run {name!r}{nearest(name, pack.names)}")
                return Run(folder, pack)
    return Run(folder)


def load_runs(path: str | Path | Iterable[str | Path]) -> Runs:
    """Open several runs. A run that cannot be read is skipped with a warning and listed in `Runs.skipped`.

    Args:
        path: a folder, which is searched for runs and packs four levels deep, or the folders of the runs.

    Raises:
        UserError: the folder does not exist.

    Examples:
        >>> import sharpscope
        >>> runs = sharpscope.load_runs("data/example")
        >>> [run.name for run in runs]
        ['grpo-s0', 'grpo-sg-s0']
        >>> list(runs.steps)[:3]  # one row per run and step
        ['run', 'method', 'seed']
    """
    if isinstance(path, str | Path):
        root = Path(path)
        if not root.is_dir():
            raise UserError(f"runs: {root} is not a folder; give the folder that contains your runs")
        folders = list(_run_folders(root, _DEPTH))
        labels = [folder.relative_to(root).as_posix() if folder != root else root.resolve().name for folder in folders]
    else:
        folders = [Path(item) for item in path]
        root = folders[0].parent if folders else Path()
        labels = [folder.name for folder in folders]
        if len(set(labels)) < len(labels):
            labels = [str(folder) for folder in folders]
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
        yield folder  # do not search below a run
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
    selected = [columns] if isinstance(columns, str) else list(columns)
    for name in selected:
        if name not in valid:
            raise UserError(f"columns: {table} has no column {name!r}{nearest(name, valid)}")
    return selected


def _pandas(table: pa.Table) -> pd.DataFrame:
    return table.to_pandas(ignore_metadata=True, split_blocks=True, self_destruct=False)
