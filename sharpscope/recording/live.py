"""Checks the identities while a training is recorded, and speaks once at the first step that shows a cause."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol

import numpy as np
import pandas as pd

from sharpscope.causes import Cause, Recorded, check_recorded, name_causes
from sharpscope.causes.recorded import TOKEN_COLUMNS, Words
from sharpscope.errors import UserError

OnFinding = Literal["warn", "stop"] | Callable[[Cause], None]
FIRST, LAST = 3, 2
"""Steps at the beginning and at the end whose rows are kept: most causes show in the first three."""
MOST_SHARE = 0.02
"""Share of the training's time that checks may take; the first steps are always checked."""
_COLUMNS: dict[str, tuple[str, ...]] = {
    "steps": ("step", "entropy_mean", "kl_step", "lr"),
    "updates": (
        *("step", "update", "skipped", "loss", "grad_norm", "clip_factor", "update_norm", "lr"),
        *("grad_norm_by_layer", "update_norm_by_layer", "tokens"),
    ),
    "rollouts": (
        *("step", "rollout", "group", "prompt", "completion", "reward", "reward_parts"),
        *("advantage", "length", "truncated", "token_ids", "prompt_tokens"),
    ),
    "tokens": TOKEN_COLUMNS,
    "uses": ("step", "rollout", "position", "update", "ratio"),
    "events": ("step", "rule", "value", "message"),
}
"""Table -> columns that identities read."""


class TrainingStoppedError(RuntimeError):
    """Raised from `optimizer.step()` of a loop where `on_finding="stop"` and a cause was found."""


class LiveCheck:
    """Keeps the rows of the first and the last steps, and checks them after each step.

    Attributes:
        found: the causes that were named.
        seconds: that the checks have taken [s].
    """

    def __init__(
        self, on_finding: OnFinding, info: Mapping[str, object], words: Words, path: str
    ) -> None:
        self.on_finding = on_finding
        self.info = info
        self.words = words
        self.path = path
        self.rows: dict[int, dict[str, list[pd.DataFrame]]] = {}
        self.found: dict[str, Cause] = {}
        self.seconds, self._started = 0.0, time.perf_counter()

    @property
    def stopping(self) -> bool:
        """Whether the training is to end."""
        return self.on_finding == "stop" and bool(self.found)

    def append(self, table: str, columns: Mapping[str, object]) -> None:
        """Keep what identities read of rows that are written."""
        if table in _COLUMNS:
            kept = frame_of({n: columns[n] for n in _COLUMNS[table] if n in columns})
            step = int(kept["step"].iloc[0]) if len(kept) else 0
            self.rows.setdefault(step, {}).setdefault(table, []).append(kept)

    def step_done(self, number: int) -> list[Cause]:
        """Check the kept steps, where the time allows; returns the causes that are new."""
        for step in sorted(self.rows)[FIRST:-LAST]:
            del self.rows[step]
        started = time.perf_counter()
        if number > FIRST and self.seconds > MOST_SHARE * (started - self._started):
            return []
        recorded = self.recorded()
        causes = name_causes(check_recorded(recorded), recorded)
        self.seconds += time.perf_counter() - started
        new = [cause for cause in causes if cause.name not in self.found]
        self.found |= {cause.name: cause for cause in new}
        return new

    def speak(self, causes: list[Cause]) -> None:
        """Tell of new causes as `on_finding` says."""
        for cause in causes:
            if callable(self.on_finding):
                self.on_finding(cause)
            else:
                text = f"sharpscope: {cause.sentence} ({cause.evidence}) To change: {cause.change}"
                warnings.warn(text, stacklevel=2)

    def recorded(self) -> Recorded:
        """The kept rows as tables."""
        tables = {
            name: _joined([f for rows in self.rows.values() for f in rows.get(name, ())], columns)
            for name, columns in _COLUMNS.items()
        }
        return Recorded(**tables, info=self.info, words=self.words, path=self.path)


class Tables(Protocol):
    """What takes rows of tables."""

    def append(self, table: str, columns: Mapping[str, object]) -> object:
        """Take rows."""


class WatchedTables:
    """A writer of tables whose rows a live check sees, too."""

    def __init__(self, tables: Tables, live: LiveCheck) -> None:
        self.tables, self.live = tables, live

    def append(self, table: str, columns: Mapping[str, object]) -> None:
        """Write rows, and show them to the check."""
        self.live.append(table, columns)
        self.tables.append(table, columns)


def frame_of(columns: Mapping[str, Any]) -> pd.DataFrame:
    """Columns of equal length, or one value for all rows, as a frame; what is masked is NaN."""
    values = {}
    for name, column in columns.items():
        value = column.detach().cpu().numpy() if hasattr(column, "detach") else column
        if isinstance(value, np.ma.MaskedArray):
            value = np.ma.filled(value.astype(float), np.nan)
        values[name] = value
    single = all(np.ndim(value) == 0 or isinstance(value, dict) for value in values.values())
    return pd.DataFrame([values] if single else values)


def _joined(frames: list[pd.DataFrame], columns: tuple[str, ...]) -> pd.DataFrame:
    """Frames below one another, with all columns."""
    full = [f.reindex(columns=list(columns)) for f in frames if len(f)]
    if not full:
        return pd.DataFrame(columns=list(columns))
    with warnings.catch_warnings():  # pandas warns of columns that are all missing
        warnings.simplefilter("ignore", FutureWarning)
        return pd.concat(full, ignore_index=True)


def check_on_finding(value: object) -> None:
    """Refuse what `on_finding` cannot be."""
    if value is not None and value not in ("warn", "stop") and not callable(value):
        raise UserError(f"record: on_finding = {value!r}; give 'warn', 'stop' or a function")
