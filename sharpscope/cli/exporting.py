"""`export`: write traces to experiment loggers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("export")(export)


def export(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or folders of runs.")],
    to: Annotated[str, typer.Option(help="tensorboard | wandb | trackio; each needs its extra.")],
    out: Annotated[Path, typer.Option(help="Output folder of the logger.")] = Path("logs"),
    project: Annotated[str, typer.Option(help="Project of the logger (not for TensorBoard).")] = "sharpscope",
    follow: Annotated[bool, typer.Option("--follow", help="Continue until the runs end.")] = False,
    online: Annotated[
        bool, typer.Option("--online", help="Upload to Weights & Biases. Default: write files only.")
    ] = False,
) -> None:
    """Export the tables steps, updates, eval and probes to TensorBoard, Weights & Biases (offline) or trackio.

    Examples:
      sharpscope export runs/first --to tensorboard --out logs

      sharpscope export runs/first --to wandb --out logs --follow
    """
    from sharpscope.analysis import load_several
    from sharpscope.errors import UserError
    from sharpscope.integrations import loggers

    loaded = load_several(runs)
    if not len(loaded):
        raise UserError(f"runs: no run in {', '.join(map(str, runs))}; give the folder of a run")
    paths = [run.path for run in loaded.by_name.values()]
    counts = loggers.export(paths, to, out, project=project, online=online, follow=follow)
    for name, count in counts.items():
        typer.echo(f"{name}: {count} values")
    view = {
        "tensorboard": f"tensorboard --logdir {out}",
        "wandb": f"wandb sync {out}/wandb/offline-run-*",
        "trackio": f"TRACKIO_DIR={out} trackio show --project {project}",
    }[to]
    typer.echo(f"Written: {out}/. View:  {view}" if not online else f"Uploaded to project {project}.")
