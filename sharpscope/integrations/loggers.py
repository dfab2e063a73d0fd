"""Export of scalars (tables steps, updates, eval and probes) to TensorBoard, Weights & Biases and Trackio."""

from __future__ import annotations

import importlib.util
import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from sharpscope.errors import UserError, nearest
from sharpscope.traces import TABLES, Run, load_run
from sharpscope.untrusted import visible

Write = Callable[[int, dict[str, float]], object]
"""Writes the scalars of a step."""


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
    """Write the scalars of runs to a logger, each run under the name of its folder.

    Args:
        run_dirs: folders of runs.
        to: tensorboard | wandb | trackio (which also gets findings, leading tokens and the page).
        out: folder for the logger's files.
        project: project name (not for TensorBoard).
        online: upload to Weights & Biases; all other logging stays on the machine.
        follow: continue until every run has ended.
        interval_s: time between reads while following [s].

    Returns:
        Number of scalars written, by run name.

    Raises:
        UserError: the logger is unknown or not installed, `online` is set for another logger, a folder is not a run, two have
            one name, or `out` cannot be written.
    """
    if to not in _LOGGERS:
        valid = [*_LOGGERS, "packed", "reduced"]
        raise UserError(f"--to {to}: unknown{nearest(to, valid)}")
    if online and to != "wandb":
        raise UserError(f"--online: not supported by {to}; leave it out or use --to wandb")
    if importlib.util.find_spec(to) is None:
        raise UserError(f"--to {to}: {to} is not installed; pip install 'sharpscope[{to}]'")
    paths = {Path(run_dir).resolve().name: run_dir for run_dir in run_dirs}
    if len(paths) < len(run_dirs):
        raise UserError("runs: two folders have one name; export them separately")
    # which write the scalars of a step
    writers: dict[str, Write] = {}
    sent = {name: set[tuple[int, str]]() for name in paths}
    try:
        with ExitStack() as stack:
            while True:
                runs = {name: load_run(path) for name, path in paths.items()}
                for name, run in runs.items():
                    if name not in writers:
                        writers[name] = _LOGGERS[to](stack, Path(out), name, run, project, online)
                    for step, row in scalars(run).items():
                        new = {
                            key: value
                            for key, value in row.items()
                            if (step, key) not in sent[name]
                        }
                        sent[name] |= {(step, key) for key in new}
                        if new:
                            writers[name](step, new)
                if not (follow and any(run.status == "running" for run in runs.values())):
                    return {name: len(keys) for name, keys in sent.items()}
                time.sleep(interval_s)
    except OSError as error:
        raise UserError(f"--out {out}: cannot be written ({error.strerror or error})") from error


def scalars(run: Run) -> dict[int, dict[str, float]]:
    """Scalars of a run: step -> name -> value. Those that are missing or not finite and spectral densities are left out."""
    result: dict[int, dict[str, float]] = {}
    for table, pattern in _NAMES.items():
        numbers = [c.name for c in TABLES[table].columns if c.type[:3] in ("int", "flo")]
        names = (
            ["value", "std_error"]
            if table == "probes"
            else [n for n in numbers if n not in TABLES[table].key]
        )
        for row in getattr(run, table).to_dict("records"):
            named = visible(pattern.format(**row))
            label = "/".join(part for part in named.split("/") if part not in ("", "None"))
            if not pd.isna(row.get("rho")):
                label += f"/rho{row['rho']:g}"
            for name in names if row.get("quantity") != "density" else ():
                if pd.notna(row[name]) and math.isfinite(row[name]):
                    key = label if name == "value" else f"{label}/{name}"
                    result.setdefault(int(row["step"]), {})[key] = float(row[name])
    return dict(sorted(result.items()))


_NAMES = {
    "steps": "steps",
    "updates": "updates/{update}",
    "eval": "eval/{split}/{level}/T{temperature:g}@{k}",
    "probes": "probes/{probe}/{probe_set}/{functional}/{parameters}/{quantity}",
}
"""Table -> beginning of its scalars' names, before the column's."""


def _tensorboard(
    stack: ExitStack, out: Path, name: str, _run: Run, _project: str, _online: bool
) -> Write:
    from torch.utils.tensorboard import SummaryWriter

    writer = stack.enter_context(SummaryWriter(str(out / name)))
    return lambda step, row: [writer.add_scalar(key, value, step) for key, value in row.items()]


def _wandb(
    stack: ExitStack, out: Path, name: str, recorded: Run, project: str, online: bool
) -> Write:
    import wandb

    out.mkdir(parents=True, exist_ok=True)
    quiet: dict[str, Any] = {
        "x_disable_stats": True,
        "x_disable_meta": True,
        "disable_code": True,
        "disable_git": True,
    }
    settings = wandb.Settings(**quiet, console="off", silent=not online)
    mode: Literal["online", "offline"] = (
        "online" if online else "offline"
    )  # whatever the environment says
    run = wandb.init(
        project=project,
        name=name,
        config=recorded.config,
        dir=str(out),
        mode=mode,
        reinit="create_new",
        settings=settings,
    )
    # Where no other run is open, teardown ensures that the file is written.
    stack.callback(lambda: wandb.teardown() if wandb.run is None else None)
    stack.callback(run.finish)
    return lambda step, row: run.log(row, step=step)


def _trackio(
    stack: ExitStack, out: Path, name: str, run: Run, project: str, _online: bool
) -> Write:
    from sharpscope.integrations.trackio import open_run

    return open_run(stack, out, name, run, project)


_LOGGERS = {"tensorboard": _tensorboard, "wandb": _wandb, "trackio": _trackio}
