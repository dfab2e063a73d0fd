"""`analyze`, `report`, `watch`: from traces to something that people open."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RUNS_HELP = "Run folders, or folders of runs."


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    app.command("analyze")(analyze)
    app.command("report")(report)
    app.command("watch")(watch)


def analyze(
    runs: Annotated[list[Path], typer.Argument(help=RUNS_HELP)],
    out: Annotated[Path, typer.Option(help="Where figures, tables and the report go.")] = Path("report"),
) -> None:
    """Figures, tables and a report (HTML and Markdown) of whatever runs there are.

    Examples:

      sharpscope analyze runs/

      sharpscope analyze runs/first runs/second --out report
    """
    from sharpscope.analysis import analyze as write
    from sharpscope.cli.inspecting import printable_line, telling

    with telling("reading traces") as tell:
        made = write(runs, out, on_progress=tell)
    for message in made.messages:
        typer.echo(f"  {printable_line(message)}")
    counts = f"{len(made.figures)} figures and {len(made.tables)} tables"
    typer.echo(f"{counts}. Written: {out}/ (open {made.html}; {made.report} is the same)")


def report(
    runs: Annotated[list[Path], typer.Argument(help=RUNS_HELP)],
    out: Annotated[Path, typer.Option(help="The page's file.")] = Path("report.html"),
    open_: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
) -> None:
    """One self-contained HTML page: verdicts, runs side by side, figures, tokens, events, costs.

    Example:

      sharpscope report runs/ --open
    """
    from sharpscope.analysis import write_page
    from sharpscope.cli.inspecting import telling

    with telling("reading traces") as tell:
        page = write_page(runs, out, on_progress=tell)
    typer.echo(f"Written: {page} ({page.stat().st_size / 2**20:.1f} MiB; needs no network)")
    if open_:
        import webbrowser

        if not webbrowser.open(page.resolve().as_uri()):
            typer.echo("no browser could be started; open the file yourself", err=True)


def watch(
    run: Annotated[Path, typer.Argument(help="A run's folder.")],
    every: Annotated[float, typer.Option(min=0.1, help="Time between two looks [s].")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Show what there is now, and leave.")] = False,
) -> None:
    """A run's view, refreshed while it trains; ends when the run ends.

    Example:

      sharpscope watch runs/first
    """
    from rich.console import Console

    from sharpscope.analysis import watch as look

    try:
        look(run, Console(), every=every, once=once)
    except KeyboardInterrupt:
        typer.echo("stopped watching; the run goes on")
