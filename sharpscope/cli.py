"""The `sharpscope` command: parse, build a configuration, call one function. Heavy imports wait inside the commands."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from sharpscope import __version__
from sharpscope.commands import bench, describe, probing, reducing, seeing, sweeping, training
from sharpscope.errors import UserError

app = typer.Typer(
    name="sharpscope",
    help="Which tokens move a language model under RL, how sharp is the place they move it to, and does it matter?",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for room in (training, seeing, sweeping, reducing, describe, probing, bench):
    room.register(app)

_DEBUG = "SHARPSCOPE_DEBUG"


def _version(value: bool) -> None:
    if value:
        typer.echo(f"sharpscope {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    # Model output may go to the terminal; tokenizers' own parallelism would fight torch for the cores.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if debug:
        os.environ[_DEBUG] = "1"


def main() -> None:
    """Run the command line; a user's mistake is one line on stderr and exit code 2."""
    try:
        app()
    except UserError as error:
        if os.environ.get(_DEBUG):
            raise
        # No markup: the message may quote a file's or a model's text.
        sys.stderr.write(f"error: {printable(str(error))}\n")
        sys.exit(2)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def printable(text: str) -> str:
    """`text` on one line, without control characters that a terminal would obey."""
    return "".join(c if c.isprintable() else (" " if c in "\n\t" else "�") for c in text)
