"""The folder of a recorded training: taken, or gone on in by a training that resumes, locked, written and ended."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from sharpscope import distributed
from sharpscope.errors import UserError
from sharpscope.recording.run_folder import NoWriter, discard_unused, note, trace_writer
from sharpscope.traces import (
    RunLock,
    TraceWriter,
    claim_run_dir,
    create_run_info,
    load_run,
    read_run_info,
    rewind,
)
from sharpscope.traces.files import RUN_FILE, now

FLUSH_S = 2.0
"""Rows are written to the folder after a step when this long has passed since the last time [s], and before the trainer saves."""
FLUSH_SHARE = 0.02
"""Largest share of the time that writing takes, where it takes more than `FLUSH_S` allows."""


@dataclass(frozen=True)
class Opened:
    """Where a training is recorded."""

    folder: Path
    step: int  # the next one
    resumed: bool  # whether it goes on in a run of its own


class RecordedRun:
    """A run's folder while a training is recorded. All processes have one; the first of them writes.

    `identity` tells trainings apart: a resumed one goes on in the newest run beside `out` that has the same.
    """

    def __init__(self, out: Path, identity: Mapping[str, object]) -> None:
        self.out = self.folder = out
        self.identity = dict(identity)
        self.tables: TraceWriter | NoWriter = NoWriter()
        self._stack = ExitStack()
        self._started = 0.0
        self._flushed = -math.inf
        self._took = 0.0

    def open(
        self, info: Mapping[str, object], tokenizer: PreTrainedTokenizerBase, done_updates: int
    ) -> Opened:
        """Take a folder, or go on after `done_updates` updates: rows of updates that are made again are removed."""
        opened = distributed.rank_zero_call(lambda: self._open(info, tokenizer, done_updates))
        self.folder = opened.folder
        self.tables = trace_writer(self.folder)
        self._stack.enter_context(self.tables)
        self._started = time.perf_counter()
        self._flushed = -math.inf
        return opened

    def _open(
        self, info: Mapping[str, object], tokenizer: PreTrainedTokenizerBase, done_updates: int
    ) -> Opened:
        own = self._own_run() if done_updates else None
        if own is not None:
            self._stack.enter_context(RunLock(own))
            counts = load_run(own).updates.groupby("step").size().cumsum()
            kept = counts.index[counts <= done_updates]
            step = int(kept.max()) if len(kept) else 0
            rewind(own, step)
            return Opened(own, step + 1, True)
        folder, lock = claim_run_dir(self.out)
        self._stack.callback(lock.__exit__)
        try:
            tokenizer.save_pretrained(folder / "tokenizer")
            create_run_info(folder, {**info, "identity": self.identity})
        except Exception as error:  # tokenizers raise a plain Exception where the disk is full
            self._stack.close()
            discard_unused(folder)
            reason = getattr(error, "strerror", None) or str(error)
            raise UserError(
                f"record: {folder} cannot be written ({reason}); choose another folder, or free some space"
            ) from error
        return Opened(folder, 1, False)

    def _own_run(self) -> Path | None:
        """The run of this training: that of this process, or the newest beside `out` with the same identity."""
        if self.folder != self.out:
            return self.folder if (self.folder / RUN_FILE).exists() else None
        found, number = None, 1
        while True:
            folder = self.out if number == 1 else Path(f"{self.out}-{number}")
            number += 1
            if not folder.exists():
                return found
            with suppress(UserError):
                if read_run_info(folder).get("identity") == self.identity:
                    found = folder

    def flush(self, steps_done: int) -> None:
        """Write the rows of the finished steps to the folder."""
        self.tables.flush()
        note(self.folder, steps_done=steps_done)
        self._flushed = time.perf_counter()

    def flush_in_time(self, steps_done: int) -> None:
        """Write the rows if the last time is long ago, also compared with how long it took."""
        started = time.perf_counter()
        if started - self._flushed > max(FLUSH_S, self._took / FLUSH_SHARE):
            self.flush(steps_done)
            self._took = time.perf_counter() - started

    def end(self, **entries: object) -> None:
        """Write the last rows, free the folder, and write the last entries of run.json."""
        try:
            self._stack.close()  # flushes and unlocks
        finally:
            seconds = round(time.perf_counter() - self._started, 3)
            note(self.folder, finished=now(), seconds=seconds, **entries)
