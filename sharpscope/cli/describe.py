"""`methods` and `config`: list and explain what is available."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from sharpscope.cli.console import check_names

if TYPE_CHECKING:
    from sharpscope.config import SettingInfo
    from sharpscope.config.method import Method

BASIC = (
    *("out", "seed", "steps", "task", "policy.model", "policy.dtype", "policy.lora"),
    *("rollout.prompts_per_step", "rollout.group_size", "rollout.temperature", "rollout.max_new_tokens"),
    *("method.name", "method.weight", "method.clip", "method.kl.coef", "optimizer.lr", "optimizer.schedule"),
    *("update.mini_batches", "update.microbatch_tokens"),
    *("evaluation.every", "evaluation.prompts", "evaluation.temperatures"),
    *("recording.token_gradients_every", "probes.preset", "checkpoint.every"),
)
"""Settings that `sharpscope config` lists."""


def methods(
    name: Annotated[str | None, Argument(help="Method (grpo-sg+weight.U=4), control or module:function.")] = None,
) -> None:
    """List the methods, or explain one.

    Examples:
      sharpscope methods

      sharpscope methods grpo-sg
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from sharpscope.config import constants, describe, method_names, method_rotation_bound, same_at_one_update
    from sharpscope.config.methods import parse_method
    from sharpscope.config.reading import method_parts

    console = Console()

    def facts(method: Method) -> tuple[str, str]:
        """The method with its gradient at one update, and the largest rotation by its weights."""
        bound = method_rotation_bound(method.at(0.0))
        return same_at_one_update(method) or "", f"{bound:.1f}°" if bound else ""

    if name is not None:
        note = replace(describe(method_parts(name)[1]), method=parse_method(name))
        same, bound = facts(note.method)
        angle = f"{bound} of the gradient by the weights, if tokens' gradients are orthogonal"
        rows = {
            name: note.differs,
            "loss": note.loss,
            "constants": constants(note.method),
            "source": note.source,
            "choices of this project": note.choices,
            "largest rotation": angle * bool(bound),
            "with one update per step": f"the gradient of {same}: every ratio is 1" * bool(same),
        }
        for title, text in rows.items():
            if text:
                console.print(f"[bold]{escape(title)}[/]  {escape(text)}", highlight=False)
        return
    table = Table("method", "what differs from GRPO", "at one update", "bound", "source")
    for each in method_names():
        note = describe(each)
        same, bound = facts(note.method)
        table.add_row(each, escape(note.differs), f"as {same}" * bool(same), bound, escape(note.source))
    console.print(table)
    console.print(
        "at one update: the method with the same gradient if a step makes one update (update.mini_batches=1); the default is two.\n"
        "bound: the largest rotation of the gradient by weights alone if tokens' gradients are orthogonal; see `sharpscope rotate`.\n"
        "Controls: append -reverse, -shuffled, -constant, -mean-one or -entropy to a weighted method (grpo-sg-shuffled).\n"
        "Token weights of your own: module:function, wherever a method is named.\n"
        "Details: sharpscope methods NAME. Usage: sharpscope run --method NAME",
        highlight=False,
    )


def config(
    topic: Annotated[str | None, Argument(help="tasks, columns, fork, a part (method.weight), or a YAML file.")] = None,
    table: Annotated[list[str] | None, Argument(help="With columns: tables; default: all.")] = None,
    every: Annotated[bool, Option("--all", help="List all settings.")] = False,
    yaml: Annotated[bool, Option("--yaml", help="Print the configuration that `run` would use.")] = False,
    method: Annotated[str | None, Option("--method", "-m", help="With --yaml: name of a method.")] = None,
    task: Annotated[str | None, Option(help="With --yaml: kind of a task.")] = None,
    set_: Annotated[list[str] | None, Option("--set", help="With --yaml: path=value. Repeatable.")] = None,
) -> None:
    """List the settings with values, defaults and meaning: the common ones, a part, or all; or the columns of traces.

    Examples:
      sharpscope config

      sharpscope config method.weight

      sharpscope config tasks

      sharpscope config columns steps tokens

      sharpscope config --yaml --method grpo-sg > mine.yaml
    """
    from sharpscope.config import ForkSpec, RunConfig, build_config, settings_of, to_yaml
    from sharpscope.errors import UserError, nearest

    if topic == "columns":
        from sharpscope.traces import TABLES, schema_markdown

        check_names("config columns", table or [], TABLES)
        typer.echo(schema_markdown(table or None), nl=False)
        return
    if yaml or method or task or set_:
        from sharpscope.cli.running import command_values

        values = command_values(method=method, task=task)
        typer.echo(to_yaml(build_config(None if topic is None else Path(topic), set_ or (), values)), nl=False)
        return
    rows = list(settings_of(ForkSpec, "fork.") if topic == "fork" else settings_of(RunConfig))
    if topic is None:
        chosen = rows if every else [row for row in rows if row.path in BASIC]
    else:
        part = "task" if topic == "tasks" else topic
        chosen = [row for row in rows if row.path == part or row.path.startswith(f"{part}.")]
        if not chosen:
            parts = {row.path.rpartition(".")[0] for row in rows} - {""}
            tops = {"tasks", "columns", "fork"} | parts | {row.path for row in rows}
            raise UserError(f"config {topic}: no such setting or topic{nearest(topic, tops)}")
    _print(chosen)
    if topic is None and not every:
        typer.echo(
            f"\n{len(chosen)} of {len(rows)} settings; --all lists all, `sharpscope config PART` those of a part (rollout, method.clip).\n"
            "Set one with --set path=value, or nested in a YAML file: sharpscope run FILE"
        )


def _print(rows: Iterable[SettingInfo]) -> None:
    """Print settings, below a line with the kind that has them."""
    from rich.console import Console
    from rich.markup import escape

    console, kind = Console(), ""
    for row in rows:
        if row.kind != kind:
            kind = row.kind
            if kind:
                console.print(f"  [dim]of kind[/] [bold]{escape(kind)}[/]", highlight=False)
        default = f" = {row.default}" if row.default else ""
        values = f"  [{row.values}]" if row.values else ""
        console.print(f"[bold]{escape(row.path)}[/]{escape(default)}{escape(values)}", highlight=False)
        if row.description:
            console.print(f"      {row.description}", markup=False, highlight=False, style="dim")
