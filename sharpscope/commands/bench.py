"""`bench`: speed as a ratio, against the naive way or a peer in the same run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

bench = typer.Typer(
    no_args_is_help=True, help="Measure speed as a ratio, against the naive way or a peer in the same run."
)


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    app.add_typer(bench, name="bench")


@bench.command("step")
def step(
    steps: Annotated[int, typer.Option(help="Measured steps (one more is run to warm up).")] = 6,
    threads: Annotated[int | None, typer.Option(help="CPU threads for both sides.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Any field of the run, as path=value.")] = None,
) -> None:
    """A training step against TRL's GRPOTrainer on the same policy, prompts and limits.

    Example:

      sharpscope bench step
    """
    from rich.console import Console
    from rich.table import Table

    from sharpscope.bench.step import compare_with_trl

    found = compare_with_trl(steps, threads, set_ or ())
    table = Table(
        "",
        "median step [s]",
        "mean completion [tokens]",
        title=f"{found['completions']} completions, {found['threads']} threads",
    )
    table.add_row("sharpscope, all tokens recorded", f"{found['ours_s']:.2f}", f"{found['ours_length']:.1f}")
    table.add_row(f"TRL {found['trl']} GRPOTrainer", f"{found['trl_s']:.2f}", f"{found['trl_length']:.1f}")
    Console().print(table)
    typer.echo(
        f"ratio TRL / sharpscope: {found['ratio']:.2f} (medians of {found['steps']} steps; required at least 1, hoped 2)"
    )


@bench.command("tokens")
def tokens(
    quick: Annotated[bool, typer.Option("--quick", help="Tiny sizes: does it run?")] = False,
    repeats: Annotated[int, typer.Option(min=1, help="Measurements of each, of which the median counts.")] = 5,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads for both sides.")] = None,
    growth: Annotated[bool, typer.Option(help="Also measure growth with length, width and vocabulary.")] = True,
    out: Annotated[Path, typer.Option(help="Folder for the numbers, the table and the plot.")] = Path(
        "experiments/benchmarks"
    ),
) -> None:
    """Every token's gradient norm and share, against a loop of autograd on the embedded policy.

    Example:

      sharpscope bench tokens --quick --out bench
    """
    from sharpscope.bench import tokens as measured
    from sharpscope.bench import tokens_report
    from sharpscope.training import environment

    environment.set_threads(threads)
    found = measured.run(quick=quick, repeats=repeats, with_growth=growth)
    tokens_report.show(found)
    for path in tokens_report.write(found, out):
        typer.echo(str(path))
