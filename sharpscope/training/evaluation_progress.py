"""Finished batches of an interrupted evaluation, one line of JSON each; a last line that was cut loses one batch."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Batch:
    """Outcomes of some prompts: `correct` (prompts, samples) and the total reward of each completion, row by row."""

    correct: list[list[bool]]
    rewards: list[float]


class EvaluationProgress:
    """Finished batches of one evaluation, in a file of `folder` whose name is a hash of all its settings.

    Another model, task, seed or limit has another file, so the batches in it can be used.
    """

    def __init__(self, folder: Path, name: str, settings: Mapping[str, Any]) -> None:
        text = json.dumps(settings, sort_keys=True, ensure_ascii=True, default=str)
        self.path = folder / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}.jsonl"
        self._done: dict[tuple[str, int], Batch] = {}
        if self.path.exists():
            self._read()

    def __len__(self) -> int:
        return len(self._done)

    def _read(self) -> None:
        intact = 0  # bytes
        data = self.path.read_bytes()
        for line in data.splitlines(keepends=True):
            try:
                row = json.loads(line) if line.endswith(b"\n") else None
            except ValueError:
                row = None
            if row is None:
                break  # cut when the evaluation was stopped; the rest is drawn again
            self._done[row["cell"], row["first"]] = Batch(row["correct"], row["rewards"])
            intact += len(line)
        if intact < len(data):
            with self.path.open("rb+") as file:
                file.truncate(intact)

    def get(self, cell: str, first: int) -> Batch | None:
        """The batch of a cell that begins with its prompt `first`, or None."""
        return self._done.get((cell, first))

    def put(self, cell: str, first: int, batch: Batch) -> None:
        """Keep a batch, on the disk before this returns."""
        self._done[cell, first] = batch
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"cell": cell, "first": first, **asdict(batch)}) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def finish(self) -> None:
        """The evaluation is complete: remove the file, and its folder where nothing else is in it."""
        self.path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # not empty, or never made
            self.path.parent.rmdir()
