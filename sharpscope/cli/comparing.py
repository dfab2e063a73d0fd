"""`sharpscope compare`: what differs between two checkpoints of a model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from sharpscope.cli.console import Json, PromptFormat, print_json, print_sections, say, tell
from sharpscope.cli.probing import SEED, short_names

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

    from sharpscope.policy import Policy
    from sharpscope.surface import Estimate, ProbeBatch

    Numbers = Sequence[float] | pd.Series | np.ndarray

ENOUGH = 200  # prompts from which sharpness has little bias; docs/explanations/sharpness.md


def compare(
    base: Annotated[str, Argument(help="Model before: embedded:NAME, a folder, or a hub id.")],
    tuned: Annotated[str, Argument(help="Model after, of the same architecture.")],
    data: Annotated[Path, Option(help="JSONL or Parquet with prompt and completion.")],
    task: Annotated[
        str | None,
        Option(help="Task whose held-out prompts both answer: a kind, or module:function."),
    ] = None,
    prompts: Annotated[int, Option(min=2, help="Prompts of the data, and held-out ones.")] = 200,
    curvature_prompts: Annotated[
        int, Option(min=0, help="Prompts of the data for the curvature; 0: no curvature.")
    ] = 32,
    max_new_tokens: Annotated[int, Option(min=1, help="Length of an answer to the task.")] = 192,
    prompt_format: PromptFormat = "auto",
    out: Annotated[Path | None, Option(help="Folder that is written. Default: compare.")] = None,
    json: Json = False,
) -> None:
    """Compare two checkpoints: tokens, weights, curvature along the change, sharpness, and with a task accuracy and the swap test.

    Examples:
      sharpscope compare smollm2 runs/sums/checkpoints/step-40 --data completions.jsonl
      sharpscope compare embedded:math runs/first/checkpoints/step-100 --data answers.jsonl --task math
    """
    import pandas as pd

    from sharpscope.analysis.sections import Section
    from sharpscope.policy import PolicySpec, load_policy
    from sharpscope.recording.run_folder import set_threads
    from sharpscope.settings import validate
    from sharpscope.surface import read_rows, text_batches
    from sharpscope.tasks import make_task, task_choice, task_specs
    from sharpscope.traces import check_free, free_name

    rows = read_rows(data)
    out = out or free_name("compare")
    check_free(out)
    chosen = None
    if task is not None:
        choice = dict(task_choice(task))
        chosen = make_task(task_specs[str(choice["kind"])].model_validate(choice))
    set_threads(None, base)
    names = short_names([base, tuned])
    first, second = (
        load_policy(validate(PolicySpec, {"model": model, "prompt_format": prompt_format}))
        for model in (base, tuned)
    )
    kept = rows["prompt"].drop_duplicates()[:prompts]
    batch = text_batches(first, rows[rows["prompt"].isin(kept)], label=data.stem)[0]
    tables: dict[str, pd.DataFrame] = {}
    said: list[str] = []

    def keep(name: str, table: pd.DataFrame, sentences: Iterable[str]) -> None:
        """Write a table, so that an interruption does not lose it, and remember what it says."""
        tables[name] = table
        out.mkdir(parents=True, exist_ok=True)
        table.to_parquet(out / f"{name}.parquet", index=False)
        said.extend(sentences)

    _measure(first, second, names, batch, curvature_prompts, keep)
    if chosen is not None:
        from sharpscope.config.run import SamplingSpec
        from sharpscope.surface.swap import swap_test

        splits = chosen.splits()
        held_out = (splits.get("heldout") or splits["train"])[:prompts]
        sampling = SamplingSpec(max_new_tokens=max_new_tokens)
        swapped = swap_test(first, second, chosen, held_out, sampling, seed=SEED, tell=tell)
        keep("swap", swapped, swap_sentences(swapped, names))
    else:
        said.append("accuracy and the swap test: not measured; name the task with --task")
    if json:
        records = tables["probes"].replace({pd.NA: None}).to_dict("records")
        print_json({"sentences": said, "rows": records, "written": str(out)})
        return
    say("\n".join(said))
    print_sections([Section("Weights by layer", _layers(tables["weights"]))])
    typer.echo(f"written to {out}/: {', '.join(f'{name}.parquet' for name in tables)}")


def _measure(
    before: Policy,
    after: Policy,
    names: list[str],
    batch: ProbeBatch,
    curvature_prompts: int,
    keep: Callable[[str, pd.DataFrame, Iterable[str]], None],
) -> None:
    """Give `keep` the tables `weights`, `tokens` and `probes` with what they say, each as soon as it is known."""
    import pandas as pd
    import torch

    from sharpscope.config.run import ProbesSpec
    from sharpscope.errors import UserError
    from sharpscope.progress import duration
    from sharpscope.surface import choose_radius, lm_surface
    from sharpscope.surface.compare import change_curvature, passes, sharpness_of, token_changes
    from sharpscope.surface.spectrum import lanczos_capacity
    from sharpscope.surface.weights import parameter_change, weight_changes

    base, tuned = before.model, after.model
    (objective,) = batch.objectives
    count = len(objective.prompt_weight)
    change = parameter_change(base, tuned)
    if curvature_prompts:
        lanczos_capacity(change, 2)  # an error before anything expensive
    if not bool(change.any()):
        raise UserError(f"compare: {' and '.join(names)} have the same weights")
    radius = choose_radius(base, batch, ProbesSpec(), tell)
    if radius.why:
        why = radius.why.partition("; set probes.rho")[0]  # which is no option of this command
        raise UserError(f"compare: no radius was found: {why}")
    one = radius.seconds / radius.passes
    work = duration(one * passes(min(curvature_prompts, count) / count))
    tell(f"radius {radius.rho:.2g}; sharpness and curvature take at most {work} more")

    table = weight_changes(base, tuned)
    keep("weights", table, weight_sentences(table))
    with lm_surface(base, objective) as first, lm_surface(tuned, objective) as second:
        table = token_changes(first, second)
        keep("tokens", table, token_sentences(table))
        found: dict[str, list[Estimate]] = {}
        for name, surface in zip(names, (first, second), strict=True):
            tell(f"sharpness of {name}")
            found[name] = sharpness_of(surface, radius.rho, SEED)
        said = list(sharpness_sentences(found, names))
        if curvature_prompts:
            tell(f"curvature of {names[1]}")
            few = second.prompts(torch.tensor(objective.batch.prompts) < curvature_prompts)
            curved = change_curvature(few, change, SEED)
            found[names[1]] += curved
            said += curvature_sentences(curved, len(few.objective.prompt_weight))
    rows = [{"checkpoint": name} | vars(row) for name, each in found.items() for row in each]
    keep("probes", pd.DataFrame(rows).drop(columns="prompt_values"), said)


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Tuned minus base, paired by prompt."""

    value: float
    half: float  # half of the 95 % interval, Student's t; NaN for one prompt or prompts without spread
    prompts: int

    @property
    def seen(self) -> bool:
        """Whether the interval excludes 0; an interval without width decides nothing."""
        return self.half > 0 and abs(self.value) > self.half

    @property
    def error(self) -> str:
        """The interval of a difference of shares; empty without spread."""
        return f" ± {self.half:.1%}" if self.half > 0 else ""


def paired(base: Numbers, tuned: Numbers, noise: float = 0.0) -> Difference:
    """The mean of tuned − base over the same prompts; `noise` is half an interval from elsewhere, as of random draws."""
    import numpy as np

    from sharpscope.analysis.statistics import mean_interval

    each = np.subtract(tuned, base)
    value = float(each.mean())
    interval = mean_interval(each)
    half = 0.0 if interval is None else math.hypot(interval.high - value, noise)
    return Difference(value=value, half=half or math.nan, prompts=len(each))


def token_sentences(tokens: pd.DataFrame) -> Iterator[str]:
    """How many positions changed, and how concentrated the change is."""
    from sharpscope.surface.compare import CHANGED
    from sharpscope.surface.swap import SHARES

    js = tokens["js"].sort_values(ascending=False).to_numpy()
    other = 1 - tokens["same_top"].mean()
    moved = (tokens["js"] > CHANGED).mean()
    yield (
        f"tokens: {len(js)} positions of {tokens['row'].nunique()} completions: {moved:.1%} changed by more than {CHANGED} nats (JS "
        f"divergence), {other:.1%} have another most likely token"
    )
    if js.sum() > 0:
        counts = [max(1, round(share * len(js))) for share in SHARES]
        shares = " / ".join(f"{share:.0%}" for share in SHARES)
        parts = " / ".join(f"{js[:count].sum() / js.sum():.0%}" for count in counts)
        yield f"the {shares} most changed positions hold {parts} of the divergence"
    change = (tokens["logp_tuned"] - tokens["logp_base"]).mean()
    yield f"mean Δ log p of the tokens {change:+.3g} nats"


def weight_sentences(weights: pd.DataFrame) -> Iterator[str]:
    """How far the weights moved, in how many dimensions, and where."""
    norm = math.sqrt((weights["norm"] ** 2).sum())
    whole = math.sqrt((weights["base_norm"] ** 2).sum())
    changed = (weights["changed_bfloat16"] * weights["size"]).sum() / weights["size"].sum()
    yield f"weights: the change has the norm {norm:.3g}, {norm / whole:.2%} of the weights'; {changed:.1%} differ in bfloat16"
    matrices = weights.dropna(subset=["effective_rank"])
    if len(matrices):
        names = ["effective_rank", "principal_share", "principal_random", "angle"]
        rank, share, chance, angle = matrices[names].median()
        yield (
            f"of a matrix (median): effective rank {rank:.3g}; {share:.2%} of the change is within the "
            f"top singular vectors of both sides, {chance:.2%} of a random one would be; they turn by {angle:.2g}°"
        )


def curvature_sentences(rows: list[Estimate], prompts: int) -> Iterator[str]:
    """The curvature along the change in units of the largest eigenvalue and of a random direction's."""
    from sharpscope.analysis.measures import Z
    from sharpscope.analysis.text import value_text

    known = {row.quantity: row for row in rows}
    along, top, random = (known[name] for name in ("along_change", "largest", "along_random"))
    half = Z * along.prompt_std_error
    top_half = Z * top.prompt_std_error
    sure = half < abs(along.value) and top_half < abs(top.value)
    share = f"{along.value / top.value:.2%} of " if sure else ""
    doubt = "" if top.converged else " (not converged)"
    yield (
        f"curvature of nll along the change {value_text(along.value, half)} ({prompts} prompts); "
        f"{share}the largest eigenvalue {value_text(top.value, top_half)}{doubt}; "
        f"along random directions {value_text(random.value, Z * random.std_error)}"
    )


def sharpness_sentences(found: dict[str, list[Estimate]], names: list[str]) -> Iterator[str]:
    """Loss and sharpness of both, with the difference paired by prompt."""
    from sharpscope.analysis.measures import Z
    from sharpscope.analysis.text import SAME, change_text, value_text

    titles = {
        "loss": "nll",
        "sam": "SAM sharpness",
        "sam_cross_fitted": "the same, cross-fitted",
        "average": "average sharpness",
    }
    for quantity, title in titles.items():
        base, tuned = (
            next(row for row in found[name] if row.quantity == quantity) for name in names
        )
        if not len(base.prompt_values) or len(base.prompt_values) != len(tuned.prompt_values):
            continue
        noise = 0.0
        radius = "" if math.isnan(base.rho) else f" at radius {base.rho:.2g}"
        if quantity == "average":  # over random draws
            noise = Z * math.hypot(base.std_error, tuned.std_error)
            radius = f" under noise of {base.rho:.0%} of the weights"
        difference = paired(base.prompt_values, tuned.prompt_values, noise)
        said = change_text(difference.value, difference.half) if difference.half > 0 else SAME
        texts = (
            f"{name} {value_text(row.value, Z * row.prompt_std_error)}"
            for name, row in zip(names, (base, tuned), strict=True)
        )
        yield f"{title}{radius}: {', '.join(texts)}; difference {said} over {difference.prompts} prompts"
        if quantity == "sam" and difference.prompts < ENOUGH:
            yield f"  with {difference.prompts} prompts plain SAM sharpness is too high; the cross-fitted one is too low"


def swap_sentences(swap: pd.DataFrame, names: list[str]) -> Iterator[str]:
    """Accuracy of both, and what of the gain remains when only changed positions are sampled from the tuned model."""
    arms = swap.pivot(index="prompt", columns=["arm", "share"], values="correct")
    base, tuned = arms["base", 0.0], arms["tuned", 1.0]
    gain = paired(base, tuned)
    verdict = "" if gain.seen else ", not distinguishable"
    yield (
        f"held-out accuracy at T = 1: {names[0]} {base.mean():.1%}, {names[1]} {tuned.mean():.1%}; "
        f"difference {gain.value:+.1%}{gain.error} over {gain.prompts} prompts{verdict}"
    )
    titles = {"changed": "most changed", "random": "random"}
    for arm, share in dict.fromkeys(zip(swap["arm"], swap["share"], strict=True)):
        if arm not in titles:
            continue
        part = paired(base, arms[arm, share])
        kept = ""
        if gain.seen and part.seen:
            kept = f", {part.value / gain.value:.0%} of the gain"
        yield f"  {share:.0%} {titles[arm]} positions from {names[1]}: {part.value:+.1%}{part.error}{kept}"


def _layers(weights: pd.DataFrame) -> pd.DataFrame:
    """Change of the weights by layer and kind, in the model's order."""
    from sharpscope.analysis.text import number

    parts = weights.assign(
        square=weights["norm"] ** 2,
        changed=weights["changed_bfloat16"] * weights["size"],
    )
    found = parts.groupby(["layer", "kind"], sort=False)
    sums = found[["square", "changed", "size"]].sum()
    columns = {
        "norm": sums["square"] ** 0.5,
        "largest singular value": found["spectral_norm"].max(),
        "effective rank": found["effective_rank"].median(),
        "angle [°]": found["angle"].max(),
        "in bfloat16 [%]": 100 * sums["changed"] / sums["size"],
    }
    return sums[[]].assign(**columns).map(number).reset_index()
