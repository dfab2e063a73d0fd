"""`import`: traces from the files of other trainers; `export`: traces to experiment loggers, or to less space."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from sharpscope.cli.console import (
    Runs,
    read_pairs,
    say,
    split,
    tell,
)


def export(
    runs: Runs,
    to: Annotated[
        str, Option(help="tensorboard | wandb | trackio (each needs its extra) | packed | reduced.")
    ],
    out: Annotated[Path, Option(help="Folder that is written.")] = Path("logs"),
    project: Annotated[
        str, Option(help="Project of the logger (not for TensorBoard).")
    ] = "sharpscope",
    follow: Annotated[bool, Option("--follow", help="Continue until the runs end.")] = False,
    online: Annotated[bool, Option("--online", help="Upload to Weights & Biases.")] = False,
) -> None:
    """Export curves to a logger, or runs as packed or reduced data.

    trackio also gets what was found as alerts, the leading tokens of measured steps as traces, and the page as an artifact.

    packed: finished runs in one Parquet file per table, without checkpoints; commands that read runs also read it.

    reduced: finished runs without checkpoints and texts and with a sample of their tokens, a few hundred kilobytes each, from
    which claims, tables and figures are the same; runs already in --out are kept.

    Examples:
      sharpscope export runs/first --to tensorboard --out logs --follow
      sharpscope export runs/study --to reduced --out runs/reduced
    """
    from sharpscope.analysis import nothing_found
    from sharpscope.analysis.reduction import reduce_runs
    from sharpscope.errors import UserError
    from sharpscope.integrations import loggers
    from sharpscope.traces import load_runs, pack_runs

    loaded = load_runs(runs)
    if not len(loaded):
        raise UserError(nothing_found(runs, loaded))
    if to == "packed":
        files = pack_runs(loaded.by_name, out)
        _tell(f"{len(files)} files", files, out)
    elif to == "reduced":
        named = [item for path in runs for item in load_runs(path).by_name.items()]
        written, skipped = reduce_runs(named, out, tell=lambda name: tell(f"reducing {name}"))
        for line in skipped:
            say(f"  skipped: {line}")
        files = [file for folder in written for file in folder.rglob("*") if file.is_file()]
        _tell("1 run reduced" if len(written) == 1 else f"{len(written)} runs reduced", files, out)
    else:
        paths = [run.path for run in loaded.by_name.values()]
        for name, count in loggers.export(
            paths,
            to,
            out,
            project=project,
            online=online,
            follow=follow,
        ).items():
            say(f"{name}: {count} values")
        view = {
            "tensorboard": f"tensorboard --logdir {out}",
            "wandb": f"wandb sync {out}/wandb/offline-run-*",
            "trackio": f"TRACKIO_DIR={out} trackio show --project {project}",
        }[to]
        say(f"Written: {out}/. View:  {view}" if not online else f"Uploaded to project {project}.")


def _tell(what: str, files: list[Path], out: Path) -> None:
    size = sum(file.stat().st_size for file in files) / 1e6
    say(f"{what}, {size:.1f} MB. Written: {out}/ (try: sharpscope analyze {out})")


def import_(
    kind: Annotated[
        str, Argument(help="jsonl, nemo-rl, slime, verifiers, open-instruct, prime-rl, or auto.")
    ],
    source: Annotated[Path, Argument(help="The trainer's file or folder.")],
    out: Annotated[Path | None, Option(help="Folder of the new run. Default: runs/FORMAT.")] = None,
    columns: Annotated[
        list[str] | None, Option(help="jsonl: OURS=THEIRS, such as logp=logprobs. Repeatable.")
    ] = None,
    method: Annotated[str, Option(help="Name of the training method.")] = "unknown",
    task: Annotated[str | None, Option(help="Name of the task. Default: the format's.")] = None,
    seed: Annotated[int | None, Option(help="Seed of the run, if known.")] = None,
    tokenizer: Annotated[
        str | None, Option(help="Model folder or hub id, for texts of tokens. Default: IDs.")
    ] = None,
    temperature: Annotated[
        float | None, Option(help="Of the log-probabilities. Default: 1.")
    ] = None,
) -> None:
    """Write a trace from the files of another trainer. Values that they lack are null.

    Examples:
      sharpscope import nemo-rl logs/exp_001 --out runs/imported --tokenizer Qwen/Qwen3-0.6B
      sharpscope import jsonl tokens.jsonl --columns logp=logprobs,token_id=ids,mask=loss_mask
    """
    from sharpscope.errors import UserError
    from sharpscope.integrations.importers import Options, import_files, recognize

    pairs = read_pairs(
        "--columns",
        [part for given in columns or () for part in split(given)],
        "logp=logprobs",
    )
    kind = recognize(source) if kind == "auto" else kind
    if pairs and kind != "jsonl":
        raise UserError(f"--columns: belongs to the format jsonl, not {kind}; leave it out")
    folder = out or Path("runs") / kind
    options = Options(method, task, seed, tokenizer, temperature, pairs)
    counts = import_files(kind, source, folder, options)
    made = f"{counts['steps']} steps, {counts['rollouts']} completions, {counts['tokens']} tokens"
    say(f"{made}. Written: {folder}/")
    say(f"Next: {next_command(folder)}")


def next_command(folder: Path) -> str:
    """The command that shows most of an imported run."""
    from sharpscope.traces import load_run

    missing = (
        (load_run(folder).info.get("imported") or {}).get("not_recorded", {}).get("tokens", [])
    )
    if "token_id" in missing:
        return f"sharpscope show {folder}"
    if "loss_coef" not in missing:
        return f"sharpscope tokens {folder} --by loss_coef"
    return f"sharpscope probe --rollouts {folder} --model CHECKPOINT  (norms of the tokens; sharpscope show {folder} says what is null)"
