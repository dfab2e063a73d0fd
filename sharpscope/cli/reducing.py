"""`reduce`, `pack`, `unpack`: store runs in less space and fewer files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sharpscope.cli.console import printable, progress


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    app.command("reduce")(reduce)
    app.command("pack")(pack)
    app.command("unpack")(unpack)


def reduce(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or folders of runs.")],
    out: Annotated[Path, typer.Option(help="Output folder; runs already in it are kept.")],
    tokens: Annotated[int, typer.Option(min=0, help="Number of sampled tokens to keep per run.")] = 1_500,
) -> None:
    """Reduce finished runs to the data of claims, tables and figures, a few hundred kilobytes each.

    Claims and tables are the same as those of the full runs; figures of single tokens show a sample. Texts, checkpoints and
    tokenizers are not kept. Runs already in --out are not changed, so the command can be repeated as runs finish; reduced
    and damaged runs are skipped.

    Example:
      sharpscope reduce runs/study --out runs/reduced
    """
    from sharpscope.analysis import load_several, nothing_found, reduce_runs
    from sharpscope.errors import UserError
    from sharpscope.traces import load_runs

    named = [item for path in runs for item in load_runs(path).by_name.items()]
    if not named:
        raise UserError(nothing_found(runs, load_several(runs)))
    with progress("reducing") as update:
        written, skipped = reduce_runs(named, out, tokens, lambda name: update(f"reducing {name}"))
    for line in skipped:
        typer.echo(f"  skipped: {printable(line)}")
    size = sum(file.stat().st_size for folder in written for file in folder.rglob("*") if file.is_file())
    typer.echo(f"{_count(len(written))} reduced, {size / 1e6:.1f} MB. Written: {out}/ (try: sharpscope claims {out})")


def pack(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or folders of runs.")],
    out: Annotated[Path, typer.Option(help="Folder of the pack; must be new or empty.")],
) -> None:
    """Pack finished runs into one Parquet file per table. Commands that read runs also read packs.

    Checkpoints and tokenizers are not packed.

    Example:
      sharpscope pack runs/reduced --out data/reference
    """
    from sharpscope.analysis import load_several, nothing_found
    from sharpscope.errors import UserError
    from sharpscope.traces import pack_runs

    loaded = load_several(runs)
    if not len(loaded):
        raise UserError(nothing_found(runs, loaded))
    files = pack_runs(loaded.by_name, out)
    size = sum(file.stat().st_size for file in files)
    typer.echo(f"{len(files)} files, {size / 1e6:.1f} MB. Written: {out}/")


def unpack(
    packed: Annotated[Path, typer.Argument(metavar="PACK", help="Folder of a pack, or one of its runs as PACK/NAME.")],
    out: Annotated[Path, typer.Option(help="Parent folder of the runs; runs already in it are kept.")],
) -> None:
    """Unpack runs into run folders.

    Examples:
      sharpscope unpack data/reference --out runs/study

      sharpscope unpack data/reference/grpo-s0 --out runs
    """
    from sharpscope.errors import UserError
    from sharpscope.traces import load_run, load_runs, unpack_run

    runs = load_runs(packed).by_name if packed.is_dir() else {packed.name: load_run(packed)}
    if not runs:
        raise UserError(f"unpack {packed}: no run found; give the folder of a pack, or one of its runs as PACK/NAME")
    existing = [name for name in runs if (out / name).exists()]
    for name, run in runs.items():
        if name not in existing:
            unpack_run(run, out / name)
    kept = f"; {len(existing)} already exist" if existing else ""
    typer.echo(f"{_count(len(runs) - len(existing))} unpacked{kept}. Written: {out}/")


def _count(runs: int) -> str:
    return "1 run" if runs == 1 else f"{runs} runs"
