"""`export`: a trace's scalar tables for the loggers that people use."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("export")(export)


def export(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or folders of runs.")],
    to: Annotated[str, typer.Option(help="tensorboard | wandb | trackio; each is an extra.")],
    out: Annotated[Path, typer.Option(help="Folder for what the logger writes.")] = Path("logs"),
    project: Annotated[str, typer.Option(help="The logger's project; TensorBoard has none.")] = "sharpscope",
    follow: Annotated[bool, typer.Option("--follow", help="Go on until the runs have ended.")] = False,
    online: Annotated[
        bool, typer.Option("--online", help="Let Weights & Biases upload; otherwise nothing leaves the machine.")
    ] = False,
) -> None:
    """The tables steps, eval and probes to TensorBoard, Weights & Biases (offline) or trackio.

    Examples:

      sharpscope export runs/first --to tensorboard --out logs

      sharpscope export runs/first --to wandb --out logs --follow
    """
    from sharpscope.analysis import load_several
    from sharpscope.errors import UserError
    from sharpscope.integrations.loggers import export as send

    found = load_several(runs)
    if not len(found):
        raise UserError(f"runs: no run below {', '.join(map(str, runs))}; give the folder of one")
    sent = send([run.path for run in found.by_name.values()], to, out, project=project, online=online, follow=follow)
    for name, count in sent.items():
        typer.echo(f"{name}: {count} numbers")
    look = {
        "tensorboard": f"tensorboard --logdir {out}", "wandb": f"wandb sync {out}/wandb/offline-run-*",
        "trackio": f"TRACKIO_DIR={out} trackio show --project {project}",
    }[to]  # fmt: skip
    typer.echo(f"Written: {out}/. Look:  {look}" if not online else f"Uploaded to project {project}.")
