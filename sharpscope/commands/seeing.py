"""`analyze`, `show`, `compare`, `claims`, `figures`: commands that read traces."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    app.command("analyze")(analyze)
    app.command("show")(show)
    app.command("compare")(compare)


def analyze(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or folders of runs.")],
    out: Annotated[Path, typer.Option(help="Where figures, tables and the report go.")] = Path("report"),
) -> None:
    """Figures, tables and a report of whatever runs there are.

    Examples:

      sharpscope analyze runs/

      sharpscope analyze runs/first runs/second --out report
    """
    from rich.console import Console

    from sharpscope.analysis import analyze as write_report

    console = Console(stderr=True)
    with console.status("reading traces") as status:
        result = write_report(runs, out, on_progress=lambda text: status.update(printable_line(text)))
    for message in result.messages:
        typer.echo(f"  {printable_line(message)}")
    typer.echo(
        f"{len(result.figures)} figures and {len(result.tables)} tables. Written: {out}/ (start with {out}/report.md)"
    )


def show(
    run: Annotated[Path, typer.Argument(help="A run's folder.")],
) -> None:
    """One run at a glance: setting, curves, last evaluation, events, weights, cost.

    Example:

      sharpscope show runs/first
    """
    from rich.console import Console

    from sharpscope.analysis import show as render
    from sharpscope.traces import load_run

    Console().print(render(load_run(run)))


def compare(
    first: Annotated[Path, typer.Argument(help="A run's folder.")],
    second: Annotated[Path, typer.Argument(help="Another run's folder.")],
) -> None:
    """What differs between two runs: in their settings, and in their results with intervals.

    Example:

      sharpscope compare runs/grpo-knights_knaves-s0 runs/grpo-sg-knights_knaves-s0
    """
    from rich.console import Console

    from sharpscope.analysis import compare as render
    from sharpscope.traces import load_run

    Console().print(render(load_run(first), load_run(second)))


def printable_line(text: str) -> str:
    """One line without control characters; model text may be in it."""
    return "".join(c if c.isprintable() else " " for c in text)
