"""`export`: traces to experiment loggers, or to less space and fewer files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from sharpscope.cli.console import printable, progress
from sharpscope.cli.options import Runs


def export(
    runs: Runs,
    to: Annotated[str, Option(help="tensorboard | wandb (each needs its extra) | packed | reduced.")],
    out: Annotated[Path, Option(help="Folder that is written.")] = Path("logs"),
    project: Annotated[str, Option(help="Project of the logger (not for TensorBoard).")] = "sharpscope",
    follow: Annotated[bool, Option("--follow", help="Continue until the runs end.")] = False,
    online: Annotated[bool, Option("--online", help="Upload to Weights & Biases.")] = False,
) -> None:
    """Export curves to a logger, or runs as packed or reduced data.

    packed: finished runs in one Parquet file per table; commands that read runs also read it. reduced: finished runs without
    texts and with a sample of their tokens, a few hundred kilobytes each, from which claims, tables and figures are the
    same; runs already in --out are kept. Neither has checkpoints.

    Examples:
      sharpscope export runs/first --to tensorboard --out logs --follow

      sharpscope export runs/study --to reduced --out runs/reduced
    """
    from sharpscope.analysis import nothing_found, reduce_runs
    from sharpscope.errors import UserError
    from sharpscope.integrations import loggers
    from sharpscope.traces import load_runs, pack_runs

    loaded = load_runs(runs)
    if not len(loaded):
        raise UserError(nothing_found(runs, loaded))
    if to == "packed":
        files = pack_runs(loaded.by_name, out)
        _tell(f"{len(files)} files", files, out)
    elif to == "reduced":
        named = [item for path in runs for item in load_runs(path).by_name.items()]
        with progress("reducing") as update:
            written, skipped = reduce_runs(named, out, tell=lambda name: update(f"reducing {name}"))
        for line in skipped:
            typer.echo(f"  skipped: {printable(line)}")
        files = [file for folder in written for file in folder.rglob("*") if file.is_file()]
        _tell("1 run reduced" if len(written) == 1 else f"{len(written)} runs reduced", files, out)
    else:
        paths = [run.path for run in loaded.by_name.values()]
        for name, count in loggers.export(paths, to, out, project=project, online=online, follow=follow).items():
            typer.echo(f"{name}: {count} values")
        view = f"tensorboard --logdir {out}" if to == "tensorboard" else f"wandb sync {out}/wandb/offline-run-*"
        typer.echo(f"Written: {out}/. View:  {view}" if not online else f"Uploaded to project {project}.")


def _tell(what: str, files: list[Path], out: Path) -> None:
    size = sum(file.stat().st_size for file in files) / 1e6
    typer.echo(f"{what}, {size:.1f} MB. Written: {out}/ (try: sharpscope analyze {out})")
