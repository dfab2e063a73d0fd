"""`run`, `eval`, `warm-start`: commands that use the policy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

SET_HELP = "Any field, as path=value: --set rollout.group_size=16. Repeatable. `sharpscope config` lists them."
QUIET_HELP = "No live display."


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    app.command("run")(run)
    app.command("eval")(evaluate)
    app.command("warm-start")(warm_start)


def run(
    config: Annotated[
        Path | None, typer.Argument(help="A YAML file (see experiments/); fields left out have defaults.")
    ] = None,
    method: Annotated[str | None, typer.Option("--method", "-m", help="A method's name: `sharpscope methods`.")] = None,
    task: Annotated[str | None, typer.Option(help="A task's kind: `sharpscope tasks`.")] = None,
    model: Annotated[str | None, typer.Option(help="embedded:NAME, a model folder, or a hub id.")] = None,
    shaping: Annotated[
        str | None,
        typer.Option(
            help="Preset of the sigmoid shaping (paper | calibrated), or your own as module:function. Controls are made of it."
        ),
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Rounds of rollouts and learning [steps].")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of everything random in training.")] = None,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="The run's folder, such as runs/first. Default: runs/<method>-<task>-s<seed>.")
    ] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help=SET_HELP)] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with an interrupted run from its last checkpoint.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help=QUIET_HELP)] = False,
) -> None:
    """Train a policy and record what every token does.

    Examples:

      sharpscope run --method grpo-sg --steps 20

      sharpscope run -m grpo-sg --set method.weight.tau=4 --set method.weight_on=ratio --out runs/ablation

      sharpscope run --task dataset --set task.path=puzzles.parquet --method grpo-sg --out runs/real

      sharpscope run --resume runs/first

      accelerate launch --num_processes 2 -m sharpscope run --method grpo-sg
    """
    from sharpscope import distributed
    from sharpscope.config import build_config
    from sharpscope.training import QuietDisplay, RichDisplay, train

    display = QuietDisplay() if quiet else RichDisplay()
    if resume is not None:
        from sharpscope.errors import UserError

        given = [config, method, task, model, shaping, steps, seed, lr, out, set_]
        if any(value is not None for value in given):
            raise UserError("--resume goes on with the run's own settings: give no other setting beside it")
        if not (resume / "config.yaml").is_file():
            what = "holds no run (no config.yaml)" if resume.is_dir() else "does not exist"
            raise UserError(f"--resume {resume}: {what}; give the folder of a run")
        settings = build_config(resume / "config.yaml", values={"out": str(resume.parent), "name": resume.name})
        outcome = train(settings, display, resume=True)
    else:
        values = command_values(method=method, task=task, model=model, steps=steps, seed=seed, lr=lr, out=out)
        outcome = train(build_config(config, set_ or (), values, shaping), display)
    if distributed.is_rank_zero():
        for text in outcome.notes:
            typer.echo(f"note:   {text}")
        report(outcome.run_dir, outcome.status, outcome.steps_done, outcome.reason)


def command_values(**options: Any) -> dict[str, Any]:
    """The short options of `run` as configuration paths; what was not given is left out."""
    places = {
        "method": "method", "model": "policy.model", "steps": "steps", "seed": "seed",
        "lr": "optimizer.lr",
    }  # fmt: skip
    values: dict[str, Any] = {place: options[name] for name, place in places.items() if options.get(name) is not None}
    if options.get("task") is not None:
        from sharpscope.tasks import task_choice

        values["task"] = dict(task_choice(options["task"]))
    if options.get("out") is not None:
        values["out"], values["name"] = str(options["out"].parent), options["out"].name
    return values


def report(run_dir: Path, status: str, steps: int, reason: str) -> None:
    """Say how a run ended, what was written and what to do next."""
    typer.echo(f"{status}: {steps} steps, {reason}. Written: {run_dir}/ (run.json, traces/, checkpoints/)")
    if status == "interrupted":
        typer.echo(f"go on:  sharpscope run --resume {run_dir}")
    typer.echo(f"look:   sharpscope show {run_dir}   |   sharpscope analyze {run_dir}")
    if status == "failed":
        raise typer.Exit(1)


def evaluate(
    model: Annotated[
        Path,
        typer.Argument(help="A run's folder (its last checkpoint), a checkpoint, a model folder, or embedded:NAME."),
    ],
    task: Annotated[
        str | None, typer.Option(help="A task's kind; default: that of the run or embedded policy, or knights_knaves.")
    ] = None,
    split: Annotated[
        list[str] | None,
        typer.Option(
            help="Splits; default: heldout and unseen, as far as the task has them. Of task dataset, `all` is every row of "
            "task.path; else only the rows that are held out (task.heldout_fraction) are evaluated."
        ),
    ] = None,
    temperature: Annotated[
        list[float] | None, typer.Option(help="Sampling temperatures; 0 is greedy. Default: 0 and 1.")
    ] = None,
    prompts: Annotated[int, typer.Option(min=1, help="Puzzles of each level.")] = 500,
    samples: Annotated[
        int | None,
        typer.Option(
            min=1, help="Completions per puzzle at temperatures above 0 (avg@n); default: the largest -k, or 1."
        ),
    ] = None,
    k: Annotated[list[int] | None, typer.Option("-k", min=1, help="k of the unbiased pass@k; repeatable.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the draws.")] = 0,
    set_: Annotated[list[str] | None, typer.Option("--set", help=SET_HELP)] = None,
    out: Annotated[Path | None, typer.Option(help="Write the rows to this CSV or Parquet file too.")] = None,
    keep: Annotated[
        Path, typer.Option(help="Folder for the finished batches of an interrupted evaluation; removed at its end.")
    ] = Path("evaluations"),
) -> None:
    """Accuracy of a policy on a task, by split, level and temperature, with 95 % intervals over prompts.

    avg@n is the share of correct completions among n per puzzle; pass@k the chance that k of them hold a right one. The same
    command after an interruption goes on where it stopped.

    Examples:

      sharpscope eval embedded:knights_knaves --prompts 500

      sharpscope eval path/or/hub-id --task dataset --set task.path=test.parquet --split all

      sharpscope eval runs/first --split heldout --temperature 1 --samples 16 -k 1 -k 8
    """
    from sharpscope.training import evaluate_model

    if out is not None:
        check_rows_file(out)
    rows = evaluate_model(
        str(model), task=task, splits=tuple(split) if split else None, temperatures=tuple(temperature or (0.0, 1.0)),
        prompts=prompts, samples=samples or max(k or [1]), seed=seed, pass_at=sorted(set(k or [])), overrides=set_ or (),
        on_progress=lambda text: typer.echo(f"  {text}", err=True), keep=keep,
        save=None if out is None else lambda rows: save_rows(rows, out),
    )  # fmt: skip
    print_evaluation(rows)
    if out is not None:
        typer.echo(f"written: {out}")


def print_evaluation(rows: list[dict[str, Any]]) -> None:
    """The eval rows as a table."""
    import re

    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    passes = sorted(int(name.removeprefix("pass_at_")) for name in rows[0] if re.fullmatch(r"pass_at_\d+", name))
    several = any(row["k"] > 1 for row in rows)
    columns = ["split", "level", "T", "prompts", "n", "avg@n [95 %]", *(f"pass@{k} [95 %]" for k in passes)]
    columns += (["pass@n"] if several else []) + ["reward"]
    table = Table(*map(escape, columns), title=escape(str(rows[0]["task"])))
    for row in rows:
        cells = [row["split"], row["level"], f"{row['temperature']:g}", str(row["n"]), str(row["k"])]
        cells += [_with_interval(row, "accuracy")]
        cells += [_with_interval(row, f"pass_at_{k}") if k <= row["k"] else "" for k in passes]
        cells += [f"{row['pass_at_k']:.2%}"] if several else []
        table.add_row(*map(escape, cells), f"{row['reward_mean']:+.3f}")
    Console().print(table)


def _with_interval(row: dict[str, Any], name: str) -> str:
    return f"{row[name]:.2%} [{100 * row[f'{name}_low']:.2f}, {100 * row[f'{name}_high']:.2f}]"


def check_rows_file(path: Path) -> None:
    """Make sure, before anything is measured, that `save_rows` can write the file; nothing is made.

    Raises:
        UserError: its ending is unknown, it is a folder, or its own folder can be neither written nor made.
    """
    import os

    from sharpscope.errors import UserError

    if path.suffix not in (".csv", ".parquet"):
        raise UserError(f"--out {path}: must end in .csv or .parquet")
    if path.is_dir():
        raise UserError(f"--out {path}: is a folder; give a file in it")
    there = next(folder for folder in path.absolute().parents if folder.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise UserError(f"--out {path}: {there} is no folder that can be written; choose another")


def save_rows(rows: list[dict[str, Any]], path: Path) -> None:
    """Rows as CSV or Parquet, by the file's ending; its folder is made.

    Raises:
        UserError: it cannot be written.
    """
    import pandas as pd

    from sharpscope.errors import UserError

    check_rows_file(path)
    frame = pd.DataFrame(rows)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".csv":
            frame.to_csv(path, index=False)
        else:
            frame.to_parquet(path, index=False)
    except OSError as error:
        raise UserError(
            f"--out {path}: cannot be written ({error.strerror or error}); what was measured is kept, so call again with "
            "another --out"
        ) from error


def warm_start(
    policy: Annotated[
        str, typer.Argument(help="Which of the embedded policies: knights_knaves, math or tool_qa.")
    ] = "knights_knaves",
    out: Annotated[Path | None, typer.Option(help="Folder of the new policy. Default: policies/NAME.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Any field of the warm start, as name=value.")] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads; the same number gives the same weights. Default: all cores.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help=QUIET_HELP)] = False,
) -> None:
    """Train an embedded policy from nothing on generated demonstrations; the defaults recreate the shipped one.

    Examples:

      sharpscope warm-start --out policies/mine --set steps=2500

      sharpscope warm-start tool_qa --threads 1
    """
    from sharpscope.cli.warm import run_warm_start

    run_warm_start(policy, out, set_ or [], quiet, threads)
