"""`sharpscope probe`: probes of causal language models on given texts, or of the checkpoints of a run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from sharpscope.cli.console import check_empty, printable

if TYPE_CHECKING:
    import pandas as pd

    from sharpscope.analysis.figures import Picture
    from sharpscope.config.probes import ProbesSpec
    from sharpscope.policy import Policy
    from sharpscope.probes import DataRow, Measured

PARTS = ("curvature", "perturbation", "tokens")
WHOLE = 128  # prompts on which curvature is computed by default


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    app.command("probe")(probe)


def probe(
    run: Annotated[
        Path | None, typer.Argument(help="Folder of a run, to probe its checkpoints on its probe set.")
    ] = None,
    model: Annotated[
        list[str] | None, typer.Option(help="embedded:NAME, a model folder, or a hub id. Repeatable, side by side.")
    ] = None,
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
    backend: Annotated[str, typer.Option(help="Eigenvalues and trace by lanczos, or by pyhessian.")] = "lanczos",
    force: Annotated[
        bool, typer.Option("--force", help="Accept a --model that does not fit the run of --tokens.")
    ] = False,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="Any field of `probes` as name=value, such as rho=0.05 or check=off. Repeatable."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of every random vector.")] = 0,
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads. Default: those of the run or the machine.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for tables and figures. Default: probe, or RUN-probe beside the run.")
    ] = None,
) -> None:
    """Probe a model: curvature, sharpness under perturbations and score norms of tokens.

    Examples:
      sharpscope probe --model embedded:knights_knaves --data completions.jsonl --out probe

      sharpscope probe runs/first --all-checkpoints

      sharpscope probe --tokens runs/imported --model checkpoints/step-100 --steps 100 --out runs/probed
    """
    from sharpscope.config import parse_overrides
    from sharpscope.config.probes import Backend, ObjectiveName
    from sharpscope.errors import UserError, nearest
    from sharpscope.traces import free_name

    parts = _parts(run, probes)
    for option, given, valid in (
        ("--functional", functional or [], get_args(ObjectiveName)),
        ("--backend", [backend], get_args(Backend)),
    ):
        for name in given:
            if name not in valid:
                raise UserError(f"{option} {name}: unknown{nearest(name, valid)}")
    values = parse_overrides(set_ or []) | ({"functionals": functional} if functional else {})
    spec = _spec(values)
    if tokens is not None:
        if run is not None or len(model or []) != 1 or data is not None or functional or probes or all_checkpoints:
            raise UserError("--tokens: goes with one --model, --steps, --set, --force, --threads and --out alone")
        out = free_name(f"{tokens}-probed") if out is None else out
        check_empty(out)
        _trace(tokens, model[0], steps, spec, threads, out, force)  # type: ignore[index]
        return
    if steps is not None or force:
        raise UserError(f"--{'force' if force else 'steps'}: goes with --tokens")
    if (run is None) == (not model):
        raise UserError("probe: give a run's folder, or --model with --data")
    if run is not None and data is not None:
        raise UserError("--data: goes with --model; a run is probed on its own probe set")
    if run is None and all_checkpoints:
        raise UserError("--all-checkpoints: goes with a run's folder, not with --model")
    if not spec.functionals:
        raise UserError(f"--set functionals=[]: names nothing; choose from {', '.join(get_args(ObjectiveName))}")
    if run is None and data is None:
        raise UserError("probe --model: needs --data, a JSONL or Parquet file of prompts and completions")
    if out is None:
        out = free_name("probe" if run is None else f"{run}-probe")
    check_empty(out)
    options: dict[str, Any] = {"curvature": "curvature" in parts, "perturbation": "perturbation" in parts}
    options["backend"] = backend
    if run is not None:
        found = _checkpoints(run, spec, seed, all_checkpoints, threads, options, fixed="rho" in values)
    else:
        assert model is not None and data is not None
        # The default of the spec needs rewards, which a file of texts need not have.
        names: list[str] = [*spec.functionals] if "functionals" in values else ["nll"]
        found = _models(model, data, spec, seed, names, parts, out, threads, options)
    _report(found, out, _recorded(run))


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

    values = {"preset": "standard", "curvature_prompts": WHOLE} | values
    check_keys(ProbesSpec, values)
    spec: ProbesSpec = validate(ProbesSpec, values)
    return spec


Found = Iterator[tuple[str, int, "Measured"]]
"""Label of the checkpoint, its step (0 for a model), and what was measured."""


def _models(
    models: Sequence[str],
    data: Path,
    spec: ProbesSpec,
    seed: int,
    functionals: list[str],
    parts: list[str],
    out: Path,
    threads: int | None,
    options: dict[str, Any],
) -> Found:
    """Probe models on a file of texts, all at the radius of the first."""
    from sharpscope.policy import PolicySpec, load_policy
    from sharpscope.probes import read_rows, run, text_batches
    from sharpscope.recording.environment import set_threads

    set_threads(threads, models[0])
    rows, radius = read_rows(data), None
    for number, model in enumerate(models):
        policy = load_policy(PolicySpec(model=model))
        if parts != ["tokens"]:
            batches = text_batches(policy, rows, functionals, seed=seed, label=data.stem)  # type: ignore[arg-type]
            for measured in run(policy.model, batches, spec, radius=radius, **options):
                radius = measured.radius
                yield model, 0, measured
        if "tokens" in parts:
            _write_tokens(policy, rows, spec, out, "tokens" if len(models) == 1 else f"tokens-{number + 1}")


def _checkpoints(
    folder: Path, spec: ProbesSpec, seed: int, every: bool, threads: int | None, options: dict[str, Any], fixed: bool
) -> Found:
    """Probe a run's checkpoints on its probe set, at the run's radius unless one is `fixed`."""
    from sharpscope.config import read_recorded
    from sharpscope.errors import UserError
    from sharpscope.policy import load_policy
    from sharpscope.probes import Radius, probe_set_batches, run
    from sharpscope.recording.environment import set_threads
    from sharpscope.recording.probe_sets import Drawer, run_probe_set
    from sharpscope.tasks import make_task
    from sharpscope.traces import read_run_info
    from sharpscope.training.checkpoint import checkpoints, load_checkpoint
    from sharpscope.training.setup import build_optimizer

    if not folder.is_dir():
        raise UserError(f"run '{folder}': no such folder; give the folder that holds its run.json")
    saved = checkpoints(folder)
    if not saved:
        raise UserError(f"run '{folder}' has no checkpoint to probe")
    config = read_recorded(folder)
    set_threads(config.threads if threads is None else threads, config.policy.model)
    task = make_task(config.task)
    probe_set = run_probe_set(config, task)
    if not options["curvature"]:
        spec = spec.model_copy(update={"gradient_samples": 0})
    radius, known = None, read_run_info(folder).get("probe_radius")
    if not fixed and (known or config.probes.rho != "auto"):
        radius = Radius(**known) if known else Radius(float(config.probes.rho))
    for checkpoint in saved if every else saved[-1:]:
        policy = load_policy(config.policy.model_copy(update={"model": str(checkpoint)}), base=config.policy.model)
        optimizer = build_optimizer(policy.model, config.optimizer)
        load_checkpoint(checkpoint, policy.model, optimizer, None)
        batches = probe_set_batches(
            probe_set,
            spec,
            Drawer(config, policy, task),
            temperature=config.rollout.temperature,
            seed=lambda part: seed,
        )
        step = int(checkpoint.name.removeprefix("step-"))
        state = optimizer if optimizer.state else None
        for measured in run(policy.model, batches, spec, radius=radius, optimizer=state, **options):
            radius = measured.radius
            yield f"step {step}", step, measured


def _trace(
    tokens: Path, model: str, steps: str | None, spec: ProbesSpec, threads: int | None, out: Path, force: bool
) -> None:
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
        shares = "norms and shares" if probed.attributed else "norms (no loss_coef, so no shares)"
        typer.echo(
            f"step {probed.step}: {shares} of {probed.tokens} tokens; |ln π − recorded| {probed.logp_gap:.2g} nats"
        )

    policy = load_policy(PolicySpec(model=model))
    probe_trace(run, policy, out, steps=chosen, check=spec.check, on_step=tell, force=force)
    typer.echo(f"Written: {out}/ (try: sharpscope tokens {out} --spikes)")


def _write_tokens(policy: Policy, rows: Sequence[DataRow], spec: ProbesSpec, out: Path, name: str) -> None:
    from sharpscope import analysis
    from sharpscope.probes import token_norms

    tokens = token_norms(policy, rows, spec)
    out.mkdir(parents=True, exist_ok=True)
    tokens.to_parquet(out / f"{name}.parquet", index=False)
    norms = tokens["score_norm_local"]
    typer.echo(
        f"{len(tokens)} completion tokens: score norm ‖∇ ln π‖ (method local) median {norms.median():.3g}, largest {norms.max():.3g}"
    )
    _save([analysis.token_picture(tokens)], out)


def _recorded(run: Path | None) -> pd.DataFrame | None:
    """What the run recorded in its `probes` table: critical sharpness and threshold."""
    from sharpscope.traces import load_run

    return None if run is None else load_run(run).probes


def _report(found: Found, out: Path, recorded: pd.DataFrame | None) -> None:
    """Write rows as they are found; then say what they mean, and print them side by side."""
    import pandas as pd

    from sharpscope import analysis
    from sharpscope.probes import frame, problems

    tables: list[pd.DataFrame] = []
    for label, step, measured in found:
        new = frame(measured.estimates, step)
        new.insert(1, "checkpoint", label)
        tables.append(new)
        out.mkdir(parents=True, exist_ok=True)
        aside = out / "probes.parquet.tmp"
        pd.concat(tables, ignore_index=True).to_parquet(aside, index=False)
        aside.replace(out / "probes.parquet")
        for problem in problems(measured.estimates):
            typer.echo(f"  not reliable: {printable(f'{label}: {problem}')}", err=True)
    if tables:
        estimates = pd.concat(tables, ignore_index=True)
        for line in sentences(estimates, recorded):
            typer.echo(printable(line))
        _show(estimates)
        last = estimates[estimates["checkpoint"] == estimates["checkpoint"].iloc[-1]]
        _save(analysis.probe_pictures(estimates if estimates["step"].nunique() > 1 else last), out)
    typer.echo(f"written to {out}/: {', '.join(sorted(path.name for path in out.iterdir()))}")


def sentences(estimates: pd.DataFrame, recorded: pd.DataFrame | None = None) -> list[str]:
    """What the estimates say, a sentence or two for each checkpoint and loss, on training prompts where there are some.

    Args:
        estimates: rows of the `probes` table with a column `checkpoint`.
        recorded: the `probes` table of the run, for its critical sharpness; None without one.
    """
    lines = []
    sets = estimates["probe_set"].unique()
    chosen = next((name for name in sets if "/train@" in name), sets[0])
    for (label, name), rows in estimates[estimates["probe_set"] == chosen].groupby(
        ["checkpoint", "functional"], sort=False
    ):
        values = {row["quantity"]: row for row in rows.to_dict("records")}
        texts = [_sharpest(values), _stability(values), *_rises(values)]
        lines += [f"{label}, {name}: {text}" for text in texts if text]
    if recorded is not None and len(recorded):
        for step in dict.fromkeys(estimates["step"]):
            near = recorded[(recorded["step"] <= step) & recorded["value"].notna()].set_index("quantity")
            last = [near["value"].get(name) for name in ("critical_sharpness", "critical_threshold")]
            pair = [value if value is None or isinstance(value, float) else value.iloc[-1] for value in last]
            if all(value is not None for value in pair):
                lines.append(f"step {step}, last update measured: {critical_sentence(*map(float, pair))}")  # type: ignore[arg-type]
    return lines


def critical_sentence(sharpness: float, threshold: float) -> str:
    """What a critical sharpness says beside its threshold 2 / learning rate."""
    factor = threshold / sharpness
    means = (
        f"could be {factor:.3g} times longer before it raised"
        if factor >= 1
        else f"was {1 / factor:.3g} times too long: it raised"
    )
    return f"critical sharpness {sharpness:.3g}, threshold 2/lr = {threshold:.3g}: the update {means} the loss of its batch"


def _known(row: dict[str, Any] | None) -> bool:
    return row is not None and row["value"] is not None and math.isfinite(row["value"])


def _sharpest(values: dict[str, dict[str, Any]]) -> str:
    """The largest eigenvalue, with how sure it is."""
    row = values.get("largest")
    if row is None:
        return ""
    if not _known(row):
        return f"no curvature ({row['why']})"
    error = row["prompt_std_error"]
    sure = f" ± {error:.2g} over {row['prompts']:.0f} prompts" if math.isfinite(error) else ""
    doubt = "" if row["converged"] else "; NOT converged"
    smallest = values.get("smallest")
    negative = f"; smallest {smallest['value']:.3g}" if smallest is not None and _known(smallest) else ""
    limit = f"; plain gradient descent is stable along it below lr = {2 / row['value']:.2g}" if row["value"] > 0 else ""
    return f"sharpest direction: eigenvalue {row['value']:.4g}{sure} (residual {row['residual']:.1g}{doubt}){negative}{limit}"


def _stability(values: dict[str, dict[str, Any]]) -> str:
    """Whether AdamW's step is beyond what the sharpest direction allows."""
    row, limit = values.get("preconditioned_largest"), values.get("preconditioned_threshold")
    if row is None or limit is None or not _known(row) or row["value"] <= 0:
        return ""
    factor = limit["value"] / row["value"]
    sure = "" if row["converged"] else " (not converged)"
    if factor >= 1:
        return f"AdamW's step is within its stable range by a factor of {factor:.3g} along the sharpest direction{sure}"
    return f"AdamW's step is BEYOND its stable range by a factor of {1 / factor:.3g} along the sharpest direction{sure}"


def _rises(values: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Sharpness with its saturation."""
    from sharpscope.traces import MAX_SATURATION

    radius = values.get("radius")
    if radius is not None:
        found = (
            f"radius {radius['value']:.3g}, chosen in {radius['samples']:.0f} losses"
            if _known(radius)
            else radius["why"]
        )
        yield found
    for kind in ("sam", "asam"):
        row = values.get(kind)
        if row is None or not _known(row):
            continue
        error = row["prompt_std_error"]
        sure = f" ± {error:.2g}" if math.isfinite(error) else ""
        share = row["saturation"]
        if math.isnan(share):
            first = values.get(f"{kind}_first_order")
            bound = f", {row['value'] / first['value']:.2f} of its first-order term" if first and first["value"] else ""
        elif share > MAX_SATURATION:
            bound = f", SATURATED: {share:.0%} of the largest possible rise, so it measures accuracy; use a smaller rho"
        else:
            bound = f", {share:.1%} of the largest possible rise (its value per unit of 1 − loss)"
        yield f"{kind.upper()} sharpness at radius {row['rho']:.3g}: {row['value']:.3g}{sure}{bound}"


def _show(estimates: pd.DataFrame) -> None:
    """Print the values, a column for each checkpoint."""
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text

    from sharpscope.analysis.figures import split_of

    shown = estimates[estimates["quantity"] != "density"]
    labels = list(dict.fromkeys(shown["checkpoint"]))
    several = len(labels) > 1
    columns = [printable(label) for label in labels] if several else ["value", "± s.e.", "± prompts", "saturation"]
    table = Table(Column("quantity", no_wrap=True), "rho", *columns, "conv.", box=SIMPLE, padding=(0, 1, 0, 0))

    def number(value: Any, digits: int = 4) -> str:
        return "–" if value is None or math.isnan(value) else f"{value:.{digits}g}"

    for (name, functional), rows in shown.groupby(["probe_set", "functional"], sort=False):
        table.add_section()
        table.add_row(Text(f"{functional or 'gradient'}, {split_of(str(name))}", style="bold"))
        for quantity, same in rows.groupby("quantity", sort=False):
            first, by_label = same.iloc[0], same.set_index("checkpoint")
            if several:
                cells = [number(by_label["value"].get(label)) for label in labels]
            else:
                errors = [number(first[name], 2) for name in ("std_error", "prompt_std_error", "saturation")]
                cells = [number(first["value"]), *errors]
            good = {True: "yes", False: "NO"}.get(bool(same["converged"].ne(False).all()), "–")
            direct = same["converged"].isna().all()
            table.add_row(Text(str(quantity)), number(first["rho"], 3), *cells, "–" if direct else good)
    Console().print(table)


def _save(pictures: Iterable[Picture], out: Path) -> None:
    from sharpscope.analysis.figures import save

    for picture in pictures:
        if picture.figure is not None:
            save(picture.figure, out, picture.name)
