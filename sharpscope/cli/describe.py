"""`methods`, `weights`, `tasks`, `config`, `schema`: list and explain what is available."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    app.command("methods")(methods)
    app.command("weights")(weights)
    app.command("shapings", hidden=True)(weights)  # the name in 0.1
    app.command("tasks")(tasks)
    app.command("config")(config)
    app.command("schema")(schema)


def methods(
    name: Annotated[str | None, typer.Argument(help="Method to explain, with equation, constants and source.")] = None,
) -> None:
    """List the methods, or explain one.

    Examples:
      sharpscope methods

      sharpscope methods grpo-sg
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from sharpscope.config import describe, method_names, method_rotation_bound, same_at_one_update

    console = Console()
    if name is not None:
        note = describe(name)
        same = same_at_one_update(note.method)
        console.print(f"[bold]{escape(name)}[/]  {escape(note.differs)}", highlight=False)
        for title, text in (("equation", note.equation), ("constants", note.constants), ("source", note.source)):
            console.print(f"[bold]{title}[/]  {escape(text)}", highlight=False)
        if note.ours:
            console.print(f"[bold]choices of this project[/]  {escape(note.ours)}", highlight=False)
        bound = method_rotation_bound(note.method.at(0.0))
        if bound:
            console.print(
                f"[bold]largest rotation[/]  {bound:.1f}° of the gradient by the weights, if tokens' gradients are orthogonal",
                highlight=False,
            )
        if same is not None:
            console.print(
                f"[bold]with one update per step[/]  the gradient of {same}: every ratio is 1", highlight=False
            )
        return
    table = Table("method", "what differs from GRPO", "at one update", "bound", "source")
    for method in method_names():
        note = describe(method)
        same = same_at_one_update(note.method)
        bound = method_rotation_bound(note.method.at(0.0))
        angle = f"{bound:.1f}°" if bound else ""
        table.add_row(method, escape(note.differs), "" if same is None else f"as {same}", angle, escape(note.source))
    console.print(table)
    console.print(
        "at one update: the method with the same gradient if a step makes one update (update.mini_batches=1); the default is two.\n"
        "bound: the largest rotation of the gradient by weights alone if tokens' gradients are orthogonal; see `sharpscope rotate`.\n"
        "Controls: append -reverse, -shuffled, -constant, -mean-one or -entropy to a weighted method (grpo-sg-shuffled).\n"
        "Details: sharpscope methods NAME. Usage: sharpscope run --method NAME",
        highlight=False,
    )


def weights(
    names: Annotated[list[str] | None, typer.Argument(help="Methods to plot; default: the main ones.")] = None,
    run: Annotated[Path | None, typer.Option(help="Folder of a run: also plot the weights of its tokens.")] = None,
    step: Annotated[int, typer.Option(help="Step of the run.")] = 1,
    out: Annotated[Path, typer.Option(help="Image file, .png or .svg.")] = Path("weights.png"),
) -> None:
    """Plot token weights as functions of logit and probability, and the weights of a run's tokens.

    With a run, also print the share of weights at each bound and, if the weight multiplies the ratio inside the clip, the
    share of tokens whose gradient the clip removes.

    Examples:
      sharpscope weights grpo-sg ar

      sharpscope weights grpo-sg tr-grpo --run runs/first --step 1
    """
    from rich.console import Console
    from rich.table import Table

    from sharpscope.analysis.figures import styled, weight_functions
    from sharpscope.cli.weight_curves import DEFAULT, function_curves, observed
    from sharpscope.config import named_method
    from sharpscope.errors import UserError
    from sharpscope.traces import load_run

    if out.suffix not in (".png", ".svg"):
        raise UserError(f"--out {out}: must end in .png or .svg")
    methods = [named_method(name) for name in names or DEFAULT]
    on_tokens = None
    if run is not None:
        on_tokens, shares = observed(methods, load_run(run), step)
        table = Table(*shares.columns, title=f"weights of step {step}, calibrated on it")
        for row in shares.to_dict("records"):
            table.add_row(
                row.pop("method"),
                *("–" if value is None or math.isnan(value) else f"{value:.3f}" for value in row.values()),
            )
        Console().print(table)
    with styled():
        weight_functions(function_curves(methods), on_tokens).savefig(out)
    typer.echo(f"Written: {out}")


def tasks() -> None:
    """List the tasks and their fields.

    Example:
      sharpscope tasks
    """
    from rich.console import Console
    from rich.markup import escape

    from sharpscope.tasks import task_specs

    console = Console()
    for kind, spec in task_specs.items():
        console.print(
            f"[bold]{escape(kind)}[/]  {escape((spec.__doc__ or '').strip().splitlines()[0])}", highlight=False
        )
        for field, info in spec.model_fields.items():
            if field == "kind":
                continue
            value = "(required)" if info.is_required() else repr(info.get_default(call_default_factory=True))
            console.print(f"    task.{field} = {value}", markup=False, highlight=False)
            console.print(f"        {info.description}", markup=False, highlight=False, style="dim")
    console.print("Usage: sharpscope run --task KIND --set task.FIELD=VALUE", highlight=False)


def config(
    file: Annotated[Path | None, typer.Argument(help="YAML file; default: the default configuration.")] = None,
    method: Annotated[str | None, typer.Option("--method", "-m", help="Name of a method.")] = None,
    task: Annotated[str | None, typer.Option(help="Kind of a task.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Set a field, as path=value. Repeatable.")] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="List all fields with range, unit and description.")
    ] = False,
) -> None:
    """Print the configuration that `run` would use, or explain all fields.

    Examples:
      sharpscope config --method grpo-sg > mine.yaml

      sharpscope config --explain
    """
    from sharpscope.cli.training import command_values
    from sharpscope.config import build_config, explain_fields, to_yaml

    settings = build_config(file, set_ or (), command_values(method=method, task=task))
    if explain:
        for line in explain_fields(settings):
            typer.echo(line)
    else:
        typer.echo(to_yaml(settings), nl=False)


def schema(
    table: Annotated[list[str] | None, typer.Argument(help="Tables to print; default: all.")] = None,
) -> None:
    """Print the tables and columns of traces with types, units and definitions, in Markdown.

    Example:
      sharpscope schema steps tokens
    """
    from sharpscope.errors import UserError, nearest
    from sharpscope.traces import TABLES, schema_markdown

    for name in table or []:
        if name not in TABLES:
            raise UserError(f"table '{name}': unknown{nearest(name, TABLES)}")
    typer.echo(schema_markdown(table or None), nl=False)
