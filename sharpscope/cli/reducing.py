"""`reduce`: runs made small enough to keep in a repository."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("reduce")(reduce)


def reduce(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or folders of runs.")],
    out: Annotated[Path, typer.Option(help="Folder that the reduced runs go to; those that are there stay.")],
    tokens: Annotated[int, typer.Option(min=0, help="Sampled tokens kept of each run [tokens].")] = 1_500,
) -> None:
    """Reduce finished runs to what the claims, tables and figures need: some hundred kilobytes each.

    Claims and tables come out as from the whole runs; figures of single tokens show a sample. Texts, checkpoints and
    tokenizers are not kept. Runs that are in --out already are left as they are, so that it can be called again as runs finish;
    reduced and damaged runs are left out.

    Example:

      sharpscope reduce runs/study --out data/reference
    """
    from sharpscope.analysis.reduction import reduce_runs
    from sharpscope.cli.inspecting import printable_line, telling
    from sharpscope.traces import load_runs

    with telling("reducing") as tell:
        written, left_out = reduce_runs(
            [named for path in runs for named in load_runs(path).by_name.items()],
            out,
            tokens,
            lambda name: tell(f"reducing {name}"),
        )
    for line in left_out:
        typer.echo(f"  left out: {printable_line(line)}")
    size = sum(file.stat().st_size for folder in written for file in folder.rglob("*") if file.is_file())
    typer.echo(f"{len(written)} runs reduced, {size / 1e6:.1f} MB. Written: {out}/ (try: sharpscope claims {out})")
