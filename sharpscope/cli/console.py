"""Terminal output and options shared by the commands."""

from __future__ import annotations

import json as json_
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from sharpscope.errors import UserError, nearest
from sharpscope.untrusted import visible

if TYPE_CHECKING:
    from sharpscope.analysis.sections import Section


def say(text: str, err: bool = False) -> None:
    """Print lines, each as `visible` makes it, to standard output or standard error."""
    typer.echo("\n".join(map(visible, text.split("\n"))), err=err)


def print_json(value: object) -> None:
    """Print a value as JSON; a number that is not finite is null, and a control character is escaped."""
    text = json_.dumps(_plain(value), indent=1, ensure_ascii=False, allow_nan=False)
    typer.echo("".join(c if c.isprintable() or c == "\n" else json_.dumps(c)[1:-1] for c in text))


def _plain(value: object) -> object:
    if isinstance(value, dict):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_sections(sections: Sequence[Section], json: bool = False) -> None:
    """Print sections as text, or as JSON."""
    from rich.console import Console

    from sharpscope.analysis.sections import to_records, to_terminal

    if json:
        print_json(to_records(sections))
    else:
        Console().print(to_terminal(sections))


def check_names(option: str, given: Iterable[str], valid: Iterable[str]) -> None:
    """Refuse names that are not valid: a UserError with the closest valid name."""
    for name in given:
        if name not in valid:
            raise UserError(f"{option} {name}: unknown{nearest(name, valid)}")


def read_pairs(option: str, texts: Iterable[str], example: str) -> dict[str, str]:
    """OURS=THEIRS of an option as a mapping."""
    pairs = {}
    for text in texts:
        ours, _, theirs = text.partition("=")
        if not (ours and theirs):
            raise UserError(f"{option} {text}: must have the form OURS=THEIRS, such as {example}")
        pairs[ours] = theirs
    return pairs


def tell(text: str) -> None:
    """Print a line on what is done."""
    say(f"  {text}", err=True)


METHODS = "Methods, separated by commas: name[+field=value…] or label=name…; a name is a method, or module:function."
Runs = Annotated[list[Path], Argument(help="Run folders, or folders of runs.")]
Model = Annotated[
    str | None, Option(help="embedded:NAME, a model folder, or a Hugging Face Hub id.")
]
Task = Annotated[str | None, Option(help="Kind of a task: `sharpscope config tasks`.")]
PromptFormat = Annotated[
    str, Option(help="As in the training: auto (chat where there is a template), chat, plain.")
]
Set = Annotated[
    list[str] | None,
    Option("--set", help="Field, such as rollout.group_size=16 (`sharpscope config`). Repeatable."),
]
Json = Annotated[bool, Option("--json", help="Print JSON.")]


def split(text: str | None) -> list[str]:
    """The parts of a list separated by commas."""
    return [part.strip() for part in (text or "").split(",") if part.strip()]
