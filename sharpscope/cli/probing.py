"""`sharpscope probe`: probes of a causal language model on given texts, or of the checkpoints of a run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from sharpscope.cli.console import check_empty

if TYPE_CHECKING:
    import pandas as pd

    from sharpscope.analysis.figures import Picture
    from sharpscope.config.probes import ProbesSpec
    from sharpscope.policy import Policy
    from sharpscope.probes import DataRow, Estimate

PARTS = ("curvature", "perturbation", "tokens")


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    app.command("probe")(probe)


def probe(
    run: Annotated[
        Path | None, typer.Argument(help="Folder of a run, to probe its checkpoints on its probe set.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="embedded:NAME, a model folder, or a hub id.")] = None,
    data: Annotated[Path | None, typer.Option(help="JSONL or Parquet with prompt and completion (and reward).")] = None,
    tokens: Annotated[
        Path | None,
        typer.Option(help="Folder of an imported run: measure its tokens' score norms and attribution at --model."),
    ] = None,
    steps: Annotated[str | None, typer.Option(help="Comma-separated steps of --tokens. Default: all.")] = None,
    probes: Annotated[
        str | None,
        typer.Option(help="Comma-separated: curvature, perturbation, tokens (only with --model). Default: all."),
    ] = None,
    functional: Annotated[
        list[str] | None,
        typer.Option(
            help="Loss to probe: nll (default for --model), surrogate or expected_failure (these need rewards). Repeatable."
        ),
    ] = None,
    all_checkpoints: Annotated[
        bool, typer.Option("--all-checkpoints", help="Probe every checkpoint of the run, not only the last.")
    ] = False,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Any field of `probes` as name=value, such as preset=full or check=off (no self-check). Repeatable.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of every random vector.")] = 0,
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads. Default: those of the run or the machine.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Output folder for tables and figures.")] = Path("probe"),
) -> None:
    """Probe a model: curvature, sharpness under perturbations and score norms of tokens.

    Examples:
      sharpscope probe --model embedded:knights_knaves --data completions.jsonl --out probe

      sharpscope probe runs/first --all-checkpoints

      sharpscope probe --tokens runs/imported --model checkpoints/step-100 --steps 100 --out runs/probed
    """
    from sharpscope import analysis
    from sharpscope.config import parse_overrides
    from sharpscope.config.probes import ObjectiveName
    from sharpscope.errors import UserError, nearest

    objectives = get_args(ObjectiveName)
    parts = _parts(run, probes)
    for name in functional or []:
        if name not in objectives:
            raise UserError(f"--functional {name}: unknown{nearest(name, objectives)}")
    check_empty(out)
    if tokens is not None:
        if run is not None or model is None or data is not None or functional or probes or all_checkpoints:
            raise UserError("--tokens: goes with --model, --steps, --set, --threads and --out alone")
        _trace(tokens, model, steps, _spec(parse_overrides(set_ or [])), threads, out)
        return
    if steps is not None:
        raise UserError("--steps: goes with --tokens")
    if (run is None) == (model is None):
        raise UserError("probe: give a run's folder, or --model with --data")
    if run is not None and data is not None:
        raise UserError("--data: goes with --model; a run is probed on its own probe set")
    if run is None and all_checkpoints:
        raise UserError("--all-checkpoints: goes with a run's folder, not with --model")
    values = parse_overrides(set_ or []) | ({"functionals": functional} if functional else {})
    spec = _spec(values)
    if not spec.functionals:
        raise UserError(f"--set functionals=[]: names nothing; choose from {', '.join(objectives)}")
    estimates: pd.DataFrame | None
    if run is not None:
        estimates = _checkpoints(run, spec, seed, all_checkpoints, parts, threads)
    else:
        if data is None:
            raise UserError("probe --model: needs --data, a JSONL or Parquet file of prompts and completions")
        # The default of the spec needs rewards, which a file of texts need not have.
        functionals: list[str] = [*spec.functionals] if "functionals" in values else ["nll"]
        estimates = _model(str(model), data, spec, seed, functionals, parts, out, threads)
    out.mkdir(parents=True, exist_ok=True)
    if estimates is not None:
        estimates.to_parquet(out / "probes.parquet", index=False)
        _show(estimates)
        _save(analysis.probe_pictures(estimates), out)
    tables = sorted(path.name for path in out.glob("*.parquet"))
    typer.echo(f"written: {out}/ ({', '.join(tables)}, pictures)")


def _parts(run: Path | None, probes: str | None) -> list[str]:
    """The parts that --probes names; by default all, without the tokens of a run, which records them itself."""
    from sharpscope.errors import UserError, nearest

    if probes is None:
        return [part for part in PARTS if run is None or part != "tokens"]
    parts = [part.strip() for part in probes.split(",") if part.strip()]
    for part in parts:
        if part not in PARTS:
            raise UserError(f"--probes {part}: unknown{nearest(part, PARTS)}")
    if not parts:
        raise UserError(f"--probes: names nothing; choose from {', '.join(PARTS)}")
    if run is not None and "tokens" in parts:
        raise UserError(
            f"--probes {probes}: a run's token gradients are in its tokens table, see `sharpscope tokens {run} --step S`; "
            "leave tokens out"
        )
    return parts


def _spec(values: dict[str, Any]) -> ProbesSpec:
    """The settings of the probes, with these values set."""
    from sharpscope.config import check_keys, validate
    from sharpscope.config.probes import ProbesSpec

    values = {"preset": "standard", "curvature_prompts": 0} | values
    check_keys(ProbesSpec, values)
    spec: ProbesSpec = validate(ProbesSpec, values)
    return spec


def _model(
    model: str,
    data: Path,
    spec: ProbesSpec,
    seed: int,
    functionals: list[str],
    parts: list[str],
    out: Path,
    threads: int | None,
) -> pd.DataFrame | None:
    """The probes table; None if only tokens are requested."""
    from sharpscope.policy import PolicySpec, load_policy
    from sharpscope.probes import probe_policy, read_rows
    from sharpscope.recording.environment import set_threads

    set_threads(threads, model)
    rows = read_rows(data)
    policy = load_policy(PolicySpec(model=model))
    if parts == ["tokens"]:
        _write_tokens(policy, rows, spec, out)
        return None
    report = probe_policy(
        policy,
        rows,
        spec,
        functionals=functionals,  # type: ignore[arg-type]
        seed=seed,
        label=data.stem,
        curvature="curvature" in parts,
        perturbation="perturbation" in parts,
    )
    for problem in report.problems:
        typer.echo(f"  not reliable: {problem}", err=True)
    if "tokens" in parts:
        _write_tokens(policy, rows, spec, out)
    return report.frame()


def _trace(tokens: Path, model: str, steps: str | None, spec: ProbesSpec, threads: int | None, out: Path) -> None:
    """Copy an imported run with score norms and attribution at the weights of `model`."""
    from sharpscope.errors import UserError
    from sharpscope.policy import PolicySpec, load_policy
    from sharpscope.recording.environment import set_threads
    from sharpscope.recording.from_checkpoint import Probed, probe_trace
    from sharpscope.traces import load_run

    try:
        chosen = None if steps is None else [int(step) for step in steps.split(",")]
    except ValueError:
        raise UserError(f"--steps {steps}: not whole numbers, comma-separated; write for example 10,20") from None
    run = load_run(tokens)
    set_threads(threads, model)

    def tell(probed: Probed) -> None:
        """Print what was measured of a step."""
        shares = "norms and shares" if probed.attributed else "norms (no loss_coef, so no shares)"
        typer.echo(
            f"step {probed.step}: {shares} of {probed.tokens} tokens; |ln π − recorded| {probed.logp_gap:.2g} nats"
        )

    probe_trace(run, load_policy(PolicySpec(model=model)), out, steps=chosen, check=spec.check, on_step=tell)
    typer.echo(f"Written: {out}/ (try: sharpscope tokens {out} --spikes)")


def _write_tokens(policy: Policy, rows: Sequence[DataRow], spec: ProbesSpec, out: Path) -> None:
    from sharpscope import analysis
    from sharpscope.probes import token_norms

    tokens = token_norms(policy, rows, spec)
    out.mkdir(parents=True, exist_ok=True)
    tokens.to_parquet(out / "tokens.parquet", index=False)
    norms = tokens["score_norm_local"]
    typer.echo(
        f"{len(tokens)} completion tokens: score norm ‖∇ ln π‖ (local tier) median {norms.median():.3g}, largest {norms.max():.3g}"
    )
    _save([analysis.token_picture(tokens)], out)


def _checkpoints(
    run: Path, spec: ProbesSpec, seed: int, every: bool, parts: list[str], threads: int | None
) -> pd.DataFrame:
    import pandas as pd

    from sharpscope.config import build_config
    from sharpscope.errors import UserError
    from sharpscope.policy import load_policy
    from sharpscope.probes import frame, probe_set_batches
    from sharpscope.probes import run as run_probes
    from sharpscope.recording import Drawer, run_probe_set
    from sharpscope.recording.environment import set_threads
    from sharpscope.tasks import make_task
    from sharpscope.training.checkpoint import checkpoints

    if not run.is_dir():
        raise UserError(f"run '{run}': no such folder; give the folder that holds its run.json")
    config = build_config(run / "config.yaml", values={"out": str(run.parent), "name": run.name})
    saved = checkpoints(run)
    if not saved:
        raise UserError(f"run '{run}' has no checkpoint to probe")
    set_threads(config.threads if threads is None else threads, config.policy.model)
    task = make_task(config.task)
    probe_set = run_probe_set(config, task)
    if "curvature" not in parts:
        spec = spec.model_copy(update={"gradient_samples": 0})
    frames = []
    for folder in saved if every else saved[-1:]:
        step = int(folder.name.removeprefix("step-"))
        policy = load_policy(config.policy.model_copy(update={"model": str(folder)}))
        drawer = Drawer(config, policy, task)
        typer.echo(f"  step {step}", err=True)
        batches = probe_set_batches(
            probe_set,
            spec,
            drawer,
            temperature=config.rollout.temperature,
            seed=lambda part: seed,
            slices=probe_set.splits,
        )
        rows: list[Estimate] = []
        for measured in run_probes(
            policy.model, batches, spec, curvature="curvature" in parts, perturbation="perturbation" in parts
        ):
            for problem in measured.problems:
                typer.echo(f"  not reliable: step {step}: {problem}", err=True)
            rows += measured.estimates
        frames.append(frame(rows, step))
    return pd.concat(frames, ignore_index=True)


def _show(estimates: pd.DataFrame) -> None:
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text

    from sharpscope.analysis.figures import split_of
    from sharpscope.probes.hessian import t_interval

    derived = estimates["quantity"].eq("density") | estimates["quantity"].str.startswith("slice")
    shown = estimates[~derived & ~estimates["quantity"].str.endswith("_ratio") & (estimates["parameters"] == "all")]
    shown = shown.assign(split=shown["probe_set"].map(split_of))
    # Print labels on lines of their own, so that the numbers fit a narrow terminal.
    places = [name for name in ("step", "functional", "split") if shown[name].nunique() > 1] or ["split"]
    quantity = Column("quantity", no_wrap=True)
    table = Table(
        quantity, "rho", "value", "± s.e.", "± prompts", "residual", "conv.", box=SIMPLE, padding=(0, 1, 0, 0)
    )
    for group, rows in shown.groupby(places, sort=False):
        table.add_section()
        named = (f"step {part}" if name == "step" else str(part) for name, part in zip(places, group, strict=True))
        table.add_row(Text(", ".join(named), style="bold"))
        for row in rows.to_dict("records"):
            numbers = [
                "–" if row[name] is None or row[name] != row[name] else f"{row[name]:.{digits}g}"
                for name, digits in (
                    ("rho", 3),
                    ("value", 4),
                    ("std_error", 2),
                    ("prompt_std_error", 2),
                    ("residual", 2),
                )
            ]
            converged = {True: "yes", False: "NO"}.get(row["converged"], "–")
            table.add_row(Text(row["quantity"]), *numbers, converged)
            if row["quantity"].endswith("trace") and row["std_error"] == row["std_error"]:
                low, high = t_interval(row["value"], row["std_error"], int(row["samples"]))
                table.add_row(
                    Text(f"  95 % (t, {int(row['samples']) - 1} d.f.)"), "", f"{low:.4g} to {high:.4g}", "", "", "", ""
                )
    Console().print(table)


def _save(pictures: Iterable[Picture], out: Path) -> None:
    from sharpscope.analysis.figures import save

    for picture in pictures:
        if picture.figure is not None:
            save(picture.figure, out, picture.name)
