"""`sharpscope probe`: probes of causal language models on given texts, or of the checkpoints of a run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer
from typer import Argument, Option

from sharpscope.cli.console import Json, Threads, check_names, print_json, print_sections, printable, split

if TYPE_CHECKING:
    import pandas as pd

    from sharpscope.config.probes import Check, ProbesSpec
    from sharpscope.probes import Measured

Found = Iterator[tuple[str, int, "Measured"]]
"""Label of the checkpoint, its step (0 for a model), and what was measured."""
PARTS: dict[str, dict[str, Any]] = {"curvature": {"curvature_prompts": 0}, "perturbation": {"kinds": ()}}
"""What --probes can name, with the settings that leave it out."""
WHOLE = 128  # prompts on which curvature is computed by default


def probe(
    run: Annotated[Path | None, Argument(help="Folder of a run: probe its checkpoints on its probe set.")] = None,
    model: Annotated[
        list[str] | None, Option(help="embedded:NAME, a model folder, or a hub id. Repeatable: side by side.")
    ] = None,
    data: Annotated[Path | None, Option(help="JSONL or Parquet with prompt and completion (and reward).")] = None,
    tokens: Annotated[Path | None, Option(help="Folder of an imported run: measure its tokens at --model.")] = None,
    rollouts: Annotated[
        Path | None, Option(help="Batch dumped by another trainer: measure it as a recorded step at a checkpoint.")
    ] = None,
    method: Annotated[
        str | None, Option(help="Method that gives the tokens of --rollouts or --tokens coefficients.")
    ] = None,
    temperature: Annotated[float | None, Option(help="Of --rollouts' log-probabilities. Default: 1.")] = None,
    steps: Annotated[str | None, Option(help="Steps of --tokens or --rollouts: 10,20. Default: all.")] = None,
    probes: Annotated[str | None, Option(help="curvature,perturbation. Default: both.")] = None,
    functional: Annotated[
        list[str] | None, Option(help="nll or expected_failure, which needs rewards. Repeatable.")
    ] = None,
    all_checkpoints: Annotated[bool, Option("--all-checkpoints", help="Probe every checkpoint of the run.")] = False,
    backend: Annotated[str, Option(help="Eigenvalues and trace by lanczos, or by pyhessian.")] = "lanczos",
    force: Annotated[bool, Option("--force", help="Accept a checkpoint that does not fit.")] = False,
    set_: Annotated[
        list[str] | None, Option("--set", help="Field of `probes`, such as rho=0.05 or check=off. Repeatable.")
    ] = None,
    seed: Annotated[int, Option(help="Seed of every random vector.")] = 0,
    threads: Threads = None,
    out: Annotated[Path | None, Option(help="Folder that is written. Default: probe, or RUN-probe.")] = None,
    json: Json = False,
) -> None:
    """Probe a model: curvature and sharpness under perturbations; or the tokens of a batch of another trainer.

    Examples:
      sharpscope probe --model embedded:knights_knaves --data completions.jsonl --out probe

      sharpscope probe runs/first --all-checkpoints

      sharpscope probe checkpoints/step-100 --rollouts dumped/step_100.jsonl --method grpo --out runs/replayed
    """
    from sharpscope.config import parse_overrides
    from sharpscope.config.probes import Backend, ObjectiveName
    from sharpscope.errors import UserError
    from sharpscope.traces import check_free, free_name, load_run

    check_names("--functional", functional or [], get_args(ObjectiveName))
    check_names("--backend", [backend], get_args(Backend))
    values = parse_overrides(set_ or []) | ({"functionals": functional} if functional else {})
    # The default of the preset needs rewards, which a file of texts need not have.
    spec = _spec(({} if data is None else {"functionals": ("nll",)}) | values, probes)
    afterwards: dict[str, Any] = {"steps": steps, "force": force, "method": method, "temperature": temperature}
    if tokens is None and rollouts is None:
        _check(run, model, data, all_checkpoints, afterwards)
        out = out or free_name("probe" if run is None else f"{run}-probe")
        check_free(out)
        options = {"backend": backend}
        if run is not None:
            found = _checkpoints(run, spec, seed, all_checkpoints, threads, options, fixed="rho" in values)
        else:
            found = _models(model or [], data, spec, seed, threads, options)
        _report(found, out, None if run is None else load_run(run).probes, json)
        return
    models = [*(model or []), *([str(run)] if rollouts is not None and run is not None else [])]
    surface = data is not None or functional or probes or all_checkpoints
    if len(models) != 1 or surface or (tokens is not None and (run or rollouts) is not None):
        raise UserError(
            "--tokens, --rollouts: go with one checkpoint, --method, --steps, --set, --force, --threads, --out"
        )
    out = out or free_name("runs/replayed" if tokens is None else f"{tokens}-probed")
    check_free(out)
    _afterwards(tokens, rollouts, models[0], spec.check, threads, out, **afterwards)


def _check(
    run: Path | None, model: list[str] | None, data: Path | None, all_checkpoints: bool, afterwards: dict[str, Any]
) -> None:
    """Refuse options of the loss surface that do not go together.

    Raises:
        UserError: names them.
    """
    from sharpscope.errors import UserError

    extra = next((name for name, value in afterwards.items() if value), None)
    problems = {
        f"--{extra}: goes with --tokens or --rollouts": extra is not None,
        "probe: give a run's folder, or --model with --data": (run is None) == (not model),
        "--data: goes with --model; a run is probed on its own probe set": run is not None and data is not None,
        "--all-checkpoints: goes with a run's folder, not with --model": run is None and all_checkpoints,
        "probe --model: needs --data, a JSONL or Parquet file of prompts and completions": run is None and data is None,
    }
    for text, wrong in problems.items():
        if wrong:
            raise UserError(text)


def _spec(values: dict[str, Any], probes: str | None) -> ProbesSpec:
    """The settings of the probes, with these values set, and without the parts that `probes` does not name."""
    from sharpscope.config import validate
    from sharpscope.config.probes import ProbesSpec
    from sharpscope.errors import UserError

    parts = PARTS if probes is None else split(probes)
    check_names("--probes", parts, PARTS)
    if not parts:
        raise UserError(f"--probes: names nothing; choose from {', '.join(PARTS)}")
    for part, without in PARTS.items():
        values = values | ({} if part in parts else without)
    spec: ProbesSpec = validate(ProbesSpec, {"preset": "standard", "curvature_prompts": WHOLE} | values)
    if not spec.functionals:
        raise UserError("--set functionals=[]: names nothing; name a loss, such as nll")
    return spec


def _models(
    models: Sequence[str],
    data: Path | None,
    spec: ProbesSpec,
    seed: int,
    threads: int | None,
    options: dict[str, Any],
) -> Found:
    """Probe models on a file of texts, all at the radius of the first."""
    from sharpscope.policy import PolicySpec, load_policy
    from sharpscope.probes import read_rows, run, text_batches
    from sharpscope.recording.run_folder import set_threads

    assert data is not None
    set_threads(threads, models[0])
    rows, radius = read_rows(data), None
    for model in models:
        policy = load_policy(PolicySpec(model=model))
        batches = text_batches(policy, rows, spec.functionals, seed=seed, label=data.stem)
        for measured in run(policy.model, batches, spec, radius=radius, **options):
            radius = measured.radius
            yield model, 0, measured


def _checkpoints(
    folder: Path, spec: ProbesSpec, seed: int, every: bool, threads: int | None, options: dict[str, Any], fixed: bool
) -> Found:
    """Probe a run's checkpoints on its probe set, at the run's radius unless one is `fixed`."""
    from sharpscope.config import read_recorded
    from sharpscope.errors import UserError
    from sharpscope.policy import load_policy
    from sharpscope.probes import Radius, probe_set_batches, run
    from sharpscope.recording.probe_sets import Drawer, run_probe_set
    from sharpscope.recording.run_folder import set_threads
    from sharpscope.tasks import make_task
    from sharpscope.traces import read_run_info
    from sharpscope.training.checkpoint import checkpoints, load_checkpoint
    from sharpscope.training.learner import build_optimizer

    if not folder.is_dir():
        raise UserError(f"run '{folder}': no such folder; give the folder that holds its run.json")
    saved = checkpoints(folder)
    if not saved:
        raise UserError(f"run '{folder}' has no checkpoint to probe")
    config = read_recorded(folder)
    set_threads(config.threads if threads is None else threads, config.policy.model)
    task = make_task(config.task)
    probe_set = run_probe_set(config, task)
    radius, known = None, read_run_info(folder).get("probe_radius")
    if not fixed and (known or config.probes.rho != "auto"):
        radius = Radius(**known) if known else Radius(float(config.probes.rho))
    for checkpoint in saved if every else saved[-1:]:
        policy = load_policy(config.policy.model_copy(update={"model": str(checkpoint)}), base=config.policy.model)
        optimizer = build_optimizer(policy.model, config.optimizer)
        load_checkpoint(checkpoint, policy.model, optimizer)
        batches = probe_set_batches(
            probe_set,
            spec,
            Drawer(config, policy, task),
            temperature=config.rollout.temperature,
            seed=lambda part: seed,
        )
        step = int(checkpoint.name.removeprefix("step-"))
        for measured in run(policy.model, batches, spec, radius=radius, **options):
            radius = measured.radius
            yield f"step {step}", step, measured


def _afterwards(
    tokens: Path | None,
    rollouts: Path | None,
    model: str,
    check: Check,
    threads: int | None,
    out: Path,
    *,
    method: str | None,
    temperature: float | None,
    steps: str | None,
    force: bool,
) -> None:
    """Copy an imported run, or write a dumped batch as a run, with what a recorded step would have had at `model`."""
    from sharpscope.config.methods import parse_method
    from sharpscope.errors import UserError
    from sharpscope.integrations.importers import probe_rollouts
    from sharpscope.policy import PolicySpec, load_policy
    from sharpscope.recording.from_checkpoint import Probed, probe_trace
    from sharpscope.recording.run_folder import set_threads
    from sharpscope.traces import load_run

    if not all(step.isdecimal() for step in split(steps)):
        raise UserError(f"--steps {steps}: not whole numbers, comma-separated; write for example 10,20")
    if rollouts is not None and not rollouts.exists():
        raise UserError(f"--rollouts {rollouts}: no such file or folder")

    def tell(probed: Probed) -> None:
        """One line for each step."""
        shares = "norms and shares" if probed.attributed else "norms (not every token has a loss_coef, so no shares)"
        gap = f"|ln π − recorded| {probed.logp_gap:.2g} nats"
        typer.echo(f"step {probed.step}: {shares} of {probed.tokens} tokens; {gap}")

    common: dict[str, Any] = {"check": check, "on_step": tell, "force": force}
    common["steps"] = None if steps is None else [int(step) for step in split(steps)]
    common["method"] = None if method is None else parse_method(method)
    run = None if tokens is None else load_run(tokens)
    set_threads(threads, model)
    policy = load_policy(PolicySpec(model=model))
    if run is not None:
        probe_trace(run, policy, out, **common)
    else:
        assert rollouts is not None
        probe_rollouts(rollouts, policy, out, temperature=temperature, **common)
    typer.echo(f"Written: {out}/ (try: sharpscope tokens {out} --spikes)")


def _report(found: Found, out: Path, recorded: pd.DataFrame | None, json: bool) -> None:
    """Write rows as they are found; then say what they mean, and print them side by side, or both as JSON."""
    import pandas as pd

    from sharpscope.analysis.sections import Section
    from sharpscope.probes import problems

    tables: list[pd.DataFrame] = []
    for label, step, measured in found:
        rows = [{"step": step, "checkpoint": label} | vars(estimate) for estimate in measured.estimates]
        tables.append(pd.DataFrame(rows).drop(columns="prompt_values"))
        out.mkdir(parents=True, exist_ok=True)
        aside = out / "probes.parquet.tmp"
        pd.concat(tables, ignore_index=True).to_parquet(aside, index=False)
        aside.replace(out / "probes.parquet")
        for problem in problems(measured.estimates):
            typer.echo(f"  not reliable: {printable(f'{label}: {problem}')}", err=True)
    if tables:
        estimates = pd.concat(tables, ignore_index=True)
        said = sentences(estimates, recorded)
        if json:
            records = estimates.replace({pd.NA: None}).to_dict("records")
            print_json({"sentences": said, "rows": records, "written": str(out)})
        else:
            typer.echo("\n".join(map(printable, said)))
            print_sections([Section("", _table(estimates))])
    typer.echo(f"written to {out}/: {', '.join(sorted(path.name for path in out.iterdir()))}", err=json)


def sentences(estimates: pd.DataFrame, recorded: pd.DataFrame | None = None) -> list[str]:
    """What the estimates say, a sentence or two for each checkpoint and loss, on training prompts where there are some.

    Args:
        estimates: rows of the `probes` table with a column `checkpoint`.
        recorded: the `probes` table of the run, for its critical sharpness; None without one.
    """
    from sharpscope.analysis.measures import critical_text

    lines = []
    sets = estimates["probe_set"].unique()
    chosen = next((name for name in sets if "/train@" in name), sets[0])
    first = estimates[estimates["probe_set"] == chosen]
    lines += [line for name, rows in first.groupby("functional", sort=False) for line in _compared(str(name), rows)]
    for (label, name), rows in first.groupby(["checkpoint", "functional"], sort=False):
        lines += [f"{label}, {name}: {text}" for text in _texts(rows.set_index("quantity").to_dict("index"))]
    if recorded is not None and len(recorded):
        for step in dict.fromkeys(estimates["step"]):
            if said := critical_text(recorded[recorded["step"] <= step]):
                lines.append(f"step {step}, last update measured: {said}")
    return lines


def _compared(name: str, rows: pd.DataFrame) -> Iterator[str]:
    """How many times as sharp as the first checkpoint each other one is, on the same prompts and at the same radius."""
    from sharpscope.traces import MAX_SATURATION

    for quantity, title in (("sam", "SAM sharpness"), ("largest", "sharpest direction")):
        same = rows[(rows["quantity"] == quantity) & ~(rows["saturation"] > MAX_SATURATION)]
        first, *others = same.dropna(subset=["value"]).to_dict("records") or [{"value": 0.0}]
        for row in others if first["value"] > 0 else ():
            one, other = (f"{r['checkpoint']} {r['value']:.3g}{_error(r)}" for r in (row, first))
            yield f"{name}, {title}: {one}, {row['value'] / first['value']:.3g} times that of {other}"


def _error(row: dict[Any, Any]) -> str:
    return f" ± {row['prompt_std_error']:.2g}" if math.isfinite(row["prompt_std_error"]) else ""


def _texts(rows: dict[Any, dict[Any, Any]]) -> Iterator[str]:
    """The largest eigenvalue, sharpness with its saturation and the chosen radius, from rows by quantity."""
    from sharpscope.traces import MAX_SATURATION

    known = {quantity: row for quantity, row in rows.items() if math.isfinite(row["value"])}
    if row := known.get("largest"):
        value = row["value"]
        sure = f"{_error(row)} over {row['prompts']:.0f} prompts" if _error(row) else ""
        doubt = "" if row["converged"] else "; NOT converged"
        negative = f"; smallest {known['smallest']['value']:.3g}" if "smallest" in known else ""
        limit = f"; plain gradient descent is stable along it below lr = {2 / value:.2g}" if value > 0 else ""
        yield f"sharpest direction: eigenvalue {value:.4g}{sure} (residual {row['residual']:.1g}{doubt}){negative}{limit}"
    elif "largest" in rows:
        yield f"no curvature ({rows['largest']['why']})"
    for kind in ("sam", "asam"):
        if not (row := known.get(kind)):
            continue
        share, first = row["saturation"], known.get(f"{kind}_first_order")
        if share > MAX_SATURATION:
            bound = f", SATURATED: {share:.0%} of the largest possible rise, so it measures accuracy; use a smaller rho"
        elif math.isfinite(share):
            bound = f", {share:.1%} of the largest possible rise (its value per unit of 1 − loss)"
        else:
            bound = f", {row['value'] / first['value']:.2f} of its first-order term" if first and first["value"] else ""
        yield f"{kind.upper()} sharpness at radius {row['rho']:.3g}: {row['value']:.3g}{_error(row)}{bound}"
    if row := known.get("radius"):
        yield f"radius {row['value']:.3g}, chosen from losses at {row['samples']:.0f} radii"
    elif "radius" in rows:
        yield rows["radius"]["why"]


def _table(estimates: pd.DataFrame) -> pd.DataFrame:
    """The values, a column for each checkpoint; of one checkpoint with their errors."""
    import pandas as pd

    from sharpscope.analysis.measures import split_of

    several = estimates["checkpoint"].nunique() > 1
    rows = []
    for (name, functional, quantity), same in estimates.groupby(["probe_set", "functional", "quantity"], sort=False):
        first = same.iloc[0]
        row = {"loss": functional or "gradient", "prompts": split_of(str(name)), "quantity": quantity}
        row |= {"rho": first["rho"]}
        if several:
            row |= {label: _number(value) for label, value in zip(same["checkpoint"], same["value"], strict=True)}
        else:
            errors = {"± s.e.": "std_error", "± prompts": "prompt_std_error", "saturation": "saturation"}
            row |= {"value": _number(first["value"])} | {title: first[column] for title, column in errors.items()}
        good = "yes" if same["converged"].ne(False).all() else "NO"
        rows.append(row | {"conv.": "–" if same["converged"].isna().all() else good})
    return pd.DataFrame(rows)


def _number(value: float | None) -> str:
    return "–" if value is None or math.isnan(value) else f"{value:.4g}"
