"""`sharpscope rotate`: how far methods turn the gradient of one batch."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from sharpscope.cli.console import METHODS, Model, Set, Task, Threads, TokenWeights, print_sections, split

if TYPE_CHECKING:
    from sharpscope.analysis.sections import Section
    from sharpscope.forks import Rotations


def rotate(
    run: Annotated[Path | None, Argument(help="Folder of a run: its state and next batch.")] = None,
    model: Model = None,
    task: Task = None,
    methods: Annotated[str | None, Option(help=f"{METHODS} Default: all.")] = None,
    checkpoint: Annotated[str | None, Option(help="50 or step-000050; 0: the start. Default: the last.")] = None,
    seed: Annotated[int | None, Option(help="Seed of the batch, with --model. Default: 0.")] = None,
    set_: Set = None,
    threads: Threads = None,
    token_weights: TokenWeights = None,
    warm_up: Annotated[int, Option(min=0, help="With --model: batches that fill the optimizer's moments.")] = 0,
    measure: Annotated[bool, Option("--measure", help="Make each update, measure, take it back.")] = False,
    plot: Annotated[bool, Option("--plot", help="Also plot token weights over logit and probability.")] = False,
    out: Annotated[Path | None, Option(help="Folder. Default: rotation, or RUN/rotation.")] = None,
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
        None if methods is None else split(methods),
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
    print_sections(_sections(rotations))
    files = rotations.save(out, plot)
    typer.echo(f"Written: {out}/ ({', '.join(path.name for path in files)})")


def _sections(rotations: Rotations) -> list[Section]:
    """The batch, a row for each method, and what the columns mean."""
    import pandas as pd

    from sharpscope.analysis.sections import Section
    from sharpscope.probes import NOISE_BOUND

    batch = rotations.batch
    where = f"{batch['run']}, step {batch['step']}" if batch["run"] else f"seed {batch['seed']}"
    title = (
        f"{batch['model']} on {batch['task']}, {where}: {batch['prompts']} prompts ({batch['informative_prompts']} with different "
        f"rewards), {batch['completions']} completions, {batch['tokens']} tokens"
    )
    noise = "unknown for one prompt" if math.isnan(rotations.noise) else f"about {rotations.noise:.0f}°"
    if rotations.noise >= NOISE_BOUND:
        noise = "at least 90°, the bound of its estimate (its two halves share no direction; take more prompts),"
    notes = [
        f"Noise of this batch: {noise} between its gradient (plain GRPO) and the expected one.",
        "gradient, update: rotation and ratio of norms against plain GRPO (*: against the same method with weights 1); kept: share of "
        "that gradient on tokens that keep one; dose: length of the difference of both updates, in units of the reference's; bound: the "
        "largest rotation by weights alone if tokens' gradients are orthogonal; at L, at U: share of the gradient at either bound.",
    ]
    if batch["recorded"] is not None:
        same = "are those" if batch["recorded"] else "are not those (another machine or version, or --set)"
        notes.insert(0, f"The completions {same} that the run recorded at this step.")
    rows = []
    for row in rotations.table.to_dict("records"):
        name = f"{row['method']}{' *' if row['reference'] == 'unweighted' else ''}"
        if row["problem"]:
            notes.insert(0, f"{name}: {row['problem']}")
        degrees = [_number(row[key], ".1f", "°") for key in ("gradient_rotation", "update_rotation", "rotation_bound")]
        scales = [_number(row[key], ".2f") for key in ("gradient_scale", "update_scale", "update_difference")]
        kept = _number(row["gradient_kept"], ".1%")
        shares = [_number(row[f"weight_saturation_{side}_gradient"], ".1%") for side in ("low", "high")]
        rows.append([name, degrees[0], scales[0], kept, degrees[1], *scales[1:], degrees[2], *shares])
    columns = ["method", "gradient", "scale", "kept", "update", "scale", "dose", "bound", "at L", "at U"]
    return [Section(title, pd.DataFrame(rows, columns=columns)), Section("", "\n".join(notes))]


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "–" if value is None or math.isnan(value) else f"{value:{form}}{unit}"
