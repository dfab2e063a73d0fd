"""`sharpscope probe`: probes of causal language models on given texts, or of the checkpoints of a run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

from typer import Argument, Option

from sharpscope.cli.console import (
    Json,
    PromptFormat,
    check_names,
    print_json,
    print_sections,
    say,
    split,
    tell,
)

if TYPE_CHECKING:
    import pandas as pd
    from torch import Tensor, nn

    from sharpscope.config.run import ProbesSpec
    from sharpscope.surface import Measured, ProbeBatch

Found = Iterator[tuple[str, int, "Measured"]]
"""Label of the checkpoint, its step (0 for a model), and what was measured."""
Row = dict[Any, Any]
"""A row of the table `probes`."""
WHOLE = 128  # prompts on which curvature is computed by default
SEED = 0  # of every random vector


def probe(
    run: Annotated[
        Path | None, Argument(help="Folder of a run: probe its checkpoints on its probe set.")
    ] = None,
    model: Annotated[
        list[str] | None,
        Option(help="embedded:NAME, a model folder, or a hub id. Repeatable: side by side."),
    ] = None,
    data: Annotated[
        Path | None, Option(help="JSONL or Parquet with prompt and completion (and reward).")
    ] = None,
    rollouts: Annotated[
        Path | None,
        Option(
            help="Batch dumped by another trainer, or imported run: measure its steps at a checkpoint."
        ),
    ] = None,
    method: Annotated[
        str | None, Option(help="Method that gives the tokens of --rollouts coefficients.")
    ] = None,
    temperature: Annotated[
        float | None, Option(help="Of a dumped batch's log-probabilities. Default: 1.")
    ] = None,
    steps: Annotated[str | None, Option(help="Steps of --rollouts: 10,20. Default: all.")] = None,
    all_checkpoints: Annotated[
        bool, Option("--all-checkpoints", help="Probe every checkpoint of the run.")
    ] = False,
    prompt_format: PromptFormat = "auto",
    backend: Annotated[
        str, Option(help="Eigenvalues and trace by lanczos, pyhessian or curvlinops.")
    ] = "lanczos",
    pictures: Annotated[
        bool,
        Option(
            "--pictures",
            help="Also write tables: spectrum, slices, a plane, leading tokens' curvature.",
        ),
    ] = False,
    force: Annotated[
        bool, Option("--force", help="Accept a checkpoint that does not fit.")
    ] = False,
    set_: Annotated[
        list[str] | None,
        Option("--set", help="Field of `probes`, such as rho=0.05 or check=off. Repeatable."),
    ] = None,
    out: Annotated[
        Path | None, Option(help="Folder that is written. Default: probe, or RUN-probe.")
    ] = None,
    json: Json = False,
) -> None:
    """Probe a model: curvature and sharpness under perturbations; or the tokens of a batch of another trainer.

    Examples:
      sharpscope probe --model embedded:knights_knaves --data completions.jsonl --out probe
      sharpscope probe runs/first --all-checkpoints --set curvature_prompts=0
      sharpscope probe checkpoints/step-100 --rollouts dumped/step_100.jsonl --method grpo --out runs/replayed
    """
    from sharpscope.config.run import Backend
    from sharpscope.errors import UserError
    from sharpscope.settings import parse_overrides
    from sharpscope.traces import check_free, free_name

    check_names("--backend", [backend], get_args(Backend))
    values = parse_overrides(set_ or [])
    spec = _spec(values, data)
    of_rollouts = {
        "steps": steps,
        "method": method,
        "temperature": temperature,
        "force": force or None,
    }
    if rollouts is not None:
        models = [*(model or []), *([] if run is None else [str(run)])]
        if len(models) != 1 or data is not None or all_checkpoints:
            raise UserError(
                "--rollouts: goes with one checkpoint and without --data and --all-checkpoints"
            )
        options = _replay_options(rollouts, of_rollouts) | {"check": spec.check}
        out = out or free_name("runs/replayed")
        check_free(out)
        _replay(rollouts, models[0], out, **options)
        return
    _check_probe(run, model, data, all_checkpoints, of_rollouts)
    if run is not None and prompt_format != "auto":
        raise UserError("--prompt-format: goes with --model; a run has its own")
    out = out or free_name("probe" if run is None else f"{run}-probe")
    check_free(out)
    drawn = Pictures(spec, out) if pictures else None
    if run is not None:
        found = _checkpoints(run, spec, all_checkpoints, backend, drawn, fixed="rho" in values)
    else:
        found = _models(model or [], data, prompt_format, spec, backend, drawn)
    _report(found, out, json)


def _spec(values: Mapping[str, object], data: Path | None) -> ProbesSpec:
    """What to measure."""
    from sharpscope.config.run import ProbesSpec
    from sharpscope.errors import UserError
    from sharpscope.settings import validate

    defaults: dict[str, object] = {"preset": "standard", "curvature_prompts": WHOLE}
    if data is not None:
        # The default of the preset needs rewards, which a file of texts need not have.
        defaults["functionals"] = ("nll",)
    spec = validate(ProbesSpec, defaults | dict(values))
    if not spec.functionals:
        raise UserError("--set functionals=[]: names nothing; name a loss, such as nll")
    return spec


def _replay_options(source: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """The options that go with `--rollouts`, as `_replay` takes them."""
    from sharpscope.errors import UserError
    from sharpscope.methods.named import parse_method

    steps = given["steps"]
    temperature = given["temperature"]
    if not all(step.isdecimal() for step in split(steps)):
        raise UserError(
            f"--steps {steps}: not whole numbers, comma-separated; write for example 10,20"
        )
    if temperature is not None and not 0 < temperature < math.inf:
        raise UserError(
            f"--temperature {temperature:g}: must be above 0; give that of the log-probabilities"
        )
    if not source.exists():
        raise UserError(f"--rollouts {source}: no such file or folder")
    return {
        "steps": None if steps is None else [int(step) for step in split(steps)],
        "method": None if given["method"] is None else parse_method(given["method"]),
        "temperature": temperature,
        "force": given["force"] is not None,
    }


def _check_probe(
    run: Path | None,
    models: Sequence[str] | None,
    data: Path | None,
    all_checkpoints: bool,
    of_rollouts: Mapping[str, object],
) -> None:
    """Refuse options that do not go together."""
    from sharpscope.errors import UserError

    if any(value is not None for value in of_rollouts.values()):
        raise UserError("--steps, --method, --temperature, --force: go with --rollouts")
    if (run is None) == (not models):
        raise UserError("probe: give a run's folder, or --model with --data")
    if run is not None and data is not None:
        raise UserError("--data: goes with --model; a run is probed on its own probe set")
    if run is None and all_checkpoints:
        raise UserError("--all-checkpoints: goes with a run's folder, not with --model")
    if run is None and data is None:
        raise UserError(
            "probe --model: needs --data, a JSONL or Parquet file of prompts and completions"
        )


def short_names(models: Sequence[str]) -> list[str]:
    """What models are called in tables: the last parts of their paths, as many as tell them apart."""
    parts = [Path(model).parts for model in models]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(one[-count:]) for one in parts]
        if len(set(names)) == len(set(models)):
            return names
    return list(models)


class Pictures:
    """Tables for pictures of the first loss of each checkpoint's first batch, written as Parquet files."""

    def __init__(self, spec: ProbesSpec, out: Path) -> None:
        self.spec, self.out = spec, out
        self._tables: dict[str, list[pd.DataFrame]] = {}

    def add(
        self,
        label: str,
        model: nn.Module,
        batch: ProbeBatch,
        rho: float,
        path: Tensor | None = None,
    ) -> None:
        """Measure a model, and write the tables so far with a column `checkpoint`."""
        import pandas as pd
        import torch

        from sharpscope.surface import limited_surface
        from sharpscope.surface.pictures import tables

        spec = self.spec
        objective = batch.objectives[0]
        with limited_surface(model, objective, spec, twice=True) as surface:
            prompts = torch.tensor(objective.batch.prompts)
            few = surface.prompts(prompts < (spec.curvature_prompts or len(prompts)))
            probes = spec.density_probes or 4
            made = tables(
                few,
                rho=rho,
                seed=SEED,
                density_probes=probes,
                path=path,
                tell=tell,
            )
        self.out.mkdir(parents=True, exist_ok=True)
        for name, table in made.items():
            rows = self._tables.setdefault(name, [])
            rows.append(table.assign(checkpoint=label, probe_set=batch.name))
            pd.concat(rows, ignore_index=True).to_parquet(self.out / f"{name}.parquet", index=False)


def _models(
    models: Sequence[str],
    data: Path | None,
    prompt_format: str,
    spec: ProbesSpec,
    backend: str,
    pictures: Pictures | None,
) -> Found:
    """Probe models on a file of texts, all at the radius of the first."""
    from sharpscope.policy import PolicySpec, load_policy
    from sharpscope.recording.run_folder import set_threads
    from sharpscope.settings import validate
    from sharpscope.surface import read_rows, run, text_batches

    assert data is not None
    set_threads(None, models[0])
    rows = read_rows(data)
    radius = None
    for model, name in zip(models, short_names(models), strict=True):
        given = {"model": model, "prompt_format": prompt_format}
        policy = load_policy(validate(PolicySpec, given))
        batches = text_batches(policy, rows, spec.functionals, seed=SEED, label=data.stem)
        options = {"radius": radius, "backend": backend, "tell": tell}
        for measured in run(policy.model, batches, spec, **options):  # type: ignore[arg-type]
            radius = measured.radius
            yield name, 0, measured
        if pictures is not None and radius is not None:
            pictures.add(name, policy.model, batches[0], radius.rho)


def _checkpoints(
    folder: Path,
    spec: ProbesSpec,
    every: bool,
    backend: str,
    pictures: Pictures | None,
    *,
    fixed: bool,
) -> Found:
    """Probe a run's checkpoints on its probe set, at the run's radius unless one is `fixed`."""
    from sharpscope.config import read_recorded
    from sharpscope.errors import UserError
    from sharpscope.policy import load_policy
    from sharpscope.recording.probe_sets import Drawer, run_probe_set
    from sharpscope.recording.run_folder import set_threads
    from sharpscope.surface import Radius, probe_set_batches, run
    from sharpscope.surface.weights import parameter_change
    from sharpscope.tasks import make_task
    from sharpscope.traces import read_run_info
    from sharpscope.training.checkpoint import checkpoints, restore, step_of
    from sharpscope.training.learner import build_optimizer

    saved = checkpoints(folder)
    if not saved:
        raise UserError(
            f"run '{folder}' has no checkpoint to probe; give the folder of a run that has one"
        )
    config = read_recorded(folder)
    set_threads(config.threads, config.policy.model)
    task = make_task(config.task)
    probe_set = run_probe_set(config, task)
    radius = None
    known = read_run_info(folder).get("probe_radius")
    if not fixed and (known or config.probes.rho != "auto"):
        radius = Radius(**known) if known else Radius(float(config.probes.rho))
    for checkpoint in saved if every else saved[-1:]:
        policy = load_policy(
            config.policy.model_copy(update={"model": str(checkpoint)}), base=config.policy.model
        )
        drawer = Drawer(config, policy, task)
        temperature = config.rollout.temperature
        batches = list(probe_set_batches(probe_set, spec, drawer, temperature=temperature))
        step = step_of(checkpoint)
        optimizer = None
        if "adamw" in spec.operators:
            optimizer = build_optimizer(policy.model, config.optimizer)
            restore(checkpoint, policy, optimizer)
        options = {
            "radius": radius,
            "backend": backend,
            "optimizer": optimizer,
            "tell": tell,
        }
        for measured in run(policy.model, batches, spec, **options):  # type: ignore[arg-type]
            radius = measured.radius
            yield f"step {step}", step, measured
        if pictures is not None and radius is not None:
            start = load_policy(config.policy).model
            path = parameter_change(start, policy.model)
            pictures.add(f"step {step}", policy.model, batches[0], radius.rho, path)


def _replay(
    source: Path,
    model: str,
    out: Path,
    *,
    temperature: float | None,
    **options: Any,
) -> None:
    """Copy an imported run, or write a dumped batch as a run, with what a recorded step would have had at `model`."""
    from sharpscope.integrations.importers import probe_rollouts
    from sharpscope.policy import PolicySpec, load_policy
    from sharpscope.recording.from_checkpoint import probe_trace
    from sharpscope.recording.run_folder import set_threads
    from sharpscope.traces import load_run

    set_threads(None, model)
    policy = load_policy(PolicySpec(model=model))
    if (source / "run.json").exists():
        found = probe_trace(load_run(source), policy, out, **options)
    else:
        found = probe_rollouts(source, policy, out, temperature=temperature, **options)
    for one in found:
        shares = (
            "norms and shares"
            if one.attributed
            else "norms (not every token has a loss_coef, so no shares)"
        )
        say(
            f"step {one.step}: {shares} of {one.tokens} tokens; {one.effects}; |ln π − recorded| {one.logp_gap:.2g} nats"
        )
    say(f"Written: {out}/ (try: sharpscope tokens {out} --spikes)")


def _report(found: Found, out: Path, json: bool) -> None:
    """Write rows as they are found; then say what they mean, and print them side by side, or both as JSON."""
    import pandas as pd

    from sharpscope.analysis.sections import Section
    from sharpscope.surface import problems

    tables: list[pd.DataFrame] = []
    for label, step, measured in found:
        rows = [
            {"step": step, "checkpoint": label} | vars(estimate) for estimate in measured.estimates
        ]
        tables.append(pd.DataFrame(rows).drop(columns="prompt_values"))
        out.mkdir(parents=True, exist_ok=True)
        aside = out / "probes.parquet.tmp"
        pd.concat(tables, ignore_index=True).to_parquet(aside, index=False)
        aside.replace(out / "probes.parquet")
        for problem in problems(measured.estimates):
            say(f"  not reliable: {label}: {problem}", err=True)
    if tables:
        estimates = pd.concat(tables, ignore_index=True)
        said = sentences(estimates)
        if json:
            records = estimates.replace({pd.NA: None}).to_dict("records")
            print_json({"sentences": said, "rows": records, "written": str(out)})
        else:
            say("\n".join(said))
            print_sections([Section("", _table(estimates))])
    say(f"written to {out}/: {', '.join(sorted(path.name for path in out.iterdir()))}", err=json)


def sentences(estimates: pd.DataFrame) -> list[str]:
    """What rows of `probes`, with a column `checkpoint`, say of each checkpoint and loss, on training prompts if there are some."""
    sets = estimates["probe_set"].unique()
    chosen = next((name for name in sets if "/train@" in name), sets[0])
    first = estimates[estimates["probe_set"] == chosen]
    lines = [
        line
        for name, rows in first.groupby("functional", sort=False)
        for line in _compared(str(name), rows)
    ]
    for (label, name), rows in first.groupby(["checkpoint", "functional"], sort=False):
        lines += [
            f"{label}, {name}: {text}"
            for text in _texts(rows.set_index("quantity").to_dict("index"))
        ]
    return lines


def _compared(name: str, rows: pd.DataFrame) -> Iterator[str]:
    """How many times as sharp as the first checkpoint each other one is, on the same prompts and at the same radius."""
    from sharpscope.traces import MAX_SATURATION

    for quantity, title in (("sam", "SAM sharpness"), ("largest", "sharpest direction")):
        same = rows[(rows["quantity"] == quantity) & ~(rows["saturation"] > MAX_SATURATION)]
        first, *others = same.dropna(subset=["value"]).to_dict("records") or [{"value": 0.0}]
        for row in others if first["value"] > 0 else ():
            one, other = (f"{r['checkpoint']} {_value(r)}" for r in (row, first))
            if row["prompts"] != first["prompts"]:
                yield f"{name}, {title}: not compared, on {row['prompts']:.0f} and {first['prompts']:.0f} prompts"
                continue
            # as if the prompts were not shared, which is the wider interval for checkpoints of one model
            half = math.hypot(_half(row), _half(first))
            if abs(row["value"] - first["value"]) <= half:
                said = f"{one} and {other}: not distinguishable"
            elif math.isnan(half):
                said = f"{one}; {other}: not compared without an error over prompts"
            elif _unsure(row) or _unsure(first):
                said = f"{one}; {other}"
            else:
                said = f"{one}, {row['value'] / first['value']:.3g} times that of {other}"
            yield f"{name}, {title}: {said}"


def _half(row: Row) -> float:
    """Half of the 95 % interval over prompts and random draws; NaN where no error is known."""
    from scipy.stats import t

    from sharpscope.analysis.measures import Z

    draws = row["std_error"]
    if math.isfinite(draws):
        draws *= float(t.ppf(0.975, row["samples"] - 1))
    errors = [error for error in (Z * row["prompt_std_error"], draws) if math.isfinite(error)]
    return math.hypot(*errors) if errors else math.nan


def _unsure(row: Row) -> bool:
    return _half(row) > abs(row["value"])


def _value(row: Row) -> str:
    """A value with its 95 % interval over prompts, in words where the interval is wider than the value."""
    from sharpscope.analysis.text import value_text

    return value_text(row["value"], _half(row))


def _texts(rows: dict[Any, Row]) -> Iterator[str]:
    """The largest eigenvalue, sharpness with its saturation and the chosen radius, from rows by quantity."""
    from sharpscope.traces import MAX_SATURATION

    known = {quantity: row for quantity, row in rows.items() if math.isfinite(row["value"])}
    if row := known.get("largest"):
        over = f" over {row['prompts']:.0f} prompts" if math.isfinite(_half(row)) else ""
        doubt = "" if row["converged"] else "; NOT converged"
        negative = f"; smallest {_value(known['smallest'])}" if "smallest" in known else ""
        yield f"sharpest direction: eigenvalue {_value(row)}{over} (residual {row['residual']:.1g}{doubt}){negative}"
    elif "largest" in rows:
        yield f"no curvature ({rows['largest']['why']})"
    for kind in ("sam", "asam"):
        if not (row := known.get(kind)):
            continue
        share = row["saturation"]
        first = known.get(f"{kind}_first_order")
        bound = ""
        if share > MAX_SATURATION:
            bound = f", SATURATED: {share:.0%} of the largest possible rise, so it measures accuracy; use a smaller rho"
        elif _unsure(row):
            pass
        elif math.isfinite(share):
            bound = f", {share:.1%} of the largest possible rise (its value per unit of 1 − loss)"
        elif first and first["value"]:
            bound = f", {row['value'] / first['value']:.2f} of its first-order term"
        yield f"{kind.upper()} sharpness at radius {row['rho']:.3g}: {_value(row)}{bound}"
    if row := known.get("radius"):
        yield f"radius {row['value']:.3g}, chosen from losses at {row['samples']:.0f} radii"
    elif "radius" in rows:
        yield rows["radius"]["why"]


def _table(estimates: pd.DataFrame) -> pd.DataFrame:
    """The values with their errors, a column for each checkpoint; which prompts they are on where they are on several sets."""
    import pandas as pd

    from sharpscope.analysis.measures import split_of
    from sharpscope.analysis.text import value_text

    rows = []
    for (name, functional, quantity), same in estimates.groupby(
        ["probe_set", "functional", "quantity"], sort=False
    ):
        row = {"loss": functional or "gradient", "prompts": split_of(str(name))}
        row |= {"quantity": quantity, "rho": same["rho"].iloc[0]}
        for each in same.to_dict("records"):
            row[each["checkpoint"]] = value_text(each["value"], _half(each), "error > value")
        rows.append(row)
    table = pd.DataFrame(rows)
    return table if table["prompts"].nunique() > 1 else table.drop(columns="prompts")
