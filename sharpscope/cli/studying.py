"""`study plan`, `study declare`, `study claims`: plan a study, freeze what it will test, and test it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sharpscope.cli.console import printable

if TYPE_CHECKING:
    from sharpscope.analysis.study import Terms
    from sharpscope.config import ClaimsSpec
    from sharpscope.traces import Runs

study = typer.Typer(
    name="study", help="Studies: what they can decide, their rules, and verdicts.", no_args_is_help=True
)

BaselineOption = Annotated[str | None, typer.Option(help="Baseline method. Default: the study's, or grpo.")]
TreatmentOption = Annotated[
    str | None,
    typer.Option(help="Method that the claims are tested for. Default: the study's, grpo-sg, or what was run."),
]
ClaimOption = Annotated[list[str] | None, typer.Option(help="Name of a claim, such as C7. Repeatable. Default: all.")]


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    study.command("plan")(plan)
    study.command("declare")(declare)
    study.command("claims")(claims)
    app.add_typer(study)


def plan(
    runs: Annotated[list[Path] | None, typer.Argument(help="Runs that exist: run folders, or folders of runs.")] = None,
    file: Annotated[Path | None, typer.Option("--study", help="YAML file of the planned study.")] = None,
    baseline_accuracy: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="Without runs: accuracy of the baseline, such as 0.25.")
    ] = None,
    answers: Annotated[int, typer.Option(min=1, help="Answers of one evaluation: prompts × samples.")] = 2000,
    claim: ClaimOption = None,
    baseline: BaselineOption = None,
    treatment: TreatmentOption = None,
) -> None:
    """How many paired seeds each claim needs, from two runs or more, or from a baseline's accuracy alone.

    A standard deviation is given with its 90 % interval, and the pairs at its upper end.

    Examples:
      sharpscope study plan --baseline-accuracy 0.25 --answers 2000

      sharpscope study plan data/reference --claim C7

      sharpscope study plan --study experiments/studies/1/study.yaml
    """
    from rich.console import Console

    from sharpscope.analysis.claims import claim_names, read, study_of, verdicts_of
    from sharpscope.analysis.power import (
        NOTE,
        answers_of_pair,
        planned,
        power_table,
        powers_of,
        powers_of_answers,
    )
    from sharpscope.analysis.sections import Section, to_terminal
    from sharpscope.errors import UserError

    if not runs and file is None and baseline_accuracy is None:
        raise UserError("study plan: give runs, a planned study with --study, or --baseline-accuracy and --answers")
    names = claim_names(claim)
    spec, configs = _planned(file)
    terms = terms_of(spec)
    methods = baseline or spec.baseline, treatment or (spec.treatment if file is not None else None)
    lines = planned(configs, terms, methods[0], methods[1] or "grpo-sg") if configs else []
    powers, deviation = [], None
    if runs:
        laid_out = study_of(_loaded(runs), *methods, terms=terms)
        listed = ", ".join(f"{method} ({len(laid_out.of(method))})" for method in laid_out.methods)
        lines.append(f"runs: {listed}; compared: {laid_out.treatment} against {laid_out.baseline}")
        read(laid_out, names)
        powers = powers_of(verdicts_of(laid_out, names))
        deviation = answers_of_pair(laid_out)
        if deviation is not None:
            lines.append(
                f"sampling answers alone gives a pair's difference of accuracy an SD of {100 * deviation[0]:.2g} points ({deviation[1]})"
            )
        if not powers:
            lines.append(
                laid_out.pairing().missing or "one pair has no spread: two pairs or more give a standard deviation"
            )
    if baseline_accuracy is not None:
        powers += powers_of_answers(baseline_accuracy, answers, terms)
    elif deviation is not None and not any(power.claim.startswith("C7 (between") for power in powers):
        powers += powers_of_answers(0.5, 0.5 / deviation[0] ** 2, terms)
    powers = [power for power in powers if power.claim.split()[0] in names]
    for line in lines:
        typer.echo(printable(line))
    if powers:
        Console().print(to_terminal([Section("What the claims need", power_table(powers), NOTE)]))


def declare(
    file: Annotated[Path, typer.Argument(help="YAML file of the study; its section `claims` has the rules.")],
    why: Annotated[
        str, typer.Option(help="Reason of a change; needed if the study was declared with other rules.")
    ] = "",
) -> None:
    """Freeze the rules of a study's claims with a date and a hash, before its runs.

    Written is study.declared.json beside study.yaml, to be committed. `sharpscope study claims RUNS --study FILE` checks and
    quotes it.

    Example:
      sharpscope study declare experiments/studies/1/study.yaml
    """
    from datetime import UTC, datetime

    from sharpscope import __version__
    from sharpscope.analysis.claims.declaration import declare as freeze
    from sharpscope.analysis.claims.declaration import declared_rules
    from sharpscope.sweeps import read_sweep

    spec = read_sweep(file).claims
    rules = declared_rules(terms_of(spec), spec.baseline, spec.treatment)
    declared = freeze(file, rules, datetime.now(UTC).isoformat(timespec="seconds"), __version__, why)
    for line in declared.changed:
        typer.echo(f"  {printable(line)}")
    what = "declared" if declared.new else ("changed" if declared.changed else "unchanged since it was declared")
    typer.echo(f"{file}: {what}; SHA-256 {declared.hash}. Written: {declared.file}")


def claims(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or folders of runs.")],
    claim: ClaimOption = None,
    details: Annotated[
        bool, typer.Option("--details", help="Print statistic, intervals, rule and remarks of each claim.")
    ] = False,
    baseline: BaselineOption = None,
    treatment: TreatmentOption = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "--study",
            help="YAML file of the study: its margins, level and order are used, its declaration is checked and quoted.",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for claims.json and claims.md.")] = None,
) -> None:
    """Test the published claims on runs. Verdicts: supported, refuted, inconclusive or untestable.

    Examples:
      sharpscope study claims data/reference

      sharpscope study claims runs/ --claim C7 --details --treatment gspo

      sharpscope study claims runs/study --study experiments/studies/1/study.yaml --out results
    """
    from sharpscope.analysis.claims import checks_of, claim_names, read, study_of, verdicts_of
    from sharpscope.analysis.claims.declaration import declared_rules, quote
    from sharpscope.analysis.claims.writers import UNDECLARED, write_claims
    from sharpscope.sweeps import read_sweep

    names = claim_names(claim)
    spec = _spec(None if file is None else read_sweep(file).claims)
    terms = terms_of(spec)
    loaded = _loaded(runs)
    asked = treatment or (spec.treatment if file is not None else None)
    laid_out = study_of(loaded, baseline or spec.baseline, asked, terms=terms)
    declared = UNDECLARED
    if file is not None:
        declared = quote(file, declared_rules(terms, laid_out.baseline, laid_out.treatment), loaded)
        typer.echo(printable(declared))
    read(laid_out, names)
    verdicts, checks = verdicts_of(laid_out, names), checks_of(laid_out, names)
    for verdict in (v for one in verdicts for v in one.versions):
        lines = [verdict.line().split("\n")[0], *(f"  {line}" for line in verdict.details() if details)]
        typer.echo("\n".join(printable(line) for line in lines))
    if checks:
        typer.echo("checks of the recording:")
    for check in checks:
        typer.echo(printable(check.line()))
    if out is not None:
        files = write_claims(verdicts, out, checks, declared)
        typer.echo(f"{len(files)} files. Written: {out}/ (open {files[1]})")


def _loaded(paths: list[Path]) -> Runs:
    from sharpscope.analysis import load_several, nothing_found
    from sharpscope.errors import UserError

    loaded = load_several(paths)
    if not len(loaded):
        raise UserError(nothing_found(paths, loaded))
    return loaded


def _spec(spec: ClaimsSpec | None) -> ClaimsSpec:
    from sharpscope.config import ClaimsSpec

    return ClaimsSpec() if spec is None else spec


def _planned(file: Path | None) -> tuple[ClaimsSpec, dict[str, dict[str, object]]]:
    """The rules of a study file and the configurations of its runs, with the methods' labels."""
    from sharpscope.config import method_label
    from sharpscope.sweeps import plan_sweep, read_sweep

    if file is None:
        return _spec(None), {}
    sweep, configs = read_sweep(file), {}
    for run in plan_sweep(sweep):
        config = run.config.model_dump(mode="json")
        config["method"]["name"] = method_label(run.config.method)  # as in the run's folder
        configs[run.name] = config
    return sweep.claims, configs


def terms_of(spec: ClaimsSpec) -> Terms:
    """The terms of a study's claims.

    Raises:
        UserError: a claim does not exist or has no margin.
    """
    from sharpscope.analysis.claims.declaration import check_terms
    from sharpscope.analysis.study import Terms

    terms = Terms(spec.level, spec.order, spec.margins, spec.least_rotation)
    check_terms(terms)
    return terms
