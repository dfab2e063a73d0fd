"""`sweep` and `demo`: train several runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sharpscope.cli.console import check_empty, progress

if TYPE_CHECKING:
    from sharpscope.sweeps import PlannedRun


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    app.command("demo")(demo)
    app.command("sweep")(sweep)


def demo(
    out: Annotated[Path, typer.Option(help="Folder of the runs and the report.")] = Path("demo"),
    seed: Annotated[int, typer.Option(help="Seed of both runs.")] = 0,
    steps: Annotated[int, typer.Option(min=2, help="Steps per run.")] = 20,
) -> None:
    """Train the embedded policy on puzzles with GRPO and GRPO-SG, measure both, and say what was found, in less than 5 minutes.

    Shown are the tokens with the largest shares of a gradient, how far GRPO-SG turns the gradient, sharpness before and
    after training, and the result.

    Example:
      sharpscope demo
    """
    from sharpscope.analysis import analyze, show_headline
    from sharpscope.config import build_config
    from sharpscope.training import RichDisplay, train

    check_empty(out)
    measured = {
        "evaluation.every": steps,
        "evaluation.prompts": 100,
        "evaluation.temperatures": [1.0],
        "recording.rotation_every": max(1, steps // 5),
        "probes.every": max(1, steps // 4),
    }
    for number, method in enumerate(("grpo", "grpo-sg"), 1):
        typer.echo(f"[{number}/2] {method}: {steps} steps on Knights-and-Knaves puzzles with three people")
        values = {"method": method, "steps": steps, "seed": seed, "out": str(out / "runs"), "name": method}
        outcome = train(build_config(values=values | measured), RichDisplay())
        if outcome.status != "finished":
            typer.echo(f"{outcome.status}: {outcome.reason}. Written: {outcome.run_dir}/")
            raise typer.Exit(1)
    with progress("making the report") as update:
        written = analyze([out / "runs"], out / "report", on_progress=update)
    from rich.console import Console

    Console().print(show_headline([out / "runs"]))
    typer.echo(
        f"\nOpen the report:  {written.page}\n"
        'Your TRL run:     import sharpscope; sharpscope.record(trainer, out="runs/x")\n'
        f"This run:         sharpscope show {out}/runs/grpo-sg"
    )


def sweep(
    file: Annotated[Path, typer.Argument(help="YAML file of the sweep; see experiments/.")],
    workers: Annotated[int, typer.Option(min=1, help="Number of concurrent runs; they share the threads.")] = 1,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads per run; default: all, divided by the workers.")
    ] = None,
    ray: Annotated[
        str | None, typer.Option(help="`local`, or the address of a Ray cluster with a shared disk.")
    ] = None,
    retry: Annotated[bool, typer.Option("--retry", help="Run failed runs again.")] = False,
    smoke: Annotated[
        bool, typer.Option("--smoke", help="Run the sweep's tiny version as a test, in a separate folder.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the runs and an estimate of the time, and exit.")
    ] = False,
    part: Annotated[list[str] | None, typer.Option(help="Part of the sweep to run. Repeatable. Default: all.")] = None,
) -> None:
    """Run a grid of methods, settings and seeds; repeat the command to resume.

    Examples:
      sharpscope sweep experiments/pair.yaml --dry-run

      sharpscope sweep experiments/pair.yaml --workers 2

      sharpscope sweep experiments/studies/1/study.yaml --part main --workers 2
    """
    from sharpscope.recording.environment import default_threads
    from sharpscope.sweeps import execute, plan_sweep, read_sweep

    runs = plan_sweep(read_sweep(file), smoke=smoke, only=part or ())
    share = (
        threads
        if threads is not None
        else max(1, max(default_threads(run.config.policy.model) for run in runs) // workers)
    )
    if dry_run:
        _dry_run(runs, workers, share)
        return
    with _Bars(runs) as bars:
        outcome = execute(runs, workers=workers, threads=share, retry=retry, ray=ray, on_progress=bars.update)
    typer.echo(
        f"{len(outcome.finished)} finished, {len(outcome.skipped)} already finished, {len(outcome.interrupted)} interrupted, "
        f"{len(outcome.failed)} failed{f', {len(outcome.held)} run by others' if outcome.held else ''}. "
        f"Written: {runs[0].config.out}/"
    )
    started = {run.run_dir.name for run in runs if run.status == "failed"}
    for name in outcome.failed:
        retry_with = "use --retry" if name in started else "fix this and repeat the command"
        typer.echo(f"failed: {name}: {outcome.errors[name]}  (to run it again, {retry_with})")
    for name in outcome.interrupted:
        if name in outcome.errors:
            typer.echo(f"interrupted: {name}: {outcome.errors[name]}")
    for text in outcome.held.values():
        typer.echo(f"run by others: {text}")
    if outcome.interrupted:
        typer.echo("resume: repeat the command")
    typer.echo(f"view:   sharpscope analyze {runs[0].config.out}")
    if len(outcome.finished) + len(outcome.skipped) < len(runs):
        raise typer.Exit(1)


def _dry_run(runs: Sequence[PlannedRun], workers: int, threads: int) -> None:
    from sharpscope.sweeps import estimate_step_seconds

    remaining = [run for run in runs if run.status != "finished"]
    for run in runs:
        typer.echo(f"  {run.run_dir}  {run.config.steps} steps  {run.status}")
    typer.echo(f"{len(runs)} runs, {len(remaining)} to do")
    if remaining:
        typer.echo("measuring a step …", err=True)
        seconds = estimate_step_seconds(remaining[0], threads)
        steps = sum(run.config.steps - run.steps_done for run in remaining)
        hours = seconds * steps / workers / 3600
        typer.echo(
            f"about {hours:.2f} h: {steps} steps of {seconds:.2f} s (threads per run: {threads}; settings of the first run, without "
            f"evaluation, probes and checkpoints), workers: {workers}"
        )


class _Bars:
    """Progress bars of all runs and of each active run, or a line per minute without a terminal."""

    LINE_EVERY = 60.0  # [s]

    def __init__(self, runs: Sequence[PlannedRun]) -> None:
        import time

        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        console = Console(stderr=True)
        self.plain = not console.is_terminal
        self.printed_at = time.monotonic()
        self.progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            disable=self.plain,
        )
        self.total = self.progress.add_task("steps of all runs", total=sum(run.config.steps for run in runs))
        self.runs = list(runs)
        self.bars: dict[str, int] = {}

    def __enter__(self) -> _Bars:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def update(self, _: Sequence[PlannedRun], active: Sequence[PlannedRun]) -> None:
        """Show the steps done in the runs' folders."""
        import time

        if self.plain and time.monotonic() - self.printed_at >= self.LINE_EVERY:
            self.printed_at = time.monotonic()
            done, total = sum(run.steps_done for run in self.runs), sum(run.config.steps for run in self.runs)
            running = ", ".join(f"{run.run_dir.name} {run.steps_done} of {run.config.steps}" for run in active)
            typer.echo(f"{done} of {total} steps of all runs; running: {running or 'none'}", err=True)
        names = {run.run_dir.name for run in active}
        for name in [name for name in self.bars if name not in names]:
            self.progress.remove_task(self.bars.pop(name))  # type: ignore[arg-type]
        for run in active:
            if run.run_dir.name not in self.bars:
                self.bars[run.run_dir.name] = self.progress.add_task(run.run_dir.name, total=run.config.steps)
            self.progress.update(self.bars[run.run_dir.name], completed=run.steps_done)  # type: ignore[arg-type]
        self.progress.update(self.total, completed=sum(run.steps_done for run in self.runs))
