"""`sharpscope fork`: counterfactual updates from the same state, of several methods or with and without some tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from sharpscope.cli.console import METHODS, Task, Threads, TokenWeights, print_sections, split


def fork(
    run: Annotated[Path | None, Argument(help="Folder of a run, whose checkpoints are the states.")] = None,
    model: Annotated[
        str | None, Option(help="embedded:NAME, a model folder, or a hub id; of a recorded run its checkpoint.")
    ] = None,
    task: Task = None,
    checkpoint: Annotated[list[str] | None, Option(help="50 or step-000050; 0: the start. Repeatable.")] = None,
    step: Annotated[int | None, Option(min=1, help="Step that --without-tokens makes again.")] = None,
    without_tokens: Annotated[str | None, Option(help="top:K: --step with and without its K leading tokens.")] = None,
    methods: Annotated[str | None, Option(help=f"{METHODS} The first is the reference.")] = None,
    token_weights: TokenWeights = None,
    batches: Annotated[int | None, Option(min=1, help="Batches of rollouts per state. Default: 30.")] = None,
    outcomes: Annotated[str | None, Option(help="failure,entropy (the default), greedy, sharpness.")] = None,
    set_: Annotated[
        list[str] | None, Option("--set", help="Field of the run, or fork.NAME (`sharpscope config fork`). Repeatable.")
    ] = None,
    threads: Threads = None,
    out: Annotated[Path | None, Option(help="Folder for the rows. Default: RUN, or forks/MODEL.")] = None,
) -> None:
    """Compare single updates from the same state: of several methods, or of one step with and without its leading tokens.

    By default grpo, grpo-sg and its reverse and shuffled controls, from the last checkpoint. Rows go to the table
    `forks`. Repeat the command to continue after an interruption or with more batches.

    Examples:
      sharpscope fork --model embedded:knights_knaves --methods grpo,grpo-sg,ar --batches 10

      sharpscope fork runs/first --checkpoint 0 --checkpoint 50 --methods grpo,strong=grpo-sg+weight.U=4

      sharpscope fork runs/first --step 40 --without-tokens top:12
    """
    from sharpscope.config import parse_overrides
    from sharpscope.errors import UserError

    fork_settings = [text for text in set_ or [] if text.startswith("fork.")]
    given: dict[str, Any] = parse_overrides(fork_settings).get("fork", {})
    given |= {name: split(text) for name, text in (("methods", methods), ("outcomes", outcomes)) if text is not None}
    given |= {} if batches is None else {"batches": batches}
    given |= {"overrides": [text for text in set_ or [] if text not in fork_settings], "threads": threads}
    given |= {"model": model, "task": task}
    if without_tokens is None and step is None:
        _methods(run, checkpoint=checkpoint or (), token_weights=token_weights, out=out, **given)
        return
    if run is None or step is None or without_tokens is None:
        raise UserError("--without-tokens: needs a run and --step, as in fork RUN --step 40 --without-tokens top:12")
    other: dict[str, Any] = {"methods": methods, "outcomes": outcomes, "batches": batches, "checkpoint": checkpoint}
    other |= {"token-weights": token_weights, "out": out}
    wrong = next((name for name, value in other.items() if value), None)
    if wrong is not None:
        raise UserError(f"--{wrong}: does not go with --without-tokens, which makes one step of the run as it was")
    kind, _, count = without_tokens.partition(":")
    if kind != "top" or not count.isdecimal() or not int(count):
        raise UserError(f"--without-tokens {without_tokens}: give the number of leading tokens, as in top:12")
    _without(run, step, int(count), **given)


@contextmanager
def _kept() -> Iterator[None]:
    """Ctrl-C ends the command with a word on what is kept."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo("interrupted: what was measured is kept; repeat the command to continue", err=True)
        raise typer.Exit(130) from None


def _tell(text: str) -> None:
    typer.echo(f"  {text}", err=True)


def _methods(run: Path | None, **given: Any) -> None:
    """Make the updates of several methods; print the differences in the first outcome, a table for each state and comparison."""
    from sharpscope.analysis.forks import fork_differences, fork_sections
    from sharpscope.forks import fork as run_fork

    if len(given.get("methods") or ("", "")) == 1:
        typer.echo("one method: it is compared with nothing; give --methods two or more", err=True)
    with _kept():
        forked = run_fork(run, on_progress=_tell, **given)
    rows = forked.forks
    differences = fork_differences(rows[rows["fork"] == rows["fork"].iloc[-1]])
    print_sections(fork_sections(differences, most=1))
    typer.echo(f"Written: {forked.path}/traces/forks\nview:    sharpscope analyze {forked.path}")


def _without(run: Path, step: int, top: int, **given: Any) -> None:
    """Make a step with and without its leading tokens, and print what each does."""
    from sharpscope.analysis.without import without_sections
    from sharpscope.forks.without import without_tokens

    with _kept():
        forked, name = without_tokens(run, step, top, on_progress=_tell, **given)
    print_sections(without_sections(forked, name))
    typer.echo(f"Written: {forked.path}/traces/forks (fork {name})")
