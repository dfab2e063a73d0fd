"""`sharpscope import`: traces from the files of other trainers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option


def import_(
    kind: Annotated[str, Argument(help="jsonl, nemo-rl, slime, verifiers, open-instruct, prime-rl, verl, or auto.")],
    source: Annotated[Path, Argument(help="The trainer's file or folder.")],
    out: Annotated[Path | None, Option(help="Folder of the new run. Default: runs/FORMAT.")] = None,
    columns: Annotated[list[str] | None, Option(help="jsonl: OURS=THEIRS, such as logp=logprobs. Repeatable.")] = None,
    method: Annotated[str, Option(help="Name of the training method.")] = "unknown",
    task: Annotated[str | None, Option(help="Name of the task. Default: the format's.")] = None,
    seed: Annotated[int | None, Option(help="Seed of the run, if known.")] = None,
    tokenizer: Annotated[str | None, Option(help="Model folder or hub id, for texts of tokens. Default: IDs.")] = None,
    temperature: Annotated[float | None, Option(help="Of the log-probabilities. Default: 1.")] = None,
    adv_tau: Annotated[float | None, Option(help="prime-rl: adv_tau of the default loss; with --kl-tau.")] = None,
    kl_tau: Annotated[float | None, Option(help="prime-rl: kl_tau of the default loss; with --adv-tau.")] = None,
) -> None:
    """Write a trace from the files of another trainer. Values that they lack are null.

    Examples:
      sharpscope import nemo-rl logs/exp_001 --out runs/imported --tokenizer Qwen/Qwen3-0.6B
      sharpscope import jsonl tokens.jsonl --columns logp=logprobs,token_id=ids,mask=loss_mask
      sharpscope import prime-rl outputs --adv-tau 1 --kl-tau 0.001
    """
    from sharpscope.errors import UserError
    from sharpscope.integrations.completions import Labels
    from sharpscope.integrations.importers import Options, import_files, recognize

    pairs: dict[str, str] = {}
    for pair in (part.strip() for given in columns or () for part in given.split(",")):
        ours, equals, theirs = pair.partition("=")
        if not (ours and equals and theirs):
            raise UserError(f"--columns {pair}: not of the form OURS=THEIRS; write for example logp=logprobs")
        pairs[ours] = theirs
    if (adv_tau is None) != (kl_tau is None):
        raise UserError("--adv-tau, --kl-tau: give both, as in prime-rl's configuration, or neither")
    kind = recognize(source) if kind == "auto" else kind
    for given, of, name in ((pairs, "jsonl", "--columns"), (adv_tau is not None, "prime-rl", "--adv-tau")):
        if given and kind != of:
            raise UserError(f"{name}: belongs to the format {of}, not {kind}; leave it out")
    folder = out or Path("runs") / kind
    labels = Labels(method, task, seed, tokenizer, temperature)
    counts = import_files(kind, source, folder, labels, Options(pairs, adv_tau, kl_tau))
    made = f"{counts['steps']} steps, {counts['rollouts']} completions, {counts['tokens']} tokens"
    typer.echo(f"{made}. Written: {folder}/")
    typer.echo(f"Next: {next_command(folder)}")


def next_command(folder: Path) -> str:
    """The command that shows most of an imported run."""
    from sharpscope.traces import load_run

    missing = (load_run(folder).info.get("imported") or {}).get("not_recorded", {}).get("tokens", [])
    if "token_id" in missing:
        return f"sharpscope show {folder}"
    if "loss_coef" not in missing:
        return f"sharpscope tokens {folder} --by loss_coef"
    return f"sharpscope probe --tokens {folder} --model CHECKPOINT  (norms of the tokens; sharpscope show {folder} says what is null)"
