"""The `sharpscope` application. Commands import heavy libraries when called, so that --help is fast."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from sharpscope import __version__
from sharpscope.cli import (
    describe,
    diagnosing,
    exporting,
    forking,
    importing,
    inspecting,
    probing,
    rotating,
    studying,
    sweeping,
    training,
)
from sharpscope.cli.console import printable
from sharpscope.errors import UserError
from sharpscope.quiet import silence

# Before torch is imported: limit how long idle OpenMP threads spin. By default they spin for milliseconds, and two runs on
# the same cores take several times as long.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")

# The sections of --help, and the order of their commands.
_PANELS = {
    "Start here": ("demo", "run", "show", "diagnose", "spikes", "report"),
    "Train and evaluate": ("sweep", "eval", "watch"),
    "Understand a run": ("tokens", "compare", "analyze"),
    "Measure a model or a method": ("probe", "rotate", "fork", "weights"),
    "Study": ("claims", "figures", "power", "study"),
    "Exchange traces": ("import", "export"),
    "Look up": ("methods", "tasks", "config", "schema"),
}


class _Grouped(TyperGroup):
    """Lists the commands in the order of _PANELS."""

    def list_commands(self, ctx: Any) -> list[str]:
        order = [name for names in _PANELS.values() for name in names]
        return sorted(super().list_commands(ctx), key=lambda name: order.index(name) if name in order else len(order))


app = typer.Typer(
    name="sharpscope",
    cls=_Grouped,
    help="Sharpness diagnostics for RL fine-tuning of language models.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for module in (
    training,
    inspecting,
    sweeping,
    studying,
    describe,
    diagnosing,
    exporting,
    importing,
    probing,
    rotating,
    forking,
):
    module.register(app)
_panel_of = {name: panel for panel, names in _PANELS.items() for name in names}
for command in app.registered_commands:
    command.rich_help_panel = _panel_of.get(str(command.name), "Other")
for group in app.registered_groups:
    own = group.typer_instance.info.name if group.typer_instance else None
    group.rich_help_panel = _panel_of.get(str(group.name), _panel_of.get(str(own), "Other"))

_options = {"debug": False}


def _version(value: bool) -> None:
    if value:
        typer.echo(f"sharpscope {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of errors.")] = False,
) -> None:
    silence()
    _options["debug"] = debug


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line. Errors are one line on stderr, or a traceback with --debug.

    The exit code is 2 for user errors and for paths that cannot be read or written, and 1 for failed runs and unexpected
    errors.

    Args:
        arguments: Command line arguments; None: `sys.argv[1:]`.
    """
    _options["debug"] = False
    try:
        app(args=None if arguments is None else list(arguments))
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        if _options["debug"]:
            raise
        # Without markup: the message may contain text of a file or a model.
        sys.stderr.write(f"error: {printable(_message(error))}\n")
        sys.exit(2 if isinstance(error, UserError | OSError) else 1)


def _message(error: Exception) -> str:
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}; check the path, its permissions and the free space"
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}; unexpected, run `sharpscope --debug …` for the traceback"
