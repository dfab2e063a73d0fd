"""`methods`, `config` and `skill`: list and explain what is available."""

from __future__ import annotations

from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from sharpscope.cli.console import check_names, say

BASIC = (
    *("out", "seed", "steps", "task", "policy.model", "policy.dtype", "policy.lora"),
    *(
        "rollout.prompts_per_step",
        "rollout.group_size",
        "rollout.temperature",
        "rollout.max_new_tokens",
    ),
    *(
        "method.name",
        "method.weight",
        "method.clip",
        "method.kl.coef",
        "optimizer.lr",
        "optimizer.schedule",
    ),
    *("update.mini_batches", "update.microbatch_tokens"),
    *("evaluation.every", "evaluation.prompts", "evaluation.temperatures"),
    *("recording.token_gradients_every", "probes.preset", "checkpoint.every"),
)
"""Settings that `sharpscope config` lists."""


def methods(
    name: Annotated[
        str | None, Argument(help="Method (grpo-sg+weight.U=4), control or module:function.")
    ] = None,
) -> None:
    """List the methods, or explain one.

    Examples:
      sharpscope methods
      sharpscope methods grpo-sg
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Column, Table

    from sharpscope.methods import (
        constants,
        describe,
        method_names,
        method_rotation_bound,
        same_at_one_update,
    )
    from sharpscope.methods.named import parse_method
    from sharpscope.settings.reading import method_parts

    console = Console()
    if name is not None:
        note = replace(describe(method_parts(name)[1]), method=parse_method(name))
        bound = method_rotation_bound(note.method.at(0.0))
        same = same_at_one_update(note.method)
        rows = {
            name: note.differs,
            "loss": note.loss,
            "constants": constants(note.method),
            "source": note.source,
            "choices of this project": note.choices,
            "largest rotation by weights": f"{bound:.1f}° if tokens' gradients are orthogonal"
            if bound
            else "",
            "with one update per step": f"the gradient of {same}: every ratio is 1" if same else "",
        }
        for title, text in rows.items():
            if text:
                console.print(f"[bold]{escape(title)}[/]  {escape(text)}", highlight=False)
        return
    heads = ("what differs from GRPO", "at one update", "bound", "source")
    table = Table(Column("method", no_wrap=True), *(Column(one, overflow="fold") for one in heads))
    for each in method_names():
        note = describe(each)
        same = same_at_one_update(note.method)
        bound = method_rotation_bound(note.method.at(0.0))
        shown = f"{bound:.1f}°" if bound else ""
        table.add_row(
            each,
            escape(note.differs),
            f"as {same}" if same else "",
            shown,
            escape(note.source),
        )
    console.print(table)
    console.print(
        "at one update: the method with the same gradient if a step makes one update (update.mini_batches=1); the default is two.\n"
        "bound: the largest rotation of the gradient by weights alone if tokens' gradients are orthogonal; see `sharpscope rotate`.\n"
        "Controls: append -reverse, -shuffled, -constant, -mean-one or -entropy to a weighted method (grpo-sg-shuffled).\n"
        "Token weights of your own: module:function, wherever a method is named.",
        highlight=False,
    )


def _columns(name: str) -> None:
    """Print a table's columns with their units, types and definitions."""
    import textwrap

    from rich.console import Console

    from sharpscope.traces import TABLES

    console = Console(highlight=False)
    table = TABLES[name]
    console.print(f"\n[bold]{name}[/]: a row is {table.row}, identified by {', '.join(table.key)}")
    for column in table.columns:
        when = "only with a probe or an option" if column.probe else "may be missing"
        facts = [column.type, column.unit, when if column.probe or column.nullable else ""]
        console.print(f"  [bold]{column.name}[/]  [dim]{', '.join(filter(None, facts))}[/]")
        lines = textwrap.fill(column.definition, max(40, console.width - 6))
        console.print(textwrap.indent(lines, " " * 6), markup=False)


def config(
    topic: Annotated[
        str | None, Argument(help="tasks, columns, fork, or a part such as method.weight.")
    ] = None,
    table: Annotated[list[str] | None, Argument(help="With columns: tables; default: all.")] = None,
    every: Annotated[bool, Option("--all", help="List all settings.")] = False,
) -> None:
    """List the settings with values, defaults and meaning: the common ones, a part, or all; or the columns of traces.

    Set one with --set path=value, or nested in a YAML file: sharpscope run FILE.

    Examples:
      sharpscope config
      sharpscope config rollout
      sharpscope config tasks
      sharpscope config columns steps tokens
    """
    from rich.console import Console
    from rich.markup import escape

    from sharpscope.config import ForkSpec, RunConfig
    from sharpscope.errors import UserError, nearest
    from sharpscope.settings import settings_of

    if topic == "columns":
        from sharpscope.traces import TABLES

        check_names("config columns", table or [], TABLES)
        for name in table or TABLES:
            _columns(name)
        return
    rows = list(settings_of(ForkSpec, "fork.") if topic == "fork" else settings_of(RunConfig))
    part = "task" if topic == "tasks" else topic
    if part is None:
        chosen = [row for row in rows if every or row.path in BASIC]
    else:
        chosen = [row for row in rows if row.path == part or row.path.startswith(f"{part}.")]
    if not chosen:
        parts = {row.path.rpartition(".")[0] for row in rows} - {""}
        tops = {"tasks", "columns", "fork"} | parts | {row.path for row in rows}
        raise UserError(f"config {topic}: no such setting or topic{nearest(str(topic), tops)}")
    console = Console(highlight=False)
    kind = ""
    for row in chosen:
        if row.kind not in ("", kind):
            console.print(f"  [dim]of kind[/] [bold]{escape(row.kind)}[/]")
        kind = row.kind
        default = f" = {row.default}" if row.default else ""
        values = f"  [{row.values}]" if row.values else ""
        console.print(f"[bold]{escape(row.path)}[/]{escape(default)}{escape(values)}")
        if row.description:
            console.print(f"      {row.description}", markup=False, style="dim")
    if part is None and not every:
        console.print(
            f"\n{len(chosen)} of {len(rows)} settings; --all lists all, `sharpscope config PART` those of a part (rollout, method.clip)."
        )


def skill(
    out: Annotated[Path, Option(help="Folder that gets SKILL.md.")] = Path("skills/sharpscope"),
) -> None:
    """Write SKILL.md, which tells a coding agent when and how to use sharpscope.

    Example:
      sharpscope skill --out .agents/skills/sharpscope
    """
    from sharpscope.errors import UserError

    file = out / "SKILL.md"
    if file.exists():
        raise UserError(f"--out {out}: has a SKILL.md already; remove it, or give another folder")
    out.mkdir(parents=True, exist_ok=True)
    text = resources.files("sharpscope.cli").joinpath("SKILL.md").read_text("utf-8")
    file.write_text(text, "utf-8")
    say(f"Written: {file}")
