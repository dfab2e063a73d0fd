"""The `sharpscope` command: parse, build a configuration, call one function. Heavy imports wait inside the commands."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from sharpscope import __version__
from sharpscope.cli import describe, exporting, inspecting, probing, reducing, reporting, sweeping, training
from sharpscope.errors import UserError
from sharpscope.quiet import silence

# Before torch is imported: an idle OpenMP thread shall give its core away soon. Without a bound it spins for milliseconds,
# and two runs on the same cores take several times as long.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")

app = typer.Typer(
    name="sharpscope",
    help="Which tokens move a language model under RL, how sharp is the place they move it to, and does it matter?",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for module in (training, reporting, inspecting, sweeping, reducing, describe, exporting, probing):
    module.register(app)

_shown = {"traceback": False}  # what --debug asks for


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
    silence()
    _shown["traceback"] = debug


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line (default: sys.argv). An error is one line on stderr; --debug shows its traceback.

    Exit codes: 2 for a user's mistake and for a path that cannot be read or written, 1 for a run that failed and for an
    error that nobody foresaw.
    """
    _shown["traceback"] = False
    try:
        app(args=None if arguments is None else list(arguments))
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        if _shown["traceback"]:
            raise
        # No markup: the message may quote a file's or a model's text.
        sys.stderr.write(f"error: {printable(in_one_line(error))}\n")
        sys.exit(2 if isinstance(error, UserError | OSError) else 1)


def in_one_line(error: Exception) -> str:
    """What a person is told of an error; an unforeseen one says how to see where it happened."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}; check the path, its permissions and the free space"
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}; unforeseen, `sharpscope --debug …` shows where it happened"


def printable(text: str) -> str:
    """`text` on one line, without control characters that a terminal would obey."""
    return "".join(c if c.isprintable() else (" " if c in "\n\t" else "�") for c in text)
