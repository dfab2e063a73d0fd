"""`probe`: the surface and the tokens of anybody's model or of a run's checkpoints."""

from __future__ import annotations

import typer


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
