"""`show`, `compare`, `claims`, `figures`, `tokens`, `spikes`: inspect traces."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sharpscope.cli.console import printable


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    app.command("show")(show)
    app.command("compare")(compare)
    app.command("claims")(claims)
    app.command("figures")(figures)
    app.command("tokens")(tokens)
    app.command("spikes")(spikes)


def show(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
) -> None:
    """Summarize a run: settings, curves, last evaluation, events, weights and cost.

    Example:
      sharpscope show runs/first
    """
    from rich.console import Console

    from sharpscope.analysis import show as render
    from sharpscope.traces import load_run

    Console().print(render(load_run(run)))


def compare(
    first: Annotated[Path, typer.Argument(help="Folder of a run.")],
    second: Annotated[Path, typer.Argument(help="Folder of another run.")],
) -> None:
    """Compare the settings and the results of two runs, with intervals.

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
        list[str] | None, typer.Option(help="Name of a claim, such as C7. Repeatable. Default: all.")
    ] = None,
    details: Annotated[
        bool, typer.Option("--details", help="Print statistic, interval, rule, confounders and data of each claim.")
    ] = False,
    baseline: Annotated[str | None, typer.Option(help="Baseline method. Default: the study's, or grpo.")] = None,
    treatment: Annotated[
        str | None, typer.Option(help="Method that the claims are tested for. Default: the study's, or grpo-sg.")
    ] = None,
    study: Annotated[
        Path | None,
        typer.Option(
            help="YAML file of the study: its margins, level and order are used, its declaration is checked and quoted."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for claims.json, claims.md and tables of the paper's settings and of all settings."),
    ] = None,
) -> None:
    """Test the published claims on runs. Verdicts: supported, refuted, inconclusive or untestable.

    Examples:
      sharpscope claims runs/

      sharpscope claims runs/ --claim C7 --details --treatment gspo

      sharpscope claims data/reference --out experiments/studies/1/results

      sharpscope claims runs/study --study experiments/studies/1/study.yaml
    """
    from sharpscope.analysis import load_several, nothing_found
    from sharpscope.analysis.claims import (
        UNDECLARED,
        declared_rules,
        quote,
        study_of,
        test_claims,
        verdict_text,
        write_claims,
    )
    from sharpscope.analysis.tables import endpoint_tables, paper_tables, write_tables
    from sharpscope.cli.studying import terms_of
    from sharpscope.config import ClaimsSpec
    from sharpscope.errors import UserError
    from sharpscope.sweeps import read_sweep

    loaded = load_several(runs)
    if not len(loaded):
        raise UserError(nothing_found(runs, loaded))
    spec = ClaimsSpec() if study is None else read_sweep(study).claims
    terms, methods = terms_of(spec), (baseline or spec.baseline, treatment or spec.treatment)
    declared = UNDECLARED
    if study is not None:
        declared = quote(study, declared_rules(terms, *methods), loaded)
        typer.echo(printable(declared))
    verdicts = test_claims(loaded, claim, baseline=methods[0], treatment=methods[1], terms=terms)
    for verdict in verdicts:
        text = verdict_text(verdict) if details else verdict.line()
        typer.echo("\n".join(map(printable, text.split("\n"))))
    if out is not None:
        files = write_claims(verdicts, out, declared)
        laid_out = study_of(loaded, *methods)
        files += write_tables([*paper_tables(laid_out), *endpoint_tables(laid_out)], out)
        typer.echo(f"{len(files)} files. Written: {out}/ (open {files[1]})")


def figures(
    source: Annotated[Path, typer.Option("--from", help="Run folders, or a folder of runs.")],
    out: Annotated[Path, typer.Option(help="Output folder.")] = Path("figures"),
) -> None:
    """Plot all figures of runs and claims: the main ones into paper/ with captions, the others into supplement/.

    Example:
      sharpscope figures --from data/reference --out figures
    """
    from sharpscope.analysis import write_figures
    from sharpscope.errors import UserError
    from sharpscope.traces import load_runs

    loaded = load_runs(source)
    if not any(len(run.steps) for run in loaded):
        raise UserError(f"--from {source}: no run with at least one step; record one with `sharpscope run`")
    written = write_figures(loaded, out)
    counts = " and ".join(f"{len(files)} in {out}/{folder}/" for folder, files in written.items())
    typer.echo(f"figures (PNG and SVG): {counts}")


def tokens(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
    step: Annotated[
        int | None, typer.Option(help="Step of the run. Default: the recorded one with the largest gradient norm.")
    ] = None,
    by: Annotated[
        str, typer.Option(help="Column of the tokens table to sort by, in descending magnitude.")
    ] = "attribution",
    top: Annotated[int, typer.Option(min=1, help="Number of tokens.")] = 20,
) -> None:
    """List the top tokens of a step with their context and numbers.

    Example:
      sharpscope tokens runs/first

      sharpscope tokens runs/first --step 10 --by score_norm --top 20
    """
    from rich.console import Console

    from sharpscope.analysis import largest_recorded_step, render_tokens, token_decoder, tokens_title, top_tokens
    from sharpscope.traces import load_run

    loaded = load_run(run)
    step = largest_recorded_step(loaded, by) if step is None else step
    selected, all_tokens = top_tokens(loaded, step, by, top)
    title = tokens_title(step, by, all_tokens)
    Console().print(render_tokens(selected, all_tokens, by, token_decoder(loaded), title))


def spikes(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
    z: Annotated[
        float,
        typer.Option(help="Threshold: robust standard deviations of the log gradient norm above its running median."),
    ] = 4.0,
    top: Annotated[int, typer.Option(min=1, help="Number of tokens per spike.")] = 8,
) -> None:
    """List gradient-norm spikes with the tokens, prompts and probabilities that contribute most.

    Example:
      sharpscope spikes runs/first
    """
    from rich.console import Console

    from sharpscope.analysis import explain_spikes, recorded_by, render_spikes, token_decoder
    from sharpscope.traces import load_run

    loaded = load_run(run)
    explained = explain_spikes(loaded, z, top, largest=1)
    if not explained:
        typer.echo(
            f"no gradient norm is {z:g} robust standard deviations above its running median, and no attribution is recorded"
        )
        return
    if all(spike.z != spike.z for spike in explained):  # NaN: not a spike
        typer.echo(f"no spike at z = {z:g} (a spike needs ten earlier steps with a gradient)")
        norms = loaded.steps.set_index("step")["grad_norm"].dropna().astype(float)
        if norms.max() > explained[0].grad_norm:
            typer.echo(
                f"the largest gradient norm, {norms.max():.3g} at step {norms.idxmax()}, has no attribution"
                + recorded_by(loaded, "recording.token_gradients_every")
            )
        typer.echo("showing the step with the largest gradient norm and attribution:")
    Console().print(render_spikes(explained, lambda step: loaded.tokens(steps=[step]), token_decoder(loaded)))
