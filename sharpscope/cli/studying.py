"""`power`, `study declare`: plan a study and freeze what it will test."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sharpscope.cli.console import printable, progress

if TYPE_CHECKING:
    from sharpscope.analysis.terms import Terms
    from sharpscope.config import ClaimsSpec

study = typer.Typer(name="study", help="Study files: sweeps with the rules of their claims.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    app.command("power")(power)
    study.command("declare")(declare)
    app.add_typer(study)


def power(
    runs: Annotated[list[Path] | None, typer.Argument(help="Pilot runs: run folders, or folders of runs.")] = None,
    study: Annotated[
        Path | None, typer.Option(help="YAML file of a planned study; says what it can decide, before any compute.")
    ] = None,
    claim: Annotated[
        list[str] | None, typer.Option(help="Name of a claim, such as C7. Repeatable. Default: all.")
    ] = None,
    baseline: Annotated[str | None, typer.Option(help="Baseline method. Default: the study's, or grpo.")] = None,
    treatment: Annotated[str | None, typer.Option(help="Treatment. Default: the study's, or grpo-sg.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for power.json, power.csv and the figure.")] = None,
) -> None:
    """Power of the claims: how many seeds, answers and prompts they need, from pilot runs, and what that costs.

    For each claim: the components of the variance, the chance of `supported` with an effect at the margin and of `refuted` without
    an effect, and the cheapest size that reaches 80 and 90 % of both.

    Examples:
      sharpscope power data/reference --claim C7

      sharpscope power --study experiments/studies/1/study.yaml

      sharpscope power runs/pilot --study experiments/studies/1/study.yaml --out power
    """
    from sharpscope.analysis import load_several, nothing_found
    from sharpscope.analysis.claims import claim_names
    from sharpscope.analysis.outlook import outlook
    from sharpscope.analysis.power import power_of, power_text, write_power
    from sharpscope.config import ClaimsSpec, method_label
    from sharpscope.errors import UserError
    from sharpscope.sweeps import plan_sweep, read_sweep

    if not runs and study is None:
        raise UserError("power: give pilot runs, or a planned study with --study")
    names = claim_names(claim)
    sweep = None if study is None else read_sweep(study)
    spec = ClaimsSpec() if sweep is None else sweep.claims
    terms = terms_of(spec)
    methods = baseline or spec.baseline, treatment or spec.treatment
    powers = []
    if runs:
        loaded = load_several(runs)
        if not len(loaded):
            raise UserError(nothing_found(runs, loaded))
        with progress("computing power") as update:
            update("reading tokens")
            powers = power_of(loaded, names, baseline=methods[0], treatment=methods[1], terms=terms)
    if sweep is not None:
        configs = {}
        for run in plan_sweep(sweep):
            config = run.config.model_dump(mode="json")
            config["method"]["name"] = method_label(run.config.method)  # as in the run's folder
            configs[run.name] = config
        for line in outlook(configs, terms, *methods, powers):
            if line.claim in names:
                typer.echo(printable(line.line()))
    if powers:
        typer.echo("\n".join(printable(line) for line in power_text(powers).split("\n")))
        if out is not None:
            typer.echo(f"{len(write_power(powers, out))} files. Written: {out}/")


def declare(
    file: Annotated[Path, typer.Argument(help="YAML file of the study; its section `claims` has the rules.")],
    why: Annotated[
        str, typer.Option(help="Reason of a change; needed if the study was declared with other rules.")
    ] = "",
) -> None:
    """Freeze the rules of a study's claims with a date and a hash, before its runs.

    Written is study.declared.json beside study.yaml, to be committed. `sharpscope claims RUNS --study FILE` checks and quotes it.

    Example:
      sharpscope study declare experiments/studies/1/study.yaml
    """
    from datetime import UTC, datetime

    from sharpscope import __version__
    from sharpscope.analysis.claims import declare as freeze
    from sharpscope.analysis.claims import declared_rules
    from sharpscope.sweeps import read_sweep

    spec = read_sweep(file).claims
    rules = declared_rules(terms_of(spec), spec.baseline, spec.treatment)
    declared = freeze(file, rules, datetime.now(UTC).isoformat(timespec="seconds"), __version__, why)
    for line in declared.changed:
        typer.echo(f"  {printable(line)}")
    what = "declared" if declared.new else ("changed" if declared.changed else "unchanged since it was declared")
    typer.echo(f"{file}: {what}; SHA-256 {declared.hash}. Written: {declared.file}")


def terms_of(spec: ClaimsSpec) -> Terms:
    """The terms of a study's claims.

    Raises:
        UserError: a claim does not exist or has no margin.
    """
    from sharpscope.analysis.claims import check_terms
    from sharpscope.analysis.terms import Terms

    terms = Terms(spec.level, spec.order, spec.margins, spec.least_rotation)
    check_terms(terms)
    return terms
