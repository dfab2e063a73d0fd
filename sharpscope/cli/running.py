"""`run`, `demo` and `eval`: train one policy or the runs of a sweep, and evaluate one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from sharpscope.cli.console import (
    METHODS,
    Model,
    Set,
    Task,
    print_sections,
    say,
    split,
    tell,
)

if TYPE_CHECKING:
    import pandas as pd

    from sharpscope.config import RunConfig
    from sharpscope.sweeps import PlannedRun

SWEEP_FIELDS = {"purpose", "base", "methods", "settings", "grid", "seeds", "claims", "parts"}
"""Fields of a YAML file that make it a sweep (`sharpscope.sweeps.SweepSpec`)."""


def demo(
    out: Annotated[Path, Option(help="Folder of the runs and the page.")] = Path("demo"),
    seed: Annotated[int, Option(help="Seed of both runs.")] = 0,
    steps: Annotated[int, Option(min=2, help="Steps per run.")] = 10,
) -> None:
    """Train a tiny policy on logic puzzles with GRPO and GRPO-SG, then name a planted bug, in about two minutes.

    Example:
      sharpscope demo
    """
    from sharpscope.traces import check_free

    check_free(out)
    say(
        "About two minutes on two cores: two trainings of a tiny policy, a report, and a training with a bug."
    )
    for number, method in enumerate(("grpo", "grpo-sg"), 1):
        say(f"[{number}/3] {method}: {steps} steps on Knights-and-Knaves puzzles with three people")
        _demo_training(method, out=out, seed=seed, steps=steps)
    say("[3/3] the loop of another trainer, with a bug that no curve shows")
    bug = _demo_bug(out, seed)
    _demo_report(out, bug)


def _demo_training(method: str, *, out: Path, seed: int, steps: int) -> None:
    """One of the two trainings; leaves the command if it does not finish."""
    from rich.console import Console

    from sharpscope.config import build_config
    from sharpscope.training import Display, train

    values = {
        "method": method,
        "steps": steps,
        "seed": seed,
        "out": str(out / "runs" / method),
        "rollout.prompts_per_step": 16,
        "evaluation.every": steps,
        "evaluation.prompts": 100,
        "evaluation.temperatures": [0.0],
        "recording.rotation_every": max(1, steps // 3),
        # two points on few prompts: five of them would take a quarter of the time
        "probes.every": steps,
        "probes.prompts": 24,
        "probes.heldout_prompts": 24,
    }
    outcome = train(build_config(values=values), Display(Console(stderr=True)))
    if outcome.status != "finished":
        say(f"{outcome.status}: {outcome.reason}. Written: {outcome.run_dir}/")
        raise typer.Exit(130 if outcome.status == "interrupted" else 1)


def _demo_bug(out: Path, seed: int) -> Path:
    """The folder of a recorded training whose completions are drawn at another temperature than the loss has."""
    from sharpscope.demo import STEPS, train_with_a_bug

    train_with_a_bug(out / "bug", seed, lambda step: tell(f"step {step} of {STEPS}"))
    return out / "bug"


def _demo_report(out: Path, bug: Path) -> None:
    """Print what was found, write the page and a picture, and say where to go on."""
    from rich.console import Console

    from sharpscope.analysis import analyze, plots, show_headline
    from sharpscope.causes import verdict
    from sharpscope.traces import load_run

    written = analyze([out / "runs"], out / "report", on_progress=tell)
    picture, _ = plots.plot_named("gradient_norm")(out / "runs" / "grpo").save(
        out / "gradient_norm.png"
    )
    Console().print(show_headline([out / "runs"]))
    first = next(iter(verdict(load_run(bug)).causes), None)
    if first is None:
        say(
            f"\nThe planted bug (another temperature when sampling) was not named with this seed: {bug}"
        )
    else:
        say(
            f"\nThe planted bug, as `sharpscope show {bug}` names it after six steps:\n"
            f"  {first.sentence}\n"
            f"  evidence: {first.evidence}\n"
            f"  change:   {first.change}"
        )
    say(
        f"\nOpen the report:  {written.page}\n"
        f"A figure:         {picture} (gradient norm of each token against its probability)\n"
        f"One of the runs:  sharpscope show {out}/runs/grpo-sg\n"
        "A real model:     sharpscope run --model path/or/hub-id --task dataset --set task.path=questions.jsonl\n"
        'Your TRL run:     import sharpscope; sharpscope.record(trainer, out="runs/x")'
    )


def run(
    config: Annotated[
        Path | None, Argument(help="YAML file of a run or a sweep, see experiments/.")
    ] = None,
    method: Annotated[
        str | None, Option("--method", "-m", help="name[+field=value…] or label=name…, a method.")
    ] = None,
    methods: Annotated[str | None, Option(help=f"{METHODS} Makes a sweep.")] = None,
    seeds: Annotated[str | None, Option(help="Seeds, separated by commas. Makes a sweep.")] = None,
    task: Task = None,
    model: Model = None,
    steps: Annotated[int | None, Option(help="Number of steps.")] = None,
    seed: Annotated[int | None, Option(help="Seed of training.")] = None,
    lr: Annotated[float | None, Option(help="Peak learning rate.")] = None,
    out: Annotated[Path | None, Option(help="Folder of the run (of a sweep: of its runs).")] = None,
    set_: Set = None,
    resume: Annotated[Path | None, Option(help="Folder of an interrupted run to resume.")] = None,
    quiet: Annotated[bool, Option("--quiet", "-q", help="Disable the live display.")] = False,
    workers: Annotated[
        int, Option(min=1, help="Sweep: concurrent runs; they share the threads.")
    ] = 1,
    ray: Annotated[
        str | None,
        Option(help="Sweep: run on the Ray cluster at this address (auto, HOST:PORT)."),
    ] = None,
    part: Annotated[
        list[str] | None, Option(help="Sweep: part to run. Repeatable. Default: all.")
    ] = None,
    dry_run: Annotated[bool, Option("--dry-run", help="Sweep: print the runs, and exit.")] = False,
) -> None:
    """Train a policy and record token-level traces; with --methods, --seeds or a sweep's file, several. Repeat to resume a sweep.

    Examples:
      sharpscope run --method grpo-sg --steps 20
      sharpscope run --methods grpo,flat=mine:flat_top --seeds 0,1,2 --workers 2
      sharpscope run --task dataset --set task.path=puzzles.parquet --model path/or/hub-id --out runs/real
      sharpscope run experiments/pair.yaml --dry-run
      sharpscope run experiments/pair.yaml --ray auto
      sharpscope run --resume runs/first
      accelerate launch --num_processes 2 -m sharpscope run --method grpo-sg
    """
    from sharpscope.config import config_data, make_config, read_recorded
    from sharpscope.errors import UserError
    from sharpscope.settings import read_yaml

    options = {
        "method": method,
        "task": task,
        "model": model,
        "steps": steps,
        "seed": seed,
        "lr": lr,
    }
    if resume is not None:
        others = [config, methods, seeds, out, set_, *options.values()]
        if any(value is not None for value in others):
            raise UserError("--resume uses the settings of the run; remove the other options")
        _train(read_recorded(resume), quiet, resume=True)
        return
    content = {} if config is None else read_yaml(config)
    _check_lists(method, methods, seed, seeds)
    if methods is None and seeds is None and not SWEEP_FIELDS & set(content):
        if part or dry_run or ray:
            raise UserError(
                "--part, --dry-run, --ray: go with a sweep; give --methods, --seeds or the file of one"
            )
        values = command_values(**options) | ({} if out is None else {"out": str(out)})
        _train(make_config(config_data(content, set_ or (), values)), quiet)
        return
    from sharpscope.sweeps import plan_sweep, read_sweep

    content = content if SWEEP_FIELDS & set(content) else _as_sweep(content)
    if out is not None:
        content |= {"out": str(out)}
    if methods is not None or method is not None:
        content["methods"] = split(methods) or [method]
    if seeds is not None or seed is not None:
        content["seeds"] = split(seeds) or [seed]
    values = command_values(task=task, model=model, steps=steps, lr=lr)
    changes = config_data(None, set_ or (), values)
    if ray and workers > 1:
        raise UserError("--workers: a Ray cluster has its own; remove it")
    _sweep(plan_sweep(read_sweep(content), part or (), changes), workers, dry_run, ray)


def _check_lists(
    method: str | None,
    methods: str | None,
    seed: int | None,
    seeds: str | None,
) -> None:
    """Refuse a list beside its single value, and one that names nothing."""
    from sharpscope.errors import UserError

    for name, one, several in (("method", method, methods), ("seed", seed, seeds)):
        if several is not None and one is not None:
            raise UserError(
                f"--{name}: goes without --{name}s, which lists all; remove one of the two"
            )
    if seeds is not None and not (split(seeds) and all(one.isdecimal() for one in split(seeds))):
        raise UserError(
            f"--seeds {seeds}: must be whole numbers separated by commas, such as 0,1,2"
        )
    if methods is not None and not split(methods):
        raise UserError("--methods: names nothing; list them (sharpscope methods)")


def evaluate(
    model: Annotated[
        Path, Argument(help="Folder of a run, a checkpoint or a model, or embedded:NAME.")
    ],
    task: Annotated[
        str | None, Option(help="Kind of a task. Default: that of the run or policy.")
    ] = None,
    split: Annotated[
        list[str] | None,
        Option(help="Of a file, all is every row. Repeatable. Default: heldout, unseen."),
    ] = None,
    temperature: Annotated[
        list[float] | None, Option(help="0 is greedy. Repeatable. Default: 0, 1.")
    ] = None,
    prompts: Annotated[int, Option(min=1, help="Prompts per level.")] = 500,
    samples: Annotated[
        int | None, Option(min=1, help="Completions per prompt above temperature 0.")
    ] = None,
    k: Annotated[
        list[int] | None, Option("-k", min=1, help="k of the unbiased pass@k. Repeatable.")
    ] = None,
    seed: Annotated[int, Option(help="Seed of sampling.")] = 0,
    set_: Set = None,
    out: Annotated[Path | None, Option(help="Folder for the results (eval.csv).")] = None,
) -> None:
    """Evaluate a policy on a task by split, level and temperature, with 95 % intervals over prompts.

    avg@n is the share of correct completions among n per prompt; pass@k is the probability that at least one of k is
    correct.

    Examples:
      sharpscope eval embedded:knights_knaves --prompts 500
      sharpscope eval path/or/hub-id --task dataset --set task.path=test.parquet --split all
      sharpscope eval runs/first --split heldout --temperature 1 --samples 16 -k 1 -k 8
    """
    from sharpscope.analysis.sections import Section
    from sharpscope.traces import check_free
    from sharpscope.training import evaluate_model

    if out is not None:
        check_free(out)
    pass_at = sorted(set(k or []))
    rows = evaluate_model(
        str(model),
        task=task,
        splits=tuple(split) if split else None,
        temperatures=tuple(temperature or (0.0, 1.0)),
        prompts=prompts,
        samples=samples or max(k or [1]),
        seed=seed,
        pass_at=pass_at,
        overrides=set_ or (),
        on_progress=tell,
    )
    print_sections([Section(str(rows[0]["task"]), _table(rows, pass_at))])
    if out is not None:
        import pandas as pd

        from sharpscope.analysis.text import csv_text
        from sharpscope.traces import write_atomic

        out.mkdir(parents=True, exist_ok=True)
        write_atomic(out / "eval.csv", csv_text(pd.DataFrame(rows)))
        say(f"Written: {out}/eval.csv")


def _table(rows: list[dict[str, Any]], pass_at: Sequence[int]) -> pd.DataFrame:
    """The results with their 95 % intervals, in percent."""
    import pandas as pd

    shown = []
    for row in rows:
        cells = {name: row[name] for name in ("split", "level")} | {"T": f"{row['temperature']:g}"}
        cells |= {
            "prompts": row["n"],
            "n": row["k"],
            "avg@n [95 %]": _with_interval(row, "accuracy"),
        }
        cells |= {
            f"pass@{k} [95 %]": _with_interval(row, f"pass_at_{k}") if k <= row["k"] else ""
            for k in pass_at
        }
        shown.append(cells | {"reward": f"{row['reward_mean']:+.3f}"})
    return pd.DataFrame(shown)


def _with_interval(row: dict[str, Any], name: str) -> str:
    return f"{row[name]:.2%} [{100 * row[f'{name}_low']:.2f}, {100 * row[f'{name}_high']:.2f}]"


def command_values(**options: object) -> dict[str, object]:
    """Map the options of `run` to configuration paths; options that are None are omitted."""
    paths = {"model": "policy.model", "lr": "optimizer.lr"}
    values = {paths.get(name, name): value for name, value in options.items() if value is not None}
    if "task" in values:
        from sharpscope.tasks import task_choice

        values["task"] = dict(task_choice(str(values["task"])))
    return values


def _as_sweep(content: dict[str, object]) -> dict[str, object]:
    """The configuration of a run as that of a sweep."""
    method = content.get("method", "grpo")
    name = method.get("name", "grpo") if isinstance(method, dict) else method
    seed = content.pop("seed", 0)
    out = content.pop("out", "runs")
    return {"base": content, "methods": [name], "seeds": [seed], "out": out}


def _train(config: RunConfig, quiet: bool, resume: bool = False) -> None:
    """Train one run, print how it ended and the next commands."""
    from sharpscope.config.run import default_lr
    from sharpscope.traces import check_free

    if not resume:
        check_free(config.run_dir)
    from rich.console import Console

    from sharpscope import distributed
    from sharpscope.training import Display, train

    if not quiet and not resume and config.optimizer.lr == default_lr(config.policy.model):
        kind = (
            "embedded policies"
            if config.policy.model.startswith("embedded:")
            else "pretrained models"
        )
        say(f"learning rate {config.optimizer.lr:g}, the default for {kind} (--lr sets another)")
    outcome = train(config, None if quiet else Display(Console(stderr=True)), resume=resume)
    if not distributed.is_rank_zero():
        return
    for text in outcome.notes:
        say(f"note:   {text}")
    count = f"{outcome.steps_done} step{'' if outcome.steps_done == 1 else 's'}"
    files = f"{outcome.run_dir}/ (run.json, traces/, checkpoints/)"
    say(f"{outcome.status}: {count}, {outcome.reason}. Written: {files}")
    if outcome.status == "interrupted":
        say(f"resume: sharpscope run --resume {outcome.run_dir}")
    say(f"view:   sharpscope show {outcome.run_dir}   |   sharpscope analyze {outcome.run_dir}")
    if outcome.status != "finished":
        raise typer.Exit(130 if outcome.status == "interrupted" else 1)


def _sweep(runs: Sequence[PlannedRun], workers: int, dry_run: bool, ray: str | None) -> None:
    """Execute a sweep, here or on a Ray cluster, and print how its runs ended, or only list them."""
    from sharpscope.recording.run_folder import default_threads
    from sharpscope.sweeps import execute

    if dry_run:
        for run in runs:
            say(f"  {run.run_dir}  {run.config.steps} steps  {run.status}")
        say(f"{len(runs)} runs, {sum(run.status != 'finished' for run in runs)} to do")
        return
    fixed = runs[0].config.threads
    threads = fixed or max(
        1, max(default_threads(run.config.policy.model) for run in runs) // workers
    )
    if ray is None:
        ended = execute(runs, workers=workers, threads=threads, tell=tell)
    else:
        from sharpscope.ray_sweeps import execute_on_ray

        ended = execute_on_ray(runs, address=ray, threads=threads, tell=tell)
    folder = runs[0].run_dir.parent
    counts = Counter(ending for ending, _ in ended.values())
    say(f"{', '.join(f'{count} {ending}' for ending, count in counts.items())}. Written: {folder}/")
    for run, (ending, reason) in ended.items():
        if reason:
            say(f"{ending}: {run.name}: {reason}")
        if run.status == "failed":
            say(f"        to go on with it: sharpscope run --resume {run.run_dir}")
    say(f"view:   sharpscope analyze {folder}")
    if counts["finished"] + counts["already finished"] < len(runs):
        say("Repeat the command for runs that are interrupted, or whose mistake is mended.")
        raise typer.Exit(130 if counts["interrupted"] and not counts["failed"] else 1)
