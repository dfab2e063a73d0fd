"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

METHODS = "Methods, separated by commas: [label=]name[+field=value…]; a name is a method, or module:function."
Runs = Annotated[list[Path], typer.Argument(help="Run folders, or folders of runs.")]
Model = Annotated[str | None, typer.Option(help="embedded:NAME, a model folder, or a Hugging Face Hub id.")]
Task = Annotated[str | None, typer.Option(help="Kind of a task: `sharpscope config tasks`.")]
Methods = Annotated[str | None, typer.Option(help=METHODS)]
TokenWeights = Annotated[
    str | None,
    typer.Option(
        help="Token weights: module:function, or paper | calibrated (presets of the sigmoid). Controls apply to them."
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="Set a field: --set rollout.group_size=16. Repeatable. `sharpscope config` lists the fields.",
    ),
]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads. Default: those of the configuration.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def split(text: str | None) -> list[str]:
    """The parts of a list separated by commas."""
    return [part.strip() for part in (text or "").split(",") if part.strip()]
