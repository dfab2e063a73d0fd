"""`bench`: speed as a ratio, against the naive way or a peer in the same run."""

from __future__ import annotations

import typer

bench = typer.Typer(
    no_args_is_help=True, help="Measure speed as a ratio, against the naive way or a peer in the same run."
)


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    app.add_typer(bench, name="bench")
