"""`diagnose`: what went wrong in a training run, from its log."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from sharpscope.cli.console import print_json, printable
from sharpscope.cli.options import Json

if TYPE_CHECKING:
    from sharpscope.diagnose.report import Diagnosis


def diagnose(
    path: Annotated[
        Path, Argument(help="A run, trainer_state.json, JSON lines, CSV, TensorBoard events, or their folder.")
    ],
    map_: Annotated[list[str] | None, Option("--map", help="Name a key: --map reward=my/key. Repeatable.")] = None,
    group_size: Annotated[int | None, Option(min=2, help="Completions per prompt, to estimate dead groups.")] = None,
    json: Json = False,
) -> None:
    """Say what went wrong in a training run, when it began, and what to do next, from the log that exists.

    Examples:
      sharpscope diagnose output/trainer_state.json

      sharpscope diagnose runs/first

      sharpscope diagnose wandb.csv --map reward=my/score
    """
    from sharpscope.diagnose import diagnose as run_rules
    from sharpscope.errors import UserError

    mapping = {}
    for pair in map_ or []:
        quantity, equals, key = pair.partition("=")
        if not equals:
            raise UserError(f"--map {pair}: give QUANTITY=KEY, for example --map reward=my/score")
        mapping[quantity] = key
    found = run_rules(path, mapping, group_size)
    layers = _layers(found)
    if json:
        print_json(found.as_dict() | {"layers": layers})
    else:
        text = found.text() + "".join(f"\nLayers at step {step}: {seen}" for step, seen in layers.items())
        typer.echo("\n".join(printable(line) for line in text.split("\n")))


def _layers(found: Diagnosis) -> dict[int, str]:
    """Which layer's gradient grew at the step of each finding about gradients or updates, where a run of ours recorded it."""
    if found.log.framework != "sharpscope" or not found.log.path.is_dir():
        return {}
    from sharpscope.analysis.layers import layer_growth
    from sharpscope.traces import load_run

    run = load_run(found.log.path)
    steps = {f.step for f in found.findings if f.began.quantity in ("grad_norm", "update_norm", "kl_step")}
    grown = {step: layer_growth(run, step) for step in sorted(steps)}
    return {step: growth.text for step, growth in grown.items() if growth is not None}
