"""What `warm-start` shows: a bar on a terminal, a line at each probe elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer


def run_warm_start(
    policy: str, out: Path | None, overrides: Sequence[str], quiet: bool, threads: int | None = None
) -> None:
    """Build the spec from `name=value` overrides, run it, say what was written."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    from sharpscope.config import WARM_STARTS, check_keys, merge, parse_override, validate
    from sharpscope.errors import UserError, nearest
    from sharpscope.recording.environment import set_threads
    from sharpscope.training.display import minutes
    from sharpscope.warm_start import Progress as Report
    from sharpscope.warm_start import warm_start

    if policy not in WARM_STARTS:
        raise UserError(f"warm-start {policy}: unknown{nearest(policy, WARM_STARTS)}")
    kind, out = WARM_STARTS[policy], out or Path("policies") / policy
    data: dict[str, Any] = {}
    for override in overrides:
        data = merge(data, parse_override(override))
    check_keys(kind, data)
    spec = validate(kind, data)
    if out.exists() and any(out.iterdir()):
        raise UserError(f"--out {out}: is not empty and is not overwritten; choose another folder")
    set_threads(threads)
    columns = (
        TextColumn("warm-start"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left"),
        TimeRemainingColumn(), TextColumn("{task.fields[note]}"),
    )  # fmt: skip
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=quiet or not console.is_terminal) as progress:
        bar = progress.add_task("warm-start", total=spec.steps, note="")

        def show(report: Report) -> None:
            exact = ", ".join(f"{style} {share:.0%}" for style, share in (report.exact or {}).items())
            note = f"loss {report.loss:.3f} nats/token" + (f", exact on held-out: {exact}" if exact else "")
            progress.update(bar, completed=report.step, note=note)
            if report.exact is not None and not quiet and not console.is_terminal:
                left = report.seconds / report.step * (report.steps - report.step)
                typer.echo(f"update {report.step} of {report.steps}: {note}; {minutes(left)} left", err=True)

        summary = warm_start(spec, out, show)
    exact = ", ".join(f"{style} {share:.0%}" for style, share in summary.exact.items())
    typer.echo(
        f"{summary.parameters:,} parameters, {summary.seconds:.0f} s; loss {summary.loss:.3f} nats/token; exact on held-out "
        f"demonstrations: {exact or 'not measured'}"
    )
    typer.echo(
        f"written: {out}/\ntry it: sharpscope eval {out} --task {policy}   |   sharpscope run --task {policy} --model {out}"
    )
