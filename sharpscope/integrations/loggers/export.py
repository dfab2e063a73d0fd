"""Runs to a logger, once or while they train."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sharpscope.errors import UserError, nearest
from sharpscope.integrations.loggers.scalars import ScalarReader
from sharpscope.integrations.loggers.sinks import Sink, TensorBoardSink, TrackioSink, WandbSink

LOGGERS: dict[str, Callable[..., Sink]] = {
    "tensorboard": TensorBoardSink, "wandb": WandbSink, "trackio": TrackioSink,
}  # fmt: skip


def export(
    run_dirs: Sequence[str | Path], to: str, out: str | Path, *, project: str = "sharpscope", online: bool = False,
    follow: bool = False, interval_s: float = 2.0,
) -> dict[str, int]:  # fmt: skip
    """Send the scalar tables of runs to a logger, each run under its own name.

    Args:
        run_dirs: folders of runs.
        to: tensorboard | wandb | trackio.
        out: folder for what the logger writes.
        project: the logger's project (TensorBoard has none).
        online: let Weights & Biases send what it gets; all else stays on this machine.
        follow: go on until every run has ended, reading what it has flushed every `interval_s` seconds.

    Returns:
        How many numbers were sent, by run name.

    Raises:
        UserError: an unknown logger, one that is not installed, `online` for one that has no such thing, or a folder that
            holds no run or cannot be written.
    """
    if to not in LOGGERS:
        raise UserError(f"--to {to}: unknown{nearest(to, LOGGERS)}")
    if online and to != "wandb":
        raise UserError(f"--online: {to} is only ever written locally; leave it out, or use --to wandb")
    sent: dict[str, int] = {}
    open_: dict[str, tuple[ScalarReader, Sink]] = {}
    try:
        for run_dir in run_dirs:
            reader = ScalarReader(run_dir)
            found, run = reader.read()
            name = run.path.resolve().name  # what run.json says could lead out of the folder
            if name in open_:
                raise UserError(f"run '{name}': two of the folders have that name; export them one by one")
            open_[name] = (reader, _sink(to, Path(out), name, run.config, project, online))
            sent[name] = _write(open_[name][1], found)
        training = set(open_) if follow else set()
        while training:
            for name in sorted(training):
                reader, sink = open_[name]
                found, run = reader.read()
                sent[name] += _write(sink, found)
                if run.status != "running":
                    training.discard(name)
            if training:
                time.sleep(interval_s)
    finally:
        for _, sink in open_.values():
            sink.close()
    return sent


def _sink(to: str, out: Path, name: str, config: dict[str, Any], project: str, online: bool) -> Sink:
    try:
        return LOGGERS[to](out, name, config, project=project, online=online)
    except OSError as error:
        raise UserError(f"--out {out}: cannot be written ({error.strerror or error})") from error


def _write(sink: Sink, found: dict[int, dict[str, float]]) -> int:
    for step, values in found.items():
        sink.write(step, values)
    return sum(map(len, found.values()))
