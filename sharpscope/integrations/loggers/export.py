"""Export the scalars of runs to a logger, once or during training."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from sharpscope.errors import UserError, nearest
from sharpscope.integrations.loggers.sinks import Sink, TensorBoardSink, TrackioSink, WandbSink
from sharpscope.traces import TABLES, Run, load_run

LOGGERS: dict[str, Callable[..., Sink]] = {
    "tensorboard": TensorBoardSink,
    "wandb": WandbSink,
    "trackio": TrackioSink,
}

NUMBERS = ("int8", "int32", "int64", "float32", "float64")
SCALARS = {
    table: tuple(c.name for c in TABLES[table].columns if c.type in NUMBERS and c.name not in TABLES[table].key)
    for table in ("steps", "updates", "eval")
} | {"probes": ("value", "std_error")}
"""Table -> exported columns. A scalar is named steps/<column>, updates/<index in the step>/<column>,
eval/<split>/<level>/T<temperature>@<k>/<column>, or
probes/<probe>/<probe set>/<functional>/<parameters>/<quantity>[/rho<rho>][/std_error]."""

Scalars = dict[int, dict[str, float]]
"""step -> name -> value."""


def export(
    run_dirs: Sequence[str | Path],
    to: str,
    out: str | Path,
    *,
    project: str = "sharpscope",
    online: bool = False,
    follow: bool = False,
    interval_s: float = 2.0,
) -> dict[str, int]:
    """Write the scalars of runs to a logger, each run under its own name.

    Args:
        run_dirs: folders of runs.
        to: tensorboard | wandb | trackio.
        out: folder for the logger's files.
        project: project name (not for TensorBoard).
        online: upload to Weights & Biases; all other logging is local.
        follow: continue until every run has ended.
        interval_s: time between reads while following [s].

    Returns:
        Number of scalars written, by run name.

    Raises:
        UserError: the logger is unknown or not installed, `online` is set for another logger, a folder is not a run, or
            `out` cannot be written.
    """
    if to not in LOGGERS:
        raise UserError(f"--to {to}: unknown{nearest(to, LOGGERS)}")
    if online and to != "wandb":
        raise UserError(f"--online: not supported by {to}; remove it or use --to wandb")
    sent: dict[str, int] = {}
    open_: dict[str, tuple[ScalarReader, Sink]] = {}
    try:
        for run_dir in run_dirs:
            reader = ScalarReader(run_dir)
            values, run = reader.read()
            name = run.path.resolve().name  # the name in run.json is untrusted: it could be a path
            if name in open_:
                raise UserError(f"run '{name}': two folders have this name; export them separately")
            open_[name] = (reader, _sink(to, Path(out), name, run.config, project, online))
            sent[name] = _write(open_[name][1], values)
        training = set(open_) if follow else set()
        while training:
            for name in sorted(training):
                reader, sink = open_[name]
                values, run = reader.read()
                sent[name] += _write(sink, values)
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


def _write(sink: Sink, values: Scalars) -> int:
    for step, row in values.items():
        sink.write(step, row)
    return sum(map(len, values.values()))


class ScalarReader:
    """Reads the new scalars of a run at each call of `read`."""

    def __init__(self, run_dir: str | Path) -> None:
        self.run_dir = Path(run_dir)
        self._returned: set[tuple[int, str]] = set()

    def read(self) -> tuple[Scalars, Run]:
        """Scalars that were not returned before, in order of steps, and the current run."""
        run = load_run(self.run_dir)
        new = {
            step: {name: value for name, value in row.items() if (step, name) not in self._returned}
            for step, row in scalars(run).items()
        }
        self._returned |= {(step, name) for step, row in new.items() for name in row}
        return {step: row for step, row in new.items() if row}, run


def scalars(run: Run) -> Scalars:
    """Scalars of the tables steps, updates, eval and probes: step -> name -> value.

    Values that are missing or not finite and spectral densities are excluded. If estimates differ only in their seed, the
    last one is used.
    """
    result: Scalars = {}
    for table, names in SCALARS.items():
        frame: pd.DataFrame = getattr(run, table)
        for record in frame.to_dict("records"):
            row = {str(column): value for column, value in record.items()}
            prefix = _PREFIX[table](row)
            if prefix is None:
                continue
            for name in names:
                value = row.get(name)
                if value is None or pd.isna(value) or not math.isfinite(value):
                    continue
                label = prefix if name == "value" else f"{prefix}/{name}"
                result.setdefault(int(row["step"]), {})[label] = float(value)
    return dict(sorted(result.items()))


def _eval_prefix(row: Mapping[str, Any]) -> str:
    return f"eval/{row['split']}/{row['level']}/T{row['temperature']:g}@{row['k']}"


def _probe_prefix(row: Mapping[str, Any]) -> str | None:
    if row["quantity"] == "density":
        return None
    parts = ["probes", *(str(row[n]) for n in ("probe", "probe_set", "functional", "parameters", "quantity") if row[n])]
    if not pd.isna(row["rho"]):
        parts.append(f"rho{row['rho']:g}")
    return "/".join(parts)


_PREFIX = {
    "steps": lambda row: "steps",
    "updates": lambda row: f"updates/{row['update']}",
    "eval": _eval_prefix,
    "probes": _probe_prefix,
}
