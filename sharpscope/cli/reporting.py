"""`analyze`, `report`, `watch`: figures, tables and reports of runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sharpscope.cli.console import printable, progress

RUNS_HELP = "Run folders, or folders of runs."


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    app.command("analyze")(analyze)
    app.command("report")(report)
    app.command("watch")(watch)


def analyze(
    runs: Annotated[list[Path], typer.Argument(help=RUNS_HELP)],
    out: Annotated[Path, typer.Option(help="Output folder.")] = Path("report"),
) -> None:
    """Write figures, tables and a report (HTML and Markdown) of runs.

    Examples:
      sharpscope analyze runs/

      sharpscope analyze runs/first runs/second --out report
    """
    from sharpscope import analysis

    with progress("reading traces") as update:
        written = analysis.analyze(runs, out, on_progress=update)
    for message in written.messages:
        typer.echo(f"  {printable(message)}")
    counts = f"{len(written.figures)} figures and {len(written.tables)} tables"
    typer.echo(f"{counts}. Written: {out}/ (open {written.html}, or {written.report} for Markdown)")


def report(
    runs: Annotated[list[Path], typer.Argument(help=RUNS_HELP)],
    out: Annotated[Path, typer.Option(help="Output file.")] = Path("report.html"),
    open_: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
) -> None:
    """Write a self-contained HTML page: verdicts, comparison of runs, figures, tokens, events and costs.

    Example:
      sharpscope report runs/ --open
    """
    from sharpscope.analysis import write_page

    with progress("reading traces") as update:
        page = write_page(runs, out, on_progress=update)
    typer.echo(f"Written: {page} ({page.stat().st_size / 2**20:.1f} MiB, works offline)")
    if open_:
        import webbrowser

        if not webbrowser.open(page.resolve().as_uri()):
            typer.echo(f"cannot start a browser; open {page} yourself", err=True)


def watch(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
    every: Annotated[float, typer.Option(min=0.1, help="Refresh interval in seconds.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Show the current state and exit.")] = False,
) -> None:
    """Show a run while it trains, until it ends.

    Example:
      sharpscope watch runs/first
    """
    from rich.console import Console

    from sharpscope import analysis

    try:
        analysis.watch(run, Console(), every=every, once=once)
    except KeyboardInterrupt:
        typer.echo("stopped watching; the run continues")
