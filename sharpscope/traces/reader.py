"""Read recorded runs as pandas data frames: `load_run` and `load_runs`. Reading never changes a run's folder."""

from __future__ import annotations

import json
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pandas as pd
import pyarrow as pa

from sharpscope.errors import UserError, first_line, nearest
from sharpscope.traces.files import (
    CONFIG_FILE,
    RUN_FILE,
    TRACES,
    has_writer,
    read_run_info,
)
from sharpscope.traces.info import parse_run_info
from sharpscope.traces.parts import (
    OF_TOKENS,
    DamagedPartError,
    TraceWriter,
    is_pack,
    packed_runs,
    part_pieces,
    read_part,
    step_rows,
)
from sharpscope.traces.schema import TABLES, arrow_schema
from sharpscope.untrusted import read_text

if TYPE_CHECKING:  # a higher layer
    from sharpscope.analysis.plots import PlotsOf

_DEPTH = 4
LARGEST_CONFIG = 4_000_000
"""Largest config.yaml [bytes]."""
LARGEST_TOKENIZER = 200_000_000
"""Largest tokenizer.json [bytes]."""
TEXT, _OF_TEXT = "text", ("step", "rollout", "position", "token_id")
_ARRAY = "array"
_Part = TypeVar("_Part")
FEW_ROWS = 100_000
"""Rows of a table below which its pieces are joined."""
VIEWS: dict[str, Callable[..., Any]] = {}
"""What makes the figures and pages of runs, by name; see `sharpscope.views`."""


class DamagedPartWarning(UserWarning):
    """A damaged part was skipped; the rest of the run was read."""


def _warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn without a line of source code, which would not help the user."""
    warnings.warn_explicit(text, category, "sharpscope", 0, module="sharpscope")


@dataclass(frozen=True)
class Reduction:
    """A result computed from a token table that `export --to reduced` sampled afterwards."""

    name: str
    step: int  # that it covers; -1 for the whole run
    tokens: int  # number of rows it was computed from
    values: Any


def write_reductions(run_dir: str | Path, rows: Sequence[Reduction]) -> None:
    """Write the table `reductions` of a run. Values are stored as JSON; arrays are float64 and round-trip exactly."""
    with TraceWriter(run_dir, groups=False) as writer:
        for row in rows:
            values = json.dumps(row.values, default=_to_json, separators=(",", ":"))
            writer.append("reductions", asdict(row) | {"values": values})


_UNIQUE = ("steps", "updates", "rollouts", "eval")
"""Tables whose rows are told apart by their key alone."""


class _Tables:
    """Attribute access to the tables that are read as data frames, by `_frame`."""

    steps: pd.DataFrame
    updates: pd.DataFrame
    rollouts: pd.DataFrame
    uses: pd.DataFrame
    probes: pd.DataFrame
    probe_prompts: pd.DataFrame
    eval: pd.DataFrame
    events: pd.DataFrame
    forks: pd.DataFrame
    _frame: Callable[[str], pd.DataFrame]

    def __dir__(self) -> list[str]:
        """Names for Tab completion, the tables among them."""
        return sorted({*super().__dir__(), *_Tables.__annotations__} - {"_frame"})

    def __getattr__(self, name: str) -> pd.DataFrame:
        if name not in TABLES or name in ("tokens", "reductions"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return self._frame(name)


class Run(_Tables):
    """One recorded run. Data frames are read at first access and cached, except `tokens`, which is read at each call.

    A run may be written or resumed while it is read: each read lists its files again.

    Attributes:
        path: folder of the run; for a run in a packed data set, the set's folder and the run's name.
        info: content of run.json.
        damaged: skipped part (relative to the run's folder) -> reason. Updated when a page fails its check on reading;
            `verify` checks every page.
        steps, updates, rollouts, uses, probes, probe_prompts, eval, events, forks: the tables.
    """

    def __init__(self, path: str | Path, pack: Path | None = None) -> None:
        self.path, self._pack = Path(path), pack
        self._key = "" if pack is None else self.path.relative_to(pack).as_posix()
        if pack is None:
            self.info = read_run_info(self.path)
        else:
            self.info = parse_run_info(
                packed_runs(pack).rows[self._key]["info"] or "", self.path / RUN_FILE
            )
        self.damaged: dict[str, str] = {}

    name = property(lambda self: str(self.info.get("name", self.path.name)), doc="Name of the run.")
    method = property(lambda self: str(self.info.get("method")), doc="Name of the training method.")
    task = property(lambda self: str(self.info.get("task")), doc="Name of the training task.")
    seed = property(lambda self: self.info.get("seed"), doc="Seed of the run.")
    config = property(
        lambda self: dict(self.info.get("config") or {}), doc="The resolved configuration."
    )
    reduced = property(
        lambda self: self.info.get("reduced"),
        doc="Of a reduced run: number of `tokens` it had, number `sampled` that were kept and their `rule`; or None.",
    )

    def _frame(self, table: str) -> pd.DataFrame:
        setattr(self, table, self.frame(table))
        return self.__dict__[table]

    @property
    def config_text(self) -> str | None:
        """Content of config.yaml, which reproduces the run; None if there is none."""
        if self._pack is not None:
            return packed_runs(self._pack).rows[self._key]["config"]
        file = self.path / CONFIG_FILE
        return read_text(file, LARGEST_CONFIG, self.path) if file.exists() else None

    @property
    def status(self) -> str:
        """Running | finished | interrupted | failed | died (run.json has "running", but its process has ended)."""
        status = str(self.info.get("status", "failed"))
        return "died" if status == "running" and not has_writer(self.path) else status

    def tokens(
        self, steps: Iterable[int] | int | None = None, columns: Sequence[str] | None = None
    ) -> pd.DataFrame:
        """Table `tokens` with a column `text`, each token by the run's tokenizer. Other steps and columns are not read.

        Args:
            steps: steps to read; None reads all.
            columns: columns to read, `text` among them; None reads all.

        Raises:
            UserError: a column does not exist.
        """
        if columns is not None and TEXT not in columns:
            return self.frame("tokens", steps, columns)
        stored = (
            None
            if columns is None
            else [*dict.fromkeys([*(n for n in columns if n != TEXT), *_OF_TEXT])]
        )
        frame = self.frame("tokens", steps, stored)
        frame[TEXT] = token_texts(self, frame)
        return frame if columns is None else frame[list(columns)]

    def iter_tokens(
        self,
        steps: Iterable[int] | int | None = None,
        columns: Sequence[str] | None = None,
        required: Sequence[str] = (),
    ) -> Iterator[pd.DataFrame]:
        """Table `tokens` as one data frame per part, of a part of many rows per piece of whole steps: only that is in memory.

        Args:
            steps: steps to read; None reads all.
            columns: columns to read; None reads all.
            required: leave out rows in which one of these of the columns is null or NaN.

        Raises:
            UserError: a column does not exist.
        """
        for table in self.iter_arrow("tokens", steps, columns):
            if len(frame := _pandas(table).dropna(subset=list(required))):
                yield frame

    def iter_arrow(
        self,
        table: str,
        steps: Iterable[int] | int | None = None,
        columns: Sequence[str] | None = None,
    ) -> Iterator[pa.Table]:
        """A table in Arrow format in the pieces of `iter_tokens`, also those without a row that is wanted."""
        wanted, names = _steps(steps), _columns(table, columns)
        yield from self._each_part(
            table, lambda path: part_pieces(path, table, names, steps=wanted, run=self._key)
        )

    def frame(
        self,
        table: str,
        steps: Iterable[int] | int | None = None,
        columns: Sequence[str] | None = None,
    ) -> pd.DataFrame:
        """Rows of some steps and columns of a table; the others are not read.

        Args:
            table: its name.
            steps: steps to read; None reads all.
            columns: columns to read; None reads all.

        Raises:
            UserError: a column does not exist.
        """
        if table not in _UNIQUE:
            return _pandas(self.arrow(table, steps, columns))
        names, key = _columns(table, columns), TABLES[table].key
        rows = _pandas(self.arrow(table, steps, [*names, *(k for k in key if k not in names)]))
        again = rows.duplicated(list(key), keep="last")
        if again.any():  # a part that was copied beside itself
            what = f"{int(again.sum())} rows of {table} are there twice; the later ones count"
            warnings.warn(f"run {self.path}: {what}", stacklevel=2)
            rows = rows[~again].reset_index(drop=True)
        return rows[list(names)]

    def columns(self, table: str, names: Sequence[str]) -> pd.DataFrame:
        """Some columns of a table: of its data frame if that was read already, else they alone are read and nothing is kept."""
        known = self.__dict__.get(table)
        return self.frame(table, columns=names) if known is None else known[list(names)]

    def arrow(
        self,
        table: str,
        steps: Iterable[int] | int | None = None,
        columns: Sequence[str] | None = None,
    ) -> pa.Table:
        """A table in Arrow format, which distinguishes null (not recorded) from NaN (recorded)."""
        wanted, names, schema = _steps(steps), _columns(table, columns), arrow_schema(table)
        empty = pa.schema([schema.field(name) for name in names], schema.metadata).empty_table()
        parts = self._each_part(
            table, lambda path: [read_part(path, table, names, steps=wanted, run=self._key)]
        )
        return pa.concat_tables([empty, *parts])

    @cached_property
    def reductions(self) -> list[Reduction] | None:
        """Results computed from the full token table before it was sampled; None for other runs."""
        rows = self.arrow("reductions").to_pylist()
        try:
            made = [
                row | {"values": json.loads(row["values"], object_hook=_from_json)} for row in rows
            ]
        except (ValueError, TypeError, RecursionError) as error:
            raise UserError(
                f"run: {self.path} has damaged reductions ({first_line(error)}); export them again"
            ) from error
        return [Reduction(**row) for row in made] or None

    @property
    def plot(self) -> PlotsOf:
        """Figures of the run: `run.plot.gradient_norm()` returns axes and the frame that they show; Tab lists them."""
        return _view("plots")(self._alone)

    def show(self, height: int = 900) -> Any:
        """The run's page for a notebook: tokens, curves; see `sharpscope.analysis.output`.

        Args:
            height: of the frame that shows it [pixels].
        """
        return _view("page")(self._alone, height)

    def show_tokens(self, step: int | None = None, height: int = 700) -> Any:
        """The completions of a step for a notebook, each token colored by what the update does to it.

        Args:
            step: of the run; None: the one with the largest gradient.
            height: of the frame that shows it [pixels].

        Raises:
            UserError: no completion of that step was recorded.
        """
        return _view("tokens")(self, step, height)

    @property
    def _alone(self) -> Runs:
        """The run as the only one of several."""
        return Runs(self.path, {self.name: self}, {})

    def rows(self, table: str) -> int:
        """Number of rows of a table."""
        return sum(self.step_rows(table).values())

    def step_rows(self, table: str) -> dict[int, int]:
        """Step → number of its rows in a table, in the order of the steps; of each part they are counted once."""
        counts: Counter[int] = Counter()
        for part in self._each_part(table, lambda path: [step_rows(path, table, self._key)]):
            counts.update(part)
        return dict(sorted(counts.items()))

    @property
    def token_steps(self) -> list[int]:
        """Steps with token rows."""
        return list(self.step_rows("tokens"))

    def verify(self, tables: Iterable[str] = TABLES) -> dict[str, str]:
        """Read and check every page of every part of `tables`; returns `damaged`."""
        for table in tables:
            for _ in self.iter_arrow(table):
                pass
        return self.damaged

    def _each_part(self, table: str, read: Callable[[Path], Iterable[_Part]]) -> Iterator[_Part]:
        """What `read` gives of each sound part of a table, in order; of a part that is damaged, the pieces before the damage."""
        root = self.path if self._pack is None else self._pack
        pattern = f"{TRACES}/{table}/[!.]*.parquet" if self._pack is None else f"{table}.parquet"
        seen: dict[int, str] = {}
        for path in sorted(root.glob(pattern)):
            name = path.relative_to(root).as_posix()
            if name in self.damaged:
                continue
            begun = False
            try:
                if table in OF_TOKENS:
                    steps = step_rows(path, table, self._key)
                    for step in sorted(seen.keys() & steps):
                        raise DamagedPartError(f"it has rows of step {step}, as {seen[step]} has")
                    seen |= dict.fromkeys(steps, path.name)
                for piece in read(path):
                    yield piece
                    begun = True
            except FileNotFoundError:
                continue  # a resumed run removed it: its rows are recorded again
            except DamagedPartError as error:
                if path.exists():
                    self.damaged[name] = str(error)
                    before = ", its rows before the damage were read" if begun else ""
                    text = f"{self.name}: {name} is set aside{before}: {error}"
                    _warn(text, DamagedPartWarning)

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}, method={self.method!r}, seed={self.seed}, status={self.status!r})"


class Runs(_Tables, Sequence[Run]):
    """Several runs. Each data frame starts with the columns `run` (folder relative to the root), `method` and `seed`.

    Attributes:
        root: folder that was searched.
        by_name: value of the column `run` -> run.
        skipped: folder -> reason why that run could not be read.
        steps, updates, rollouts, uses, probes, probe_prompts, eval, events, forks: the tables of all runs.
    """

    def __init__(self, root: str | Path, runs: dict[str, Run], skipped: dict[str, str]) -> None:
        self.root, self.by_name, self.skipped = Path(root), runs, skipped

    def __getitem__(self, index: Any) -> Any:
        """Run by position, or by its value in the column `run`."""
        return self.by_name[index] if isinstance(index, str) else list(self.by_name.values())[index]

    def __len__(self) -> int:
        return len(self.by_name)

    def _frame(self, table: str) -> pd.DataFrame:
        return self._concat({label: getattr(run, table) for label, run in self.by_name.items()})

    def tokens(
        self, steps: Iterable[int] | int | None = None, columns: Sequence[str] | None = None
    ) -> pd.DataFrame:
        """Table `tokens` of all runs; see `Run.tokens`."""
        return self._concat(
            {name: run.tokens(_steps(steps), columns) for name, run in self.by_name.items()}
        )

    @property
    def plot(self) -> PlotsOf:
        """Figures of these runs; see `Run.plot`."""
        return _view("plots")(self)

    def show(self, height: int = 900) -> Any:
        """The page of these runs for a notebook; see `Run.show`."""
        return _view("page")(self, height)

    @property
    def table(self) -> pd.DataFrame:
        """One row per run: run, method, seed, task, status, steps_done, started, finished, damaged (number of parts)."""
        facts = ("name", "method", "seed", "task", "status", "steps_done", "started", "finished")
        rows = [
            {**dict.fromkeys(facts), **run.info, "status": run.status, "damaged": len(run.damaged)}
            for run in self
        ]
        table = pd.DataFrame(rows, columns=[*facts, "damaged"])
        return table.assign(name=list(self.by_name)).rename(columns={"name": "run"})

    def _concat(self, frames: dict[str, pd.DataFrame]) -> pd.DataFrame:
        labeled = []
        for name, frame in frames.items():
            run = self.by_name[name]
            labels = {"run": name, "method": run.method, "seed": run.seed}
            labeled.append(frame.assign(**labels)[[*labels, *frame.columns]])
        if not labeled:
            return pd.DataFrame(columns=["run", "method", "seed"])
        return pd.concat(
            [frame for frame in labeled if len(frame)] or labeled[:1], ignore_index=True
        )

    def __repr__(self) -> str:
        return f"Runs({str(self.root)!r}, {len(self)} runs, {len(self.skipped)} skipped)"


def load_run(path: str | Path) -> Run:
    """Open one run.

    Args:
        path: folder of the run, which may still be written, or `folder/name` for a run in a packed data set.

    Raises:
        UserError: run.json is missing, unreadable or has another schema version.

    Examples:
        >>> import sharpscope
        >>> run = sharpscope.load_run("data/example/sums")
        >>> run.method, run.status
        ('grpo', 'finished')
        >>> list(run.tokens(steps=[1], columns=["logp", "advantage"]))
        ['logp', 'advantage']
    """
    folder = Path(path)
    pack = next((p for p in list(folder.parents)[:_DEPTH] if is_pack(p)), None)
    if folder.exists() or pack is None:
        return Run(folder)
    name, names = folder.relative_to(pack).as_posix(), list(packed_runs(pack).rows)
    if name not in names:
        raise UserError(f"run: {pack} has no run {name!r}{nearest(name, names)}")
    return Run(folder, pack)


def load_runs(path: str | Path | Iterable[str | Path]) -> Runs:
    """Open several runs. A run that cannot be read is skipped with a warning and listed in `Runs.skipped`.

    Args:
        path: a folder, which is searched for runs and packed data sets four levels deep, or several folders. If a name occurs
            twice, the second run is named by its path.

    Raises:
        UserError: a folder does not exist.

    Examples:
        >>> import sharpscope
        >>> runs = sharpscope.load_runs("data/example")
        >>> [run.name for run in runs]
        ['sums']
        >>> list(runs.steps)[:3]  # one row per run and step
        ['run', 'method', 'seed']
    """
    runs: dict[str, Run] = {}
    skipped: dict[str, str] = {}
    if not isinstance(path, str | Path):
        several = [load_runs(one) for one in path]
        for part in several:
            runs |= {
                name if name not in runs else str(run.path): run
                for name, run in part.by_name.items()
            }
            skipped |= {
                name if len(several) == 1 else str(part.root / name): why
                for name, why in part.skipped.items()
            }
        return Runs(several[0].root if several else Path(), runs, skipped)
    root = Path(path)
    packed = not root.exists() and any(is_pack(parent) for parent in list(root.parents)[:_DEPTH])
    if not root.is_dir() and not packed:
        raise UserError(f"runs: {root} is not a folder; give the folder that contains your runs")
    for folder, reason in [(root, "")] if packed else _run_folders(root, _DEPTH):
        label = folder.relative_to(root).as_posix() if folder != root else root.resolve().name
        try:
            if reason:
                raise UserError(reason)
            runs[label] = load_run(folder)
        except UserError as error:
            skipped[label] = str(error)
            _warn(f"{label} is left out: {error}")
    return Runs(root, runs, skipped)


def _run_folders(folder: Path, depth: int) -> Iterator[tuple[Path, str]]:
    """The folders of runs in a folder, each with the reason why it cannot be one, if there is any."""
    if os.path.lexists(folder / RUN_FILE):
        yield folder, ""  # do not search below a run
        return
    try:
        if is_pack(folder):
            packed = packed_runs(folder)
            yield from ((folder / name, "") for name in packed.rows)
            yield from ((folder / label, reason) for label, reason in packed.refused.items())
        elif depth:
            names = (child for child in folder.iterdir() if not child.name.startswith("."))
            for child in sorted(child for child in names if child.is_dir()):
                # a link to a run is followed, one to a folder of anything is not
                if not child.is_symlink() or os.path.lexists(child / RUN_FILE):
                    yield from _run_folders(child, depth - 1)
    except UserError as error:
        yield folder, str(error)
    except OSError as error:
        yield folder, f"{folder} cannot be read ({error.strerror})"


def _view(name: str) -> Callable[..., Any]:
    """What makes a view of a run."""
    if name not in VIEWS:
        raise UserError(f"run, {name}: figures and pages are not loaded; import sharpscope.views")
    return VIEWS[name]


def _steps(steps: Iterable[int] | int | None) -> set[int] | None:
    if steps is None:
        return None
    return {int(step) for step in steps} if isinstance(steps, Iterable) else {int(steps)}


def _columns(table: str, columns: Sequence[str] | None) -> list[str]:
    valid = TABLES[table].names
    if columns is None:
        return valid
    for name in columns:
        if name not in valid:
            raise UserError(f"columns: {table} has no column {name!r}{nearest(name, valid)}")
    return list(columns)


def _pandas(table: pa.Table) -> pd.DataFrame:
    # else texts would stay in as many pieces as there are parts and row groups
    few = table.combine_chunks() if table.num_rows < FEW_ROWS else table
    return few.to_pandas(ignore_metadata=True, split_blocks=True)


def _to_json(value: object) -> object:
    if isinstance(value, np.ndarray):
        return {_ARRAY: value.astype(np.float64).tolist()}
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} cannot be stored as a reduction")


def _from_json(value: dict[str, object]) -> object:
    return np.array(value[_ARRAY], dtype=np.float64) if set(value) == {_ARRAY} else value


# -- token ids as text, with the run's own tokenizer

BROKEN = "\ufffd"
LONGEST = 8
"""A character, or a cluster of them, spreads over at most so many tokens."""
Pieces = Callable[[Sequence[int]], list[str]]


def piece_maker(run: Run) -> Pieces | None:
    """A function from the token ids of a completion to their texts, as many as ids; None if the run saved no readable tokenizer.

    A character whose bytes are spread over several tokens is the text of the last of them; the others are empty.
    """
    return _load(run.path / "tokenizer") if (run.path / "tokenizer").is_dir() else None


@lru_cache(maxsize=8)
def _load(folder: Path) -> Pieces | None:
    """`piece_maker` of the tokenizer in a folder."""
    from tokenizers import Tokenizer

    try:
        text = read_text(folder / "tokenizer.json", LARGEST_TOKENIZER, folder.parent)
        loaded = Tokenizer.from_str(text)
    except Exception:
        # The library raises bare exceptions for a damaged file; tokens then stand as their numbers.
        return None
    decode = lru_cache(maxsize=None)(
        lambda *ids: str(loaded.decode(ids, skip_special_tokens=False))
    )
    return lambda ids: pieces(ids, lambda part: decode(*part))


def token_texts(run: Run, tokens: pd.DataFrame) -> pd.Series:
    """The text of each row of `tokens` (step, rollout, position, token_id), by `piece_maker`; None without a tokenizer."""
    maker, ordered = piece_maker(run), tokens.sort_values(["step", "rollout", "position"])
    if maker is None:
        return pd.Series(None, index=tokens.index, dtype=object)
    texts = [
        text
        for _, ids in ordered.groupby(["step", "rollout"])["token_id"]
        for text in maker(ids.tolist())
    ]
    return pd.Series(texts, index=ordered.index, dtype=object).reindex(tokens.index)


def pieces(ids: Sequence[int], join: Callable[[list[int]], str]) -> list[str]:
    """Texts of `ids`, given a function that decodes several ids at once."""
    result: list[str] = []
    waiting: list[int] = []
    for token in ids:
        waiting.append(token)
        text = join(waiting)
        unfinished = text.endswith(BROKEN) and len(waiting) < LONGEST
        result.append("" if unfinished else text)
        if not unfinished:
            waiting = []
    if waiting:  # ends in the middle of a character
        result[-1] = join(waiting)
    return result
