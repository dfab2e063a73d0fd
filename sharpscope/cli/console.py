"""Terminal output shared by the commands."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer

from sharpscope.errors import UserError


def printable(text: str) -> str:
    """Return `text` on one line, with control characters replaced; text of a file or a model can contain them."""
    return "".join(c if c.isprintable() else (" " if c in "\n\t" else "�") for c in text)


def print_json(value: Any) -> None:
    """Print a value as JSON; a number that is not finite is null, and NumPy's numbers are numbers."""
    typer.echo(json.dumps(_plain(value), indent=1, ensure_ascii=False, allow_nan=False))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and not math.isfinite(value) else value


def check_empty(out: Path) -> None:
    """Check that an output folder does not exist or is empty.

    Raises:
        UserError: it holds something, or is a file.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        from sharpscope.traces import free_name

        raise UserError(f"--out {out}: is not empty; nothing is overwritten, use --out {free_name(out)}")


@contextmanager
def progress(message: str) -> Iterator[Callable[[str], None]]:
    """Show `message`, and yield a function that shows the next one: in a status line, or as lines without a terminal."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        typer.echo(f"  {message}", err=True)
        yield lambda text: typer.echo(f"  {printable(text)}", err=True)
        return
    with console.status(message) as status:
        yield lambda text: status.update(printable(text))
