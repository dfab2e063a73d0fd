"""`reduce`, `pack`, `unpack`: runs made small, and few files, to keep in a repository."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    app.command("reduce")(reduce)
    app.command("pack")(pack)
    app.command("unpack")(unpack)


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

      sharpscope reduce runs/study --out runs/reduced
    """
    from sharpscope.analysis import reduce_runs
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


def pack(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or folders of runs.")],
    out: Annotated[Path, typer.Option(help="Folder of the pack; it must be new or empty.")],
) -> None:
    """Put many finished runs into few files: one Parquet file a table. Commands that read runs read packs.

    Checkpoints and tokenizers are not packed.

    Example:

      sharpscope pack runs/reduced --out data/reference
    """
    from sharpscope.analysis import load_several
    from sharpscope.traces import pack_runs

    files = pack_runs(load_several(runs).by_name, out)
    size = sum(file.stat().st_size for file in files)
    typer.echo(f"{len(files)} files, {size / 1e6:.1f} MB. Written: {out}/")


def unpack(
    packed: Annotated[Path, typer.Argument(metavar="PACK", help="A pack, or one of its runs as PACK/NAME.")],
    out: Annotated[Path, typer.Option(help="Folder that the runs' folders go to; those that are there stay.")],
) -> None:
    """Make ordinary run folders of the runs in a pack.

    Examples:

      sharpscope unpack data/reference --out runs/study

      sharpscope unpack data/reference/grpo-s0 --out runs
    """
    from sharpscope.traces import load_run, load_runs, unpack_run

    runs = load_runs(packed).by_name if packed.is_dir() else {packed.name: load_run(packed)}
    there = [name for name in runs if (out / name).exists()]
    for name, run in runs.items():
        if name not in there:
            unpack_run(run, out / name)
    kept = f"; {len(there)} were there already" if there else ""
    typer.echo(f"{len(runs) - len(there)} runs unpacked{kept}. Written: {out}/")
