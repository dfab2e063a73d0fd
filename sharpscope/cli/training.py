"""`run`, `eval`, `warm-start`: train and evaluate policies."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

SET_HELP = "Set a field: --set rollout.group_size=16. Repeatable. `sharpscope config --explain` lists the fields."
QUIET_HELP = "Disable the live display."


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    app.command("run")(run)
    app.command("eval")(evaluate)


def run(
    config: Annotated[
        Path | None, typer.Argument(help="YAML file, see experiments/. Other fields have defaults.")
    ] = None,
    method: Annotated[
        str | None, typer.Option("--method", "-m", help="Name of a method: `sharpscope methods`.")
    ] = None,
    task: Annotated[str | None, typer.Option(help="Kind of a task: `sharpscope tasks`.")] = None,
    model: Annotated[str | None, typer.Option(help="embedded:NAME, a model folder, or a Hugging Face Hub id.")] = None,
    token_weights: Annotated[
        str | None,
        typer.Option(
            "--token-weights",
            "--shaping",
            help="Token weights: paper | calibrated (presets of the sigmoid) or module:function. Controls apply to them.",
        ),
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Number of steps.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of training.")] = None,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run. Default: runs/<method>-<task>-s<seed>.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help=SET_HELP)] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Folder of an interrupted run to resume from its last checkpoint.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help=QUIET_HELP)] = False,
) -> None:
    """Train a policy and record token-level traces.

    Examples:
      sharpscope run --method grpo-sg --steps 20

      sharpscope run -m grpo-sg --set method.weight.tau=4 --set method.weight_on=ratio --out runs/ablation

      sharpscope run --task dataset --set task.path=puzzles.parquet --method grpo-sg --out runs/real

      sharpscope run --resume runs/first

      accelerate launch --num_processes 2 -m sharpscope run --method grpo-sg
    """
    from sharpscope import distributed
    from sharpscope.config import build_config
    from sharpscope.training import Display, RichDisplay, train

    display = Display() if quiet else RichDisplay()
    if resume is not None:
        from sharpscope.errors import UserError

        given = [config, method, task, model, token_weights, steps, seed, lr, out, set_]
        if any(value is not None for value in given):
            raise UserError("--resume uses the settings of the run; remove the other options")
        if not (resume / "config.yaml").is_file():
            problem = "has no config.yaml" if resume.is_dir() else "does not exist"
            raise UserError(f"--resume {resume}: {problem}; give the folder of a run")
        settings = build_config(resume / "config.yaml", values={"out": str(resume.parent), "name": resume.name})
        outcome = train(settings, display, resume=True)
    else:
        values = command_values(method=method, task=task, model=model, steps=steps, seed=seed, lr=lr, out=out)
        outcome = train(build_config(config, set_ or (), values, token_weights), display)
    if distributed.is_rank_zero():
        for text in outcome.notes:
            typer.echo(f"note:   {text}")
        report(outcome.run_dir, outcome.status, outcome.steps_done, outcome.reason)


def command_values(**options: Any) -> dict[str, Any]:
    """Map the options of `run` to configuration paths; options that are None are omitted."""
    paths = {"method": "method", "model": "policy.model", "steps": "steps", "seed": "seed", "lr": "optimizer.lr"}
    values: dict[str, Any] = {path: options[name] for name, path in paths.items() if options.get(name) is not None}
    if options.get("task") is not None:
        from sharpscope.tasks import task_choice

        values["task"] = dict(task_choice(options["task"]))
    if options.get("out") is not None:
        values["out"], values["name"] = str(options["out"].parent), options["out"].name
    return values


def report(run_dir: Path, status: str, steps: int, reason: str) -> None:
    """Print how a run ended, its files and the next commands.

    Raises:
        typer.Exit: The run failed; the exit code is 1.
    """
    typer.echo(
        f"{status}: {steps} step{'' if steps == 1 else 's'}, {reason}. Written: {run_dir}/ (run.json, traces/, checkpoints/)"
    )
    if status == "interrupted":
        typer.echo(f"resume: sharpscope run --resume {run_dir}")
    typer.echo(f"view:   sharpscope show {run_dir}   |   sharpscope analyze {run_dir}")
    if status == "failed":
        raise typer.Exit(1)


def evaluate(
    model: Annotated[
        Path,
        typer.Argument(help="Folder of a run (its last checkpoint), of a checkpoint or of a model, or embedded:NAME."),
    ],
    task: Annotated[
        str | None,
        typer.Option(help="Kind of a task. Default: that of the run or embedded policy, else knights_knaves."),
    ] = None,
    split: Annotated[
        list[str] | None,
        typer.Option(
            help="Split. Repeatable. Default: heldout and unseen, if the task has them. For task dataset, `all` is all rows "
            "of task.path, and heldout is the share task.heldout_fraction of them."
        ),
    ] = None,
    temperature: Annotated[
        list[float] | None, typer.Option(help="Sampling temperature; 0 is greedy. Repeatable. Default: 0 and 1.")
    ] = None,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts per level.")] = 500,
    samples: Annotated[
        int | None,
        typer.Option(
            min=1, help="Completions per prompt at temperatures above 0 (n of avg@n). Default: the largest -k, or 1."
        ),
    ] = None,
    k: Annotated[list[int] | None, typer.Option("-k", min=1, help="k of the unbiased pass@k. Repeatable.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of sampling.")] = 0,
    set_: Annotated[list[str] | None, typer.Option("--set", help=SET_HELP)] = None,
    out: Annotated[Path | None, typer.Option(help="CSV or Parquet file for the results.")] = None,
) -> None:
    """Evaluate a policy on a task by split, level and temperature, with 95 % intervals over prompts.

    avg@n is the share of correct completions among n per prompt; pass@k is the probability that at least one of k is
    correct.

    Examples:
      sharpscope eval embedded:knights_knaves --prompts 500

      sharpscope eval path/or/hub-id --task dataset --set task.path=test.parquet --split all

      sharpscope eval runs/first --split heldout --temperature 1 --samples 16 -k 1 -k 8
    """
    from sharpscope.training import evaluate_model

    if out is not None:
        check_rows_file(out)
    rows = evaluate_model(
        str(model),
        task=task,
        splits=tuple(split) if split else None,
        temperatures=tuple(temperature or (0.0, 1.0)),
        prompts=prompts,
        samples=samples or max(k or [1]),
        seed=seed,
        pass_at=sorted(set(k or [])),
        overrides=set_ or (),
        on_progress=lambda text: typer.echo(f"  {text}", err=True),
    )
    print_evaluation(rows)
    if out is not None:
        save_rows(rows, out)
        typer.echo(f"Written: {out}")


def print_evaluation(rows: list[dict[str, Any]]) -> None:
    """Print the eval rows as a table."""
    import re

    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    pass_at = sorted(int(name.removeprefix("pass_at_")) for name in rows[0] if re.fullmatch(r"pass_at_\d+", name))
    repeated = any(row["k"] > 1 for row in rows)
    columns = ["split", "level", "T", "prompts", "n", "avg@n [95 %]", *(f"pass@{k} [95 %]" for k in pass_at)]
    columns += (["pass@n"] if repeated else []) + ["reward"]
    table = Table(*map(escape, columns), title=escape(str(rows[0]["task"])))
    for row in rows:
        cells = [row["split"], row["level"], f"{row['temperature']:g}", str(row["n"]), str(row["k"])]
        cells += [_with_interval(row, "accuracy")]
        cells += [_with_interval(row, f"pass_at_{k}") if k <= row["k"] else "" for k in pass_at]
        cells += [f"{row['pass_at_k']:.2%}"] if repeated else []
        table.add_row(*map(escape, cells), f"{row['reward_mean']:+.3f}")
    Console().print(table)


def _with_interval(row: dict[str, Any], name: str) -> str:
    return f"{row[name]:.2%} [{100 * row[f'{name}_low']:.2f}, {100 * row[f'{name}_high']:.2f}]"


def check_rows_file(path: Path) -> None:
    """Check that `save_rows` can write the file, without creating anything.

    Raises:
        UserError: The suffix is unknown, the path is a folder, or its parent folder cannot be written or created.
    """
    import os

    from sharpscope.errors import UserError

    if path.suffix not in (".csv", ".parquet"):
        raise UserError(f"--out {path}: must end in .csv or .parquet")
    if path.is_dir():
        raise UserError(f"--out {path}: is a folder; give a file")
    parent = next(folder for folder in path.absolute().parents if folder.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise UserError(f"--out {path}: {parent} is not a writable folder; choose another")


def save_rows(rows: list[dict[str, Any]], path: Path) -> None:
    """Write rows as CSV or Parquet, depending on the suffix; the parent folder is created.

    Raises:
        UserError: The file cannot be written.
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
        raise UserError(f"--out {path}: cannot be written ({error.strerror or error}); choose another --out") from error
