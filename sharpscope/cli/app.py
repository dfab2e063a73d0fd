"""The `sharpscope` application. Commands import heavy libraries when called, so that --help is fast."""

from __future__ import annotations

import inspect
import os
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer
from typer import Option
from typer.core import TyperGroup

from sharpscope import __version__
from sharpscope.cli import (
    comparing,
    describe,
    exchanging,
    forking,
    inspecting,
    probing,
    running,
    studying,
)
from sharpscope.errors import UserError
from sharpscope.untrusted import visible

# Before torch is imported: limit how long idle OpenMP threads spin. By default they spin for milliseconds, and two runs on
# the same cores take several times as long.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")

PANELS: dict[str, dict[str, Callable[..., None] | typer.Typer]] = {
    "Start here": {"demo": running.demo, "run": running.run, "show": inspecting.show},
    "Understand runs": {
        "tokens": inspecting.tokens,
        "plot": inspecting.plot,
        "view": inspecting.view,
        "analyze": inspecting.analyze,
        "diagnose": inspecting.diagnose,
    },
    "Measure a model or a method": {
        "probe": probing.probe,
        "compare": comparing.compare,
        "rotate": forking.rotate,
        "fork": forking.fork,
        "eval": running.evaluate,
    },
    "Study": {"study": studying.study},
    "Exchange": {"import": exchanging.import_, "export": exchanging.export},
    "Look up": {
        "methods": describe.methods,
        "config": describe.config,
        "skill": describe.skill,
    },
}
"""Sections of --help, and the order of their commands."""


REPLACED = {
    "watch": "sharpscope show RUN --watch",
    "spikes": "sharpscope tokens RUN --spikes",
    "report": "sharpscope analyze RUNS",
    "figures": "sharpscope analyze RUNS",
    "claims": "sharpscope study claims RUNS",
    "power": "sharpscope study plan RUNS",
    "reduce": "sharpscope export RUNS --to reduced",
    "pack": "sharpscope export RUNS --to packed",
    "unpack": "packed runs as they are, such as sharpscope show RUN",
    "sweep": "sharpscope run FILE, or sharpscope run --methods grpo,grpo-sg --seeds 0,1",
    "weights": "sharpscope rotate --plot",
    "shapings": "sharpscope rotate --plot",
    "tasks": "sharpscope config tasks",
    "schema": "sharpscope config columns",
    "warm-start": "python -m experiments.warm_start, in a clone of the repository",
}
"""Command of version 0.2 -> what replaced it."""


class _Commands(TyperGroup):
    """Lists the commands in the order of PANELS, and says what replaced the commands of version 0.2."""

    def list_commands(self, ctx: object) -> list[str]:
        """Names in the order of PANELS."""
        return [name for commands in PANELS.values() for name in commands]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """A command by name."""
        command = super().get_command(ctx, cmd_name)
        if command is None and cmd_name in REPLACED:
            raise UserError(f"sharpscope {cmd_name}: removed in 0.3; use: {REPLACED[cmd_name]}")
        return command


app = typer.Typer(
    name="sharpscope",
    cls=_Commands,
    help="Sharpness diagnostics for RL fine-tuning of language models.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for panel, commands in PANELS.items():
    for name, command in commands.items():
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name, rich_help_panel=panel)
        else:
            # paragraphs on one line, which the terminal wraps; the examples are indented
            text = re.sub(r"(?<=\S)\n(?=\S)", " ", inspect.cleandoc(command.__doc__ or ""))
            app.command(name, help=text, rich_help_panel=panel)(command)

_options = {"debug": False}


def _silence() -> None:
    """Ignore warnings that a user cannot act on, and print others as one line; to be called before heavy imports."""
    # sharpscope reports problems of a model itself
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    # Its threads compete with those of torch, and it warns after each fork.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # to the authors of a library, not to its users
    for category in (
        FutureWarning,
        DeprecationWarning,
    ):
        warnings.filterwarnings("ignore", category=category, module=r"(?!sharpscope\b|__main__$)")
    # Of NumPy: a mean of nothing, a division by 0; the result is empty and shown so.
    warnings.filterwarnings("ignore", category=RuntimeWarning)
    warnings.formatwarning = _one_line


def _one_line(message: object, *_: object, **__: object) -> str:
    """A warning without the file and the line of source that it comes from."""
    return f"warning: {visible(' '.join(str(message).split()))}\n"


def _version(value: bool) -> None:
    if value:
        typer.echo(f"sharpscope {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[bool, Option("--debug", help="Show the traceback of errors.")] = False,
) -> None:
    _silence()
    _options["debug"] = debug


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line. Errors are one line on stderr, or a traceback with --debug.

    The exit code is 2 for user errors and for paths that cannot be read or written, 130 after Ctrl-C, and 1 for failed runs
    and unexpected errors.

    Args:
        arguments: Command line arguments; None: `sys.argv[1:]`.
    """
    _options["debug"] = False
    try:
        code = app(args=None if arguments is None else list(arguments), standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (typer.Abort, KeyboardInterrupt):
        sys.stderr.write("interrupted\n")
        sys.exit(130)
    except Exception as error:
        if _options["debug"] and not isinstance(error, _USAGE):
            raise
        # Without markup: the message may contain text of a file or a model.
        sys.stderr.write(f"error: {visible(_message(error))}\n")
        sys.exit(2 if isinstance(error, (UserError, OSError, _USAGE)) else 1)


# click's UsageError: a wrong or missing option or argument
_USAGE: type[Exception] = typer.BadParameter.__mro__[1]


def _message(error: Exception) -> str:
    if isinstance(error, _USAGE):
        context = getattr(error, "ctx", None)
        command = context.command_path if context is not None else "sharpscope"
        return f"{error.format_message()} (see: {command} --help)"  # type: ignore[attr-defined]
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}; check the path, its permissions and the free space"
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}; unexpected, run `sharpscope --debug …` for the traceback"
