"""Export of scalars (tables steps, updates, eval and probes) to TensorBoard, Weights & Biases and trackio.

Everything stays on the machine unless `online` is set for Weights & Biases. A scalar is named steps/<column>,
updates/<index in the step>/<column>, eval/<split>/<level>/T<temperature>@<k>/<column>, or
probes/<probe>/<probe set>/<functional>/<parameters>/<quantity>[/rho<rho>][/std_error].
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from sharpscope.errors import UserError, nearest
from sharpscope.traces import TABLES, Run, load_run

Logger = tuple[Callable[[int, dict[str, float]], Any], Callable[[], Any]]
"""Functions that write the scalars of a step, and end the logging."""


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
        to: tensorboard | wandb | trackio.
        out: folder for the logger's files.
        project: project name (not for TensorBoard).
        online: upload to Weights & Biases; all other logging is local.
        follow: continue until every run has ended.
        interval_s: time between reads while following [s].

    Returns:
        Number of scalars written, by run name.

    Raises:
        UserError: the logger is unknown or not installed, `online` is set for another logger, a folder is not a run, two have
            one name, or `out` cannot be written.
    """
    loggers = {"tensorboard": _tensorboard, "wandb": _wandb, "trackio": _trackio}
    if to not in loggers:
        raise UserError(f"--to {to}: unknown{nearest(to, loggers)}")
    if online and to != "wandb":
        raise UserError(f"--online: not supported by {to}; leave it out or use --to wandb")
    if importlib.util.find_spec(to) is None:
        raise UserError(f"--to {to}: {to} is not installed; pip install 'sharpscope[{to}]'")
    paths = {Path(run_dir).resolve().name: run_dir for run_dir in run_dirs}
    if len(paths) < len(run_dirs):
        raise UserError("runs: two folders have one name; export them separately")
    open_: dict[str, Logger] = {}
    sent = {name: set[tuple[int, str]]() for name in paths}
    try:
        while True:
            running = False
            for name, path in paths.items():
                run = load_run(path)
                running |= run.status == "running"
                if name not in open_:
                    open_[name] = loggers[to](Path(out), name, run.config, project, online)
                for step, row in scalars(run).items():
                    new = {key: value for key, value in row.items() if (step, key) not in sent[name]}
                    sent[name] |= {(step, key) for key in new}
                    if new:
                        open_[name][0](step, new)
            if not (follow and running):
                return {name: len(keys) for name, keys in sent.items()}
            time.sleep(interval_s)
    except OSError as error:
        raise UserError(f"--out {out}: cannot be written ({error.strerror or error})") from error
    finally:
        for _, close in open_.values():
            close()


def scalars(run: Run) -> dict[int, dict[str, float]]:
    """Scalars of a run: step -> name -> value. Those that are missing or not finite and spectral densities are left out."""
    result: dict[int, dict[str, float]] = {}
    for table in ("steps", "updates", "eval", "probes"):
        numbers = [c.name for c in TABLES[table].columns if c.type[:3] in ("int", "flo")]
        names = ["value", "std_error"] if table == "probes" else [n for n in numbers if n not in TABLES[table].key]
        for row in getattr(run, table).to_dict("records"):
            for name in names if row.get("quantity") != "density" else ():
                if not pd.isna(row[name]) and math.isfinite(row[name]):
                    label = _prefix(table, row) + ("" if name == "value" else f"/{name}")
                    result.setdefault(int(row["step"]), {})[label] = float(row[name])
    return dict(sorted(result.items()))


def _prefix(table: str, row: dict[str, Any]) -> str:
    if table == "updates":
        return f"updates/{row['update']}"
    if table == "eval":
        return f"eval/{row['split']}/{row['level']}/T{row['temperature']:g}@{row['k']}"
    if table == "probes":
        parts = [row[name] for name in ("probe", "probe_set", "functional", "parameters", "quantity")]
        parts += [] if pd.isna(row["rho"]) else [f"rho{row['rho']:g}"]
        return "/".join(["probes", *filter(None, parts)])
    return table


def _tensorboard(out: Path, name: str, config: dict[str, Any], _project: str, _online: bool) -> Logger:
    from torch.utils.tensorboard import SummaryWriter

    writer: Any = SummaryWriter(str(out / name))
    writer.add_text("config", f"```json\n{json.dumps(config, indent=2, default=str)}\n```")
    return lambda step, row: [writer.add_scalar(key, value, step) for key, value in row.items()], writer.close


def _wandb(out: Path, name: str, config: dict[str, Any], project: str, online: bool) -> Logger:
    import wandb

    out.mkdir(parents=True, exist_ok=True)
    quiet: dict[str, Any] = {"x_disable_stats": True, "x_disable_meta": True, "disable_code": True, "disable_git": True}
    run = wandb.init(
        project=project,
        name=name,
        config=config,
        dir=str(out),
        mode="online" if online else "offline",  # whatever the environment says
        reinit="create_new",
        settings=wandb.Settings(**quiet, console="off", silent=not online),
    )

    def close() -> None:
        run.finish()
        if wandb.run is None:  # not used elsewhere in this process; teardown ensures that the file is written
            wandb.teardown()

    return lambda step, row: run.log(row, step=step), close


def _trackio(out: Path, name: str, config: dict[str, Any], project: str, _online: bool) -> Logger:
    out.mkdir(parents=True, exist_ok=True)
    for variable in [key for key in os.environ if key.startswith("TRACKIO_")]:
        del os.environ[variable]  # one of them makes it upload
    os.environ["TRACKIO_DIR"] = str(out.resolve())
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    if Path(trackio.utils.TRACKIO_DIR).resolve() != out.resolve():
        raise UserError(f"--to trackio: already imported with another folder than {out}; use a new process")
    run = trackio.init(project=project, name=name, config=config, embed=False, auto_log_gpu=False, auto_log_cpu=False)
    steps: set[int] = set()

    def write(step: int, row: dict[str, float]) -> None:
        steps.add(step)
        run.log(row, step=step)

    def close() -> None:
        run.finish()
        if len(SQLiteStorage.get_logs(project, name)) < len(steps):  # trackio itself only warns
            raise UserError(f"--to trackio: not all steps were stored in {out}; check that the folder is writable")

    return write, close
