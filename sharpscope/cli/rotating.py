"""`sharpscope rotate`: how far methods turn the gradient of one batch."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from sharpscope.forks import Rotations


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("rotate")(rotate)


def rotate(
    run: Annotated[
        Path | None, typer.Argument(help="Folder of a run: its weights, optimizer state and next batch.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="In place of a run: embedded:NAME, a model folder, or a hub id; new optimizer state."),
    ] = None,
    task: Annotated[str | None, typer.Option(help="Kind of a task, with --model.")] = None,
    methods: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated [name=]method[+field=value…]: ar,cispo,strong=grpo-sg+weight.U=4. Default: all methods, and "
            "grpo-sg reversed and shuffled."
        ),
    ] = None,
    checkpoint: Annotated[
        str | None, typer.Option(help="step-000050 or 50; 0 is the run's initial policy. Default: the last one.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the batch, with --model. Default: 0.")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="Set a field: --set rollout.prompts_per_step=64. Repeatable."),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads. Default: those of the configuration.")
    ] = None,
    token_weights: Annotated[
        str | None,
        typer.Option(
            "--token-weights",
            help="Token weights in place of those of the methods: module:function, or paper or calibrated (presets).",
        ),
    ] = None,
    warm_up: Annotated[
        int,
        typer.Option(
            min=0, help="With --model: batches of the first method whose gradients fill the optimizer's moments."
        ),
    ] = 0,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure", help="Make each update, measure entropy and policy on the batch, take it back (rotation.csv)."
        ),
    ] = False,
    plot: Annotated[
        bool, typer.Option("--plot", help="Also plot token weights over logit and probability: weights.png and .svg.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for rotation.csv, .json, .png and .svg. Default: rotation, or RUN/rotation of a run."
        ),
    ] = None,
) -> None:
    """Show how far methods turn the gradient, and the optimizer's step, of one batch from plain GRPO's. Nothing is trained.

    A method with weights or masks is compared with itself at weights 1, any other with plain GRPO. A rotation far below the
    angle that the noise of the batch makes, also shown, is hard to see in training.

    Examples:
      sharpscope rotate --model embedded:knights_knaves --methods grpo-sg,ar,cispo

      sharpscope rotate --methods grpo-sg,strong=grpo-sg+weight.U=4,grpo+tokens.kind=high_entropy --seed 3

      sharpscope rotate runs/first --checkpoint 50 --token-weights mine:flat_top --plot
    """
    from sharpscope.forks import rotate as compare

    out = out or (Path("rotation") if run is None else run / "rotation")
    started = time.perf_counter()
    rotations = compare(
        None if methods is None else [text.strip() for text in methods.split(",") if text.strip()],
        run=run,
        checkpoint=checkpoint,
        model=model,
        task=task,
        seed=seed,
        token_weights=token_weights,
        overrides=set_ or (),
        warm_up=warm_up,
        measure=measure,
        threads=threads,
        on_progress=lambda text: typer.echo(f"  {time.perf_counter() - started:5.0f} s  {text}", err=True),
    )
    _show(rotations)
    files = rotations.save(out, plot)
    typer.echo(f"Written: {out}/ ({', '.join(path.name for path in files)})")


def _show(rotations: Rotations) -> None:
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text

    from sharpscope.probes import NOISE_BOUND

    batch = rotations.batch
    where = f"{batch['run']}, step {batch['step']}" if batch["run"] else f"seed {batch['seed']}"
    console = Console()
    console.print(
        f"{batch['model']} on {batch['task']}, {where}: {batch['prompts']} prompts ({batch['informative_prompts']} with different "
        f"rewards), {batch['completions']} completions, {batch['tokens']} tokens",
        highlight=False,
        markup=False,
    )
    if batch["recorded"] is not None:
        same = "are those" if batch["recorded"] else "are not those (another machine or version, or --set)"
        console.print(f"The completions {same} that the run recorded at this step.", highlight=False, markup=False)
    table = Table(
        Column("method", no_wrap=True),
        *(
            Column(name, justify="right")
            for name in ("gradient", "scale", "kept", "update", "scale", "dose", "bound", "at L", "at U")
        ),
        box=SIMPLE,
        padding=(0, 1, 0, 0),
    )
    for row in rotations.table.to_dict("records"):
        name = Text(f"{row['method']}{' *' if row['reference'] == 'unweighted' else ''}")
        if row["problem"]:
            table.add_row(name, "–", Text(row["problem"], overflow="fold"))
            continue
        degrees = [_number(row[key], ".1f", "°") for key in ("gradient_rotation", "update_rotation", "rotation_bound")]
        scales = [_number(row[key], ".2f") for key in ("gradient_scale", "update_scale", "update_difference")]
        kept = _number(row["gradient_kept"], ".1%")
        shares = [_number(row[f"weight_saturation_{side}_gradient"], ".1%") for side in ("low", "high")]
        table.add_row(name, degrees[0], scales[0], kept, degrees[1], *scales[1:], degrees[2], *shares)
    console.print(table)
    noise = "unknown for one prompt" if math.isnan(rotations.noise) else f"about {rotations.noise:.0f}°"
    if rotations.noise >= NOISE_BOUND:
        noise = (
            "at least 90°, the bound of its estimate (the batch's two halves share no direction; take more prompts),"
        )
    console.print(
        f"Noise of this batch: {noise} between its gradient (plain GRPO) and the expected one.\n"
        "gradient, update: rotation and ratio of norms against plain GRPO (*: against the same method with weights 1); kept: share\n"
        "of that gradient on tokens that keep one; dose: length of the difference of both updates, in units of the reference's; bound:\n"
        "the largest rotation by weights alone if tokens' gradients are orthogonal; at L, at U: share of the gradient at either bound.",
        highlight=False,
        markup=False,
    )


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "–" if value is None or math.isnan(value) else f"{value:{form}}{unit}"
