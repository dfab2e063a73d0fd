"""`bench`: speed as a ratio, against the naive way or a peer in the same run."""

from __future__ import annotations

from typing import Annotated

import typer

bench = typer.Typer(no_args_is_help=True, help="Measure speed as a ratio, against the naive way or a peer in the same run.")


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
    table = Table("", "median step [s]", "mean completion [tokens]", title=f"{found['completions']} completions, {found['threads']} threads")
    table.add_row("sharpscope, all tokens recorded", f"{found['ours_s']:.2f}", f"{found['ours_length']:.1f}")
    table.add_row(f"TRL {found['trl']} GRPOTrainer", f"{found['trl_s']:.2f}", f"{found['trl_length']:.1f}")
    Console().print(table)
    typer.echo(f"ratio TRL / sharpscope: {found['ratio']:.2f} (medians of {found['steps']} steps; required at least 1, hoped 2)")
