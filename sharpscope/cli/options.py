"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

METHODS = "Methods, separated by commas: [label=]name[+field=value…]; a name is a method, or module:function."
Runs = Annotated[list[Path], Argument(help="Run folders, or folders of runs.")]
Model = Annotated[str | None, Option(help="embedded:NAME, a model folder, or a Hugging Face Hub id.")]
Task = Annotated[str | None, Option(help="Kind of a task: `sharpscope config tasks`.")]
Methods = Annotated[str | None, Option(help=METHODS)]
TokenWeights = Annotated[str | None, Option(help="module:function, or paper | calibrated (presets of the sigmoid).")]
Set = Annotated[
    list[str] | None, Option("--set", help="Field, such as rollout.group_size=16 (`sharpscope config`). Repeatable.")
]
Threads = Annotated[int | None, Option(min=1, help="CPU threads. Default: those of the configuration.")]
Json = Annotated[bool, Option("--json", help="Print JSON.")]


def split(text: str | None) -> list[str]:
    """The parts of a list separated by commas."""
    return [part.strip() for part in (text or "").split(",") if part.strip()]
