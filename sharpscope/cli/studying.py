"""`study plan`, `study declare`, `study claims`: plan a study, freeze what it will test, and test it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from sharpscope.cli.console import (
    Json,
    Runs,
    print_json,
    print_sections,
    say,
)

if TYPE_CHECKING:
    from sharpscope.analysis.study import Study
    from sharpscope.config import ClaimsSpec

study = typer.Typer(
    name="study",
    help="Studies: what they can decide, rules and verdicts.",
    no_args_is_help=True,
)

BaselineOption = Annotated[
    str | None, Option(help="Baseline method. Default: the study's, or grpo.")
]
TreatmentOption = Annotated[
    str | None,
    Option(help="Method that the claims are about. Default: the study's, or what was run."),
]
ClaimOption = Annotated[
    list[str] | None, Option(help="Name of a claim, such as C7. Repeatable. Default: all.")
]

StudyOption = Annotated[
    Path | None, Option("--study", help="YAML file of the study, with its declaration.")
]


@study.command()
def plan(
    runs: Runs,
    claim: ClaimOption = None,
    baseline: BaselineOption = None,
    treatment: TreatmentOption = None,
    file: StudyOption = None,
) -> None:
    """How many paired seeds each claim needs, and what would help more, from the spread of two pairs of runs or more.

    A standard deviation is given with its 90 % interval, and the pairs at its upper end. A second table says what more prompts,
    questions or checkpoints would save, and what they cost. Margins are those of the study file, if it is given.

    Example:
      sharpscope study plan data/reference --claim C8
    """
    import pandas as pd

    from sharpscope.analysis.claims import judge
    from sharpscope.analysis.claims.registry import NOTE, OPTIONS_NOTE, options_of, powers_of
    from sharpscope.analysis.sections import Section

    laid_out = _study(runs, _terms(file, baseline, treatment), treatment, file)
    there = ", ".join(f"{method} ({len(laid_out.of(method))})" for method in laid_out.methods)
    text = f"runs: {there}; compared: {laid_out.treatment} against {laid_out.baseline}"
    verdicts, _ = judge(laid_out, claim)
    if rows := powers_of(verdicts):
        sections = [Section("", text), Section("What the claims need", pd.DataFrame(rows), NOTE)]
        if options := options_of(verdicts, laid_out):
            table = pd.DataFrame(options)
            sections.append(Section("What would help most", table, OPTIONS_NOTE))
    else:
        why = (
            laid_out.pairing().missing
            or "no claim asked for has a standard deviation; it takes two pairs or more"
        )
        sections = [Section("", f"{text}\n{why}")]
    print_sections(sections)


@study.command()
def declare(
    file: Annotated[
        Path, Argument(help="YAML file of the study; its section `claims` has the rules.")
    ],
    why: Annotated[str, Option(help="Reason of a change of rules that were declared.")] = "",
) -> None:
    """Freeze the rules of a study's claims with a date and a hash, before its runs.

    The radius of its sharpness probes is one of them, so that all runs share it.

    It writes study.declared.json next to study.yaml; commit both. `sharpscope study claims RUNS --study FILE` checks and
    quotes it.

    Example:
      sharpscope study declare experiments/studies/1/study.yaml
    """
    from sharpscope.analysis.claims.registry import declaration_file, declared_rules
    from sharpscope.analysis.claims.registry import declare as freeze

    what, changed = freeze(file, declared_rules(_terms(file), _radius(file, declaring=True)), why)
    for line in changed:
        say(f"  {line}")
    say(f"{file}: {what}. Written: {declaration_file(file)}")


@study.command()
def claims(
    runs: Runs,
    claim: ClaimOption = None,
    details: Annotated[
        bool, Option("--details", help="Print each claim's rule and remarks.")
    ] = False,
    baseline: BaselineOption = None,
    treatment: TreatmentOption = None,
    file: StudyOption = None,
    out: Annotated[Path | None, Option(help="Folder for claims.json and claims.md.")] = None,
    json: Json = False,
) -> None:
    """Test the published claims on runs. Verdicts: supported, refuted, inconclusive or untestable.

    Examples:
      sharpscope study claims data/reference
      sharpscope study claims runs/ --claim C7 --details --treatment gspo
      sharpscope study claims runs/study --study experiments/studies/1/study.yaml --out results
    """
    from sharpscope.analysis.claims import claim_names, judge
    from sharpscope.analysis.claims.registry import UNDECLARED, declared_rules, quote, write_claims

    names = claim_names(claim)
    declared = UNDECLARED
    laid_out = _study(runs, _terms(file, baseline, treatment), treatment, file)
    if file is not None:
        declared = quote(
            file,
            declared_rules(laid_out.terms, _radius(file)),
            laid_out.runs.values(),
        )
        say(declared, err=json)
    verdicts, checks = judge(laid_out, names)
    if json:
        found = [verdict.to_dict() for verdict in verdicts]
        print_json(
            {"declared": declared, "verdicts": found, "checks": [asdict(check) for check in checks]}
        )
    else:
        for verdict in (v for one in verdicts for v in one.versions):
            lines = [verdict.line(), *(f"  {line}" for line in verdict.details() if details)]
            say("\n".join(lines))
        if checks:
            say("\n".join(["checks of the recording:", *(check.line() for check in checks)]))
    if out is not None:
        files = write_claims(verdicts, out, checks, declared)
        say(f"{len(files)} files. Written: {out}/ (open {files[1]})", err=json)


def _terms(
    file: Path | None,
    baseline: str | None = None,
    treatment: str | None = None,
) -> ClaimsSpec:
    """The rules of a study file, or the default ones, with the methods asked for."""
    from sharpscope.analysis.claims.registry import check_terms
    from sharpscope.config import ClaimsSpec
    from sharpscope.sweeps import read_sweep

    terms = ClaimsSpec() if file is None else read_sweep(file).claims
    check_terms(terms)
    methods = {"baseline": baseline, "treatment": treatment}
    return terms.model_copy(update={name: value for name, value in methods.items() if value})


def _study(paths: list[Path], terms: ClaimsSpec, treatment: str | None, file: Path | None) -> Study:
    """The runs laid out; without a treatment asked for or declared, the method that was run is compared."""
    from sharpscope.analysis import nothing_found
    from sharpscope.analysis.claims import study_of
    from sharpscope.errors import UserError
    from sharpscope.traces import load_runs

    loaded = load_runs(paths)
    if not len(loaded):
        raise UserError(nothing_found(paths, loaded))
    asked = treatment or (terms.treatment if file is not None else None)
    return study_of(loaded, terms.baseline, asked, terms=terms)


def _radius(file: Path, declaring: bool = False) -> float | None:
    """The radius of a study's sharpness of the expected failure; None where it is not probed, or (not `declaring`) not fixed."""
    from sharpscope.errors import UserError
    from sharpscope.sweeps import plan_sweep, read_sweep

    configs = [run.config for run in plan_sweep(read_sweep(file))]
    # What is recorded by default binds no study; a loss that the study names does.
    radii = {
        config.probes.rho
        for config in configs
        if "functionals" in config.probes.model_fields_set
        and "expected_failure" in config.probes.functionals
    }
    if len(radii) == 1 and "auto" not in radii:
        return float(radii.pop())
    # A default run chooses a radius of its own; its sharpness is not compared between runs.
    chosen = any("functionals" in config.probes.model_fields_set for config in configs)
    if radii and chosen and declaring:
        found = ", ".join(map(str, sorted(radii, key=str)))
        raise UserError(
            f"probes.rho: {found}; all runs need one radius, such as that of the row `radius` of a pilot run"
        )
    return None
