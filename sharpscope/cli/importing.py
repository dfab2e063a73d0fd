"""`sharpscope import`: traces from the files of other trainers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from sharpscope.integrations.importers import Labels

Out = Annotated[Path, typer.Option(help="Folder of the new run.")]
Method = Annotated[str, typer.Option(help="Name of the training method.")]
Task = Annotated[str | None, typer.Option(help="Name of the task. Default: the importer's name.")]
Seed = Annotated[int | None, typer.Option(help="Seed of the run, if known.")]
Tokenizer = Annotated[
    str | None,
    typer.Option(help="Model folder or hub id of the tokenizer, for texts. Default: tokens are shown as IDs."),
]
Temperature = Annotated[
    float | None,
    typer.Option(help="Softmax temperature of the log-probabilities, which probes of a checkpoint use. Default: 1."),
]

group = typer.Typer(
    help="Write a trace from the files of another trainer. What they do not say is null.", no_args_is_help=True
)


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    app.add_typer(group, name="import")


@group.command("prime-rl")
def prime_rl(
    folder: Annotated[Path, typer.Argument(help="Output folder of prime-rl, or its token_exports.")],
    out: Out = Path("runs/prime-rl"),
    method: Method = "unknown",
    task: Task = None,
    seed: Seed = None,
    tokenizer: Tokenizer = None,
    temperature: Temperature = None,
    adv_tau: Annotated[
        float | None, typer.Option(help="adv_tau of the default loss; with --kl-tau, for loss_coef.")
    ] = None,
    kl_tau: Annotated[float | None, typer.Option(help="kl_tau of the default loss; with --adv-tau.")] = None,
) -> None:
    """Import prime-rl's token export (enable_token_export).

    Example:
      sharpscope import prime-rl outputs --out runs/imported --tokenizer Qwen/Qwen3-0.6B --adv-tau 1 --kl-tau 0.001
    """
    from sharpscope.errors import UserError
    from sharpscope.integrations.importers import Coefficients, import_prime_rl

    if (adv_tau is None) != (kl_tau is None):
        raise UserError("--adv-tau, --kl-tau: give both, as in prime-rl's configuration, or neither")
    constants = None if adv_tau is None or kl_tau is None else Coefficients(adv_tau, kl_tau)
    _tell(import_prime_rl(folder, out, _labels(method, task, seed, tokenizer, temperature), constants), out)


@group.command("verl")
def verl(
    folder: Annotated[Path, typer.Argument(help="The folder that trainer.rollout_data_dir names.")],
    out: Out = Path("runs/verl"),
    method: Method = "unknown",
    task: Task = None,
    seed: Seed = None,
) -> None:
    """Import verl's rollout files (completions and rewards, no tokens).

    Example:
      sharpscope import verl rollouts --out runs/imported --method grpo
    """
    from sharpscope.integrations.importers import import_verl

    _tell(import_verl(folder, out, _labels(method, task, seed, None)), out)


@group.command("jsonl")
def jsonl(
    file: Annotated[
        Path,
        typer.Argument(help="File of JSON lines, or a folder of them: a sequence (lists) or a token (numbers) a line."),
    ],
    columns: Annotated[
        list[str] | None,
        typer.Option(
            help="OURS=THEIRS, comma-separated or repeated, such as logp=logprobs,advantage=adv,mask=loss_mask."
        ),
    ] = None,
    out: Out = Path("runs/jsonl"),
    method: Method = "unknown",
    task: Task = None,
    seed: Seed = None,
    tokenizer: Tokenizer = None,
    temperature: Temperature = None,
) -> None:
    """Import any table of tokens.

    Needed: token_id and logp. Also: behavior_logp, entropy, advantage, ratio, weight, loss_coef, clipped, score_norm,
    score_norm_local, attribution, mask, position, step (or in the file's name), rollout, group, prompt, completion, reward,
    prompt_ids or prompt_length, and of a step loss, grad_norm, lr.

    Example:
      sharpscope import jsonl tokens.jsonl --columns logp=logprobs,token_id=ids,mask=loss_mask --out runs/imported
    """
    from sharpscope.errors import UserError
    from sharpscope.integrations.importers import import_jsonl

    pairs: dict[str, str] = {}
    for pair in (part.strip() for given in columns or () for part in given.split(",")):
        ours, equals, theirs = pair.partition("=")
        if not (ours and equals and theirs):
            raise UserError(f"--columns {pair}: not of the form OURS=THEIRS; write for example logp=logprobs")
        pairs[ours] = theirs
    _tell(import_jsonl(file, out, _labels(method, task, seed, tokenizer, temperature), pairs), out)


def _labels(
    method: str, task: str | None, seed: int | None, tokenizer: str | None, temperature: float | None = None
) -> Labels:
    from sharpscope.integrations.importers import Labels

    return Labels(method, task, seed, tokenizer, temperature)


def _tell(counts: dict[str, int], out: Path) -> None:
    typer.echo(f"{counts['steps']} steps, {counts['rollouts']} completions, {counts['tokens']} tokens. Written: {out}/")
    typer.echo(
        f"(try: sharpscope show {out}, which also says what is not recorded; sharpscope tokens {out} --by loss_coef)"
    )
