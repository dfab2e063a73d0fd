"""`sharpscope fork`: counterfactual updates of several methods from the same state."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from sharpscope.traces import Run

CAPTION = "Difference to the reference with 95 % interval; of the reference, its change. Predicted: to first order."


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("fork")(fork)


def fork(
    run: Annotated[Path | None, typer.Argument(help="Folder of a run, whose checkpoints are the states.")] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="In place of a run: embedded:NAME, a model folder, or a hub id; AdamW is warmed up (--set fork.warm_up)."
        ),
    ] = None,
    task: Annotated[str | None, typer.Option(help="Kind of a task, with --model. Default: that of the policy.")] = None,
    checkpoint: Annotated[
        list[str] | None,
        typer.Option(help="step-000050 or 50; 0 is the run's initial policy. Repeatable. Default: the last one."),
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated arms, [name=]method[+field=value…]: grpo,grpo-sg,strong=grpo-sg+weight.U=4. The first is the "
            "reference. Default: grpo, grpo-sg and its controls -reverse and -shuffled."
        ),
    ] = None,
    token_weights: Annotated[
        str | None,
        typer.Option(
            "--token-weights",
            help="Token weights in place of those of the arms: module:function, or paper or calibrated (presets).",
        ),
    ] = None,
    batches: Annotated[int | None, typer.Option(min=1, help="Batches of rollouts per state. Default: 30.")] = None,
    updates: Annotated[
        int | None, typer.Option(min=1, help="Steps of each arm, the later ones on rollouts of its own. Default: 1.")
    ] = None,
    outcomes: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated: failure, nll, entropy (the default), sharpness, fresh (new completions, as a check)."
        ),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Field of the run's configuration, such as optimizer.lr=1e-3, or of the fork, such as fork.prompts=128. "
            "Repeatable. `sharpscope fork --explain` lists the fields of the fork.",
        ),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads. Default: those of the configuration.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of a run for the rows. Default: the run's own, or forks/MODEL with --model."),
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", help="List the fields of --set fork.… and exit.")] = False,
) -> None:
    """Compare methods by single updates from the same state, on the same rollouts, measured on the same completions.

    Rows go to the table `forks`, batch by batch. Repeat the command to continue after an interruption or with more batches.

    Examples:
      sharpscope fork --model embedded:knights_knaves --methods grpo,grpo-sg,ar --batches 10

      sharpscope fork runs/first --checkpoint 0 --checkpoint 50 --methods grpo,strong=grpo-sg+weight.U=4

      sharpscope fork runs/first --methods grpo,low=grpo+tokens.kind=probability,high=grpo+tokens.kind=probability+tokens.side=high
    """
    from sharpscope.config import ForkSpec, parse_overrides, settings_of
    from sharpscope.forks import fork as run_fork

    if explain:
        rows = settings_of(ForkSpec, "fork.")
        typer.echo("\n".join(f"{row.path} = {row.default}  [{row.values}]  {row.description}" for row in rows))
        return
    own = [text for text in set_ or [] if text.startswith("fork.")]
    settings: dict[str, Any] = parse_overrides(own).get("fork", {})
    listed = {"methods": methods, "outcomes": outcomes}
    settings |= {name: [part.strip() for part in text.split(",")] for name, text in listed.items() if text is not None}
    settings |= {name: value for name, value in (("batches", batches), ("updates", updates)) if value is not None}
    forked: Run | None = None
    try:
        forked = run_fork(
            run,
            model=model,
            task=task,
            checkpoint=checkpoint or (),
            token_weights=token_weights,
            overrides=[text for text in set_ or [] if text not in own],
            out=out,
            threads=threads,
            on_progress=lambda text: typer.echo(f"  {text}", err=True),
            **settings,
        )
    except KeyboardInterrupt:
        typer.echo("interrupted: finished batches are kept; repeat the command to continue", err=True)
        raise typer.Exit(130) from None
    _show(forked)
    typer.echo(f"Written: {forked.path}/traces/forks\nview:    sharpscope analyze {forked.path}")


def _show(run: Run) -> None:
    """Print the differences in the first outcome of the newest fork, a table for each state and comparison."""
    from rich.console import Console

    from sharpscope.analysis.forks import fork_differences, fork_sections
    from sharpscope.analysis.sections import to_terminal

    rows = run.forks
    differences = fork_differences(rows[rows["fork"] == rows["fork"].iloc[-1]])
    Console().print(to_terminal(fork_sections(differences, most=1)))
