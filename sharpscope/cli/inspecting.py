"""`show`, `compare`, `claims`, `figures`, `tokens`, `spikes`: commands that read traces and answer in the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    app.command("show")(show)
    app.command("compare")(compare)
    app.command("claims")(claims)
    app.command("figures")(figures)
    app.command("tokens")(tokens)
    app.command("spikes")(spikes)


def show(
    run: Annotated[Path, typer.Argument(help="A run's folder.")],
) -> None:
    """One run at a glance: setting, curves, last evaluation, events, weights, cost.

    Example:

      sharpscope show runs/first
    """
    from rich.console import Console

    from sharpscope.analysis import show as render
    from sharpscope.traces import load_run

    Console().print(render(load_run(run)))


def compare(
    first: Annotated[Path, typer.Argument(help="A run's folder.")],
    second: Annotated[Path, typer.Argument(help="Another run's folder.")],
) -> None:
    """What differs between two runs: in their settings, and in their results with intervals.

    Example:

      sharpscope compare runs/grpo-knights_knaves-s0 runs/grpo-sg-knights_knaves-s0
    """
    from rich.console import Console

    from sharpscope.analysis import compare as render
    from sharpscope.traces import load_run

    Console().print(render(load_run(first), load_run(second)))


def claims(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or folders of runs.")],
    claim: Annotated[
        list[str] | None, typer.Option(help="A claim's name, such as C7; repeatable. Default: all.")
    ] = None,
    details: Annotated[
        bool, typer.Option("--details", help="Statistic, interval, rule, confounders and rows of each.")
    ] = False,
    baseline: Annotated[str, typer.Option(help="The method compared with.")] = "grpo",
    treatment: Annotated[str, typer.Option(help="The method that the claims are about.")] = "grpo-sg",
    out: Annotated[
        Path | None,
        typer.Option(
            help="Also write claims.json, claims.md and tables of the paper's and of all settings into this folder."
        ),
    ] = None,
) -> None:
    """Test the published claims on whatever runs there are: supported, refuted, inconclusive or untestable.

    Examples:

      sharpscope claims runs/

      sharpscope claims runs/ --claim C7 --details --treatment gspo

      sharpscope claims data/reference --out experiments/results
    """
    from sharpscope.analysis import load_several, nothing_found
    from sharpscope.analysis.claims import study_of, test_claims, verdict_text, write_claims
    from sharpscope.analysis.tables import endpoint_tables, paper_tables, write_tables
    from sharpscope.errors import UserError

    loaded = load_several(runs)
    if not len(loaded):
        raise UserError(nothing_found(runs, loaded))
    verdicts = test_claims(loaded, claim, baseline=baseline, treatment=treatment)
    for verdict in verdicts:
        typer.echo(printable_lines(verdict_text(verdict) if details else verdict.line()))
    if out is not None:
        files = write_claims(verdicts, out)
        study = study_of(loaded, baseline, treatment)
        files += write_tables([*paper_tables(study), *endpoint_tables(study)], out)
        typer.echo(f"{len(files)} files. Written: {out}/ (look: {files[1]})")


def figures(
    source: Annotated[Path, typer.Option("--from", help="Run folders, or a folder of runs.")],
    out: Annotated[Path, typer.Option(help="Where the pictures go.")] = Path("figures"),
) -> None:
    """Every figure of the runs and of the claims, and nothing else.

    Example:

      sharpscope figures --from data/reference --out figures
    """
    from sharpscope.analysis import figures_of
    from sharpscope.analysis.figures import save
    from sharpscope.errors import UserError
    from sharpscope.traces import load_runs

    loaded = load_runs(source)
    if not any(len(run.steps) for run in loaded):
        raise UserError(f"--from {source}: no run with at least one step; record one with `sharpscope run`")
    made = figures_of(loaded)
    out.mkdir(parents=True, exist_ok=True)
    for name, figure in made.items():
        save(figure, out, name)
    typer.echo(f"{len(made)} figures (PNG and SVG). Written: {out}/")


def printable_lines(text: str) -> str:
    """Several lines without control characters."""
    return "\n".join(printable_line(line) for line in text.split("\n"))


def tokens(
    run: Annotated[Path, typer.Argument(help="A run's folder.")],
    step: Annotated[int, typer.Option(help="The step to look at.")],
    by: Annotated[
        str, typer.Option(help="A column of the tokens table; the largest by magnitude come first.")
    ] = "attribution",
    top: Annotated[int, typer.Option(min=1, help="How many tokens.")] = 20,
) -> None:
    """The tokens of a step that matter most, in their sentence, with their numbers.

    Example:

      sharpscope tokens runs/first --step 10 --by attribution --top 20
    """
    from rich.console import Console

    from sharpscope.analysis import render_tokens, token_decoder, top_tokens
    from sharpscope.traces import load_run

    loaded = load_run(run)
    chosen, everything = top_tokens(loaded, step, by, top)
    Console().print(render_tokens(chosen, everything, by, token_decoder(loaded), f"step {step}, by |{by}|"))


def spikes(
    run: Annotated[Path, typer.Argument(help="A run's folder.")],
    z: Annotated[
        float, typer.Option(help="Robust standard deviations of the log gradient norm above its running median.")
    ] = 4.0,
    top: Annotated[int, typer.Option(min=1, help="Tokens shown for each spike.")] = 8,
) -> None:
    """Gradient-norm spikes, and the tokens, prompts and probabilities that make them.

    Example:

      sharpscope spikes runs/first
    """
    from rich.console import Console

    from sharpscope.analysis import explain_spikes, render_spikes, token_decoder
    from sharpscope.traces import load_run

    loaded = load_run(run)
    found = explain_spikes(loaded, z, top, largest=1)
    if not found:
        typer.echo(
            f"no gradient norm is {z:g} robust standard deviations above its running median, and no attribution is recorded"
        )
        return
    if all(spike.z != spike.z for spike in found):  # NaN: not a spike
        typer.echo(f"no spike at z = {z:g}; the largest step with attribution instead:")
    Console().print(render_spikes(found, lambda step: loaded.tokens(steps=[step]), token_decoder(loaded)))


@contextmanager
def telling(first: str) -> Iterator[Callable[[str], None]]:
    """A function that says what is being done, `first` to begin with: one changing line on a terminal, else a line each."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        typer.echo(f"  {first}", err=True)
        yield lambda text: typer.echo(f"  {printable_line(text)}", err=True)
        return
    with console.status(first) as status:
        yield lambda text: status.update(printable_line(text))


def printable_line(text: str) -> str:
    """One line without control characters; model text may be in it."""
    return "".join(c if c.isprintable() else " " for c in text)
