"""`sharpscope compare`: what differs between two checkpoints of a model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from sharpscope.cli.console import Json, print_json, print_sections, say
from sharpscope.cli.probing import SEED, short_names

if TYPE_CHECKING:
    import pandas as pd

    from sharpscope.policy import Policy
    from sharpscope.surface import Estimate, Objective

ENOUGH = 200  # prompts from which sharpness has little bias; docs/explanations/sharpness.md
CURVATURE_PROMPTS = 32


def compare(
    base: Annotated[str, Argument(help="Model before: embedded:NAME, a folder, or a hub id.")],
    tuned: Annotated[str, Argument(help="Model after, of the same architecture.")],
    data: Annotated[Path, Option(help="JSONL or Parquet with prompt and completion.")],
    task: Annotated[
        str | None,
        Option(help="Task whose held-out prompts both answer: a kind, or module:function."),
    ] = None,
    prompts: Annotated[int, Option(min=2, help="Prompts of the data, and held-out ones.")] = 200,
    max_new_tokens: Annotated[int, Option(min=1, help="Length of an answer to the task.")] = 192,
    prompt_format: Annotated[
        str, Option(help="As in the training: auto (chat where there is a template), chat, plain.")
    ] = "auto",
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
    tables, said = _measured(first, second, names, batch.objectives[0])
    if chosen is not None:
        from sharpscope.config.run import SamplingSpec
        from sharpscope.surface.swap import swap_test

        splits = chosen.splits()
        held_out = (splits.get("heldout") or splits["train"])[:prompts]
        sampling = SamplingSpec(max_new_tokens=max_new_tokens)
        tables["swap"] = swap_test(first, second, chosen, held_out, sampling, seed=SEED)
        said += list(swap_sentences(tables["swap"], names))
    else:
        said.append("accuracy and the swap test: not measured; name the task with --task")
    out.mkdir(parents=True, exist_ok=True)
    for name, table in tables.items():
        table.to_parquet(out / f"{name}.parquet", index=False)
    if json:
        records = tables["probes"].replace({pd.NA: None}).to_dict("records")
        print_json({"sentences": said, "rows": records, "written": str(out)})
        return
    say("\n".join(said))
    print_sections([Section("Weights by layer", _layers(tables["weights"]))])
    typer.echo(f"written to {out}/: {', '.join(f'{name}.parquet' for name in tables)}")


def _measured(
    before: Policy, after: Policy, names: list[str], objective: Objective
) -> tuple[dict[str, pd.DataFrame], list[str]]:
    """The tables `tokens`, `weights` and `probes`, and what they say."""
    import pandas as pd
    import torch

    from sharpscope.config.run import ProbesSpec
    from sharpscope.surface import ProbeBatch, choose_radius, lm_surface
    from sharpscope.surface.compare import change_curvature, sharpness_of, token_changes
    from sharpscope.surface.spectrum import lanczos_capacity
    from sharpscope.surface.weights import parameter_change, weight_changes

    base, tuned = before.model, after.model
    change = parameter_change(base, tuned)
    lanczos_capacity(change, 2)  # an error before anything expensive
    tables = {"weights": weight_changes(base, tuned)}
    said = list[str]()
    radius = choose_radius(base, ProbeBatch("data", (objective,)), ProbesSpec())
    with lm_surface(base, objective) as first, lm_surface(tuned, objective) as second:
        tables["tokens"] = token_changes(first, second)
        found: dict[str, list[Estimate]] = {}
        for name, surface in zip(names, (first, second), strict=True):
            found[name] = sharpness_of(surface, radius.rho, SEED)
        prompts = torch.tensor(objective.batch.prompts)
        few = second.prompts(prompts < CURVATURE_PROMPTS)
        curved = change_curvature(few, change, SEED)
        count = len(few.objective.prompt_weight)
    found[names[1]] += curved
    said += token_sentences(tables["tokens"])
    said += weight_sentences(tables["weights"])
    said += curvature_sentences(curved, count)
    said += sharpness_sentences(found, names)
    rows = [{"checkpoint": name} | vars(row) for name, each in found.items() for row in each]
    tables["probes"] = pd.DataFrame(rows).drop(columns="prompt_values")
    return tables, said


def token_sentences(tokens: pd.DataFrame) -> Iterator[str]:
    """How many positions changed, and how concentrated the change is."""
    from sharpscope.surface.compare import CHANGED
    from sharpscope.surface.swap import SHARES

    js = tokens["js"].sort_values(ascending=False).to_numpy()
    parts = [f"{js[: max(1, round(share * len(js)))].sum() / js.sum():.0%}" for share in SHARES]
    shares = " / ".join(f"{share:.0%}" for share in SHARES)
    other = 1 - tokens["same_top"].mean()
    moved = (tokens["js"] > CHANGED).mean()
    yield (
        f"tokens: {len(js)} positions of {tokens['row'].nunique()} completions: {moved:.1%} changed by more than {CHANGED} nats (JS "
        f"divergence), {other:.1%} have another most likely token"
    )
    if js.sum() > 0:
        yield f"the {shares} most changed positions hold {' / '.join(parts)} of the divergence"
    yield f"mean Δ log p of the tokens {(tokens['logp_tuned'] - tokens['logp_base']).mean():+.3g} nats"


def weight_sentences(weights: pd.DataFrame) -> Iterator[str]:
    """How far the weights moved, in how many dimensions, and where."""
    norm = math.sqrt((weights["norm"] ** 2).sum())
    whole = math.sqrt(((weights["norm"] / weights["relative_norm"]) ** 2).sum())
    changed = (weights["changed_bfloat16"] * weights["size"]).sum() / weights["size"].sum()
    yield f"weights: the change has the norm {norm:.3g}, {norm / whole:.2%} of the weights'; {changed:.1%} differ in bfloat16"
    matrices = weights.dropna(subset=["effective_rank"])
    if len(matrices):
        share = matrices["principal_share"].median()
        chance = matrices["principal_random"].median()
        yield (
            f"of a matrix (median): effective rank {matrices['effective_rank'].median():.3g}; {share:.2%} of the change is within the "
            f"top singular vectors of both sides, {chance:.2%} of a random one would be; they turn by {matrices['angle'].median():.2g}°"
        )


def curvature_sentences(rows: list[Estimate], prompts: int) -> Iterator[str]:
    """The curvature along the change in units of the largest eigenvalue and of a random direction's."""
    from sharpscope.analysis.measures import Z
    from sharpscope.analysis.text import value_text

    known = {row.quantity: row for row in rows}
    along, top, random = (known[name] for name in ("along_change", "largest", "along_random"))
    half = Z * along.prompt_std_error
    share = "" if half > abs(along.value) else f"{along.value / top.value:.2%} of "
    doubt = "" if top.converged else " (not converged)"
    yield (
        f"curvature of nll along the change {value_text(along.value, half)} ({prompts} prompts); "
        f"{share}the largest eigenvalue {value_text(top.value, Z * top.prompt_std_error)}{doubt}; "
        f"along random directions {value_text(random.value, Z * random.std_error)}"
    )


def sharpness_sentences(found: dict[str, list[Estimate]], names: list[str]) -> Iterator[str]:
    """Loss and sharpness of both, with the difference paired by prompt."""
    import torch

    from sharpscope.analysis.measures import Z
    from sharpscope.analysis.text import SAME, change_text, value_text
    from sharpscope.surface.compare import paired

    titles = {"loss": "nll", "sam": "SAM sharpness", "sam_cross_fitted": "the same, cross-fitted"}
    titles["average"] = "average sharpness"
    for quantity, title in titles.items():
        both = [next(r for r in found[name] if r.quantity == quantity) for name in names]
        values = [torch.tensor(row.prompt_values) for row in both]
        if not (len(values[0]) and len(values[0]) == len(values[1])):
            continue
        noise = math.hypot(*(row.std_error for row in both)) if quantity == "average" else 0.0
        difference = paired(values[0], values[1], noise)
        said = change_text(difference.value, difference.half) if difference.half > 0 else SAME
        radius = "" if math.isnan(both[0].rho) else f" at radius {both[0].rho:.2g}"
        texts = (
            f"{name} {value_text(row.value, Z * row.prompt_std_error)}"
            for name, row in zip(names, both, strict=True)
        )
        yield f"{title}{radius}: {', '.join(texts)}; difference {said} over {difference.prompts} prompts"
        if quantity == "sam" and difference.prompts < ENOUGH:
            yield f"  with {difference.prompts} prompts plain SAM sharpness is too high; the cross-fitted one is too low"


def swap_sentences(swap: pd.DataFrame, names: list[str]) -> Iterator[str]:
    """Accuracy of both, and what of the gain remains when only changed positions are sampled from the tuned model."""
    import torch

    from sharpscope.surface.compare import paired

    arms = {
        (str(arm), float(share)): torch.tensor(  # type: ignore[arg-type]
            same.sort_values("prompt")["correct"].to_numpy()
        )
        for (arm, share), same in swap.groupby(["arm", "share"], sort=False)
    }
    base = arms["base", 0.0]
    tuned = arms["tuned", 1.0]
    gain = paired(base, tuned)
    verdict = "" if gain.seen else ", not distinguishable"
    yield (
        f"held-out accuracy at T = 1: {names[0]} {float(base.mean()):.1%}, {names[1]} {float(tuned.mean()):.1%}; "
        f"difference {gain.value:+.1%} ± {gain.half:.1%} over {gain.prompts} prompts{verdict}"
    )
    for (arm, share), correct in arms.items():
        if arm in ("changed", "random"):
            part = paired(base, correct)
            kept = f", {part.value / gain.value:.0%} of the gain" if gain.seen else ""
            half = f" ± {part.half:.1%}" if part.half > 0 else ""
            which = "most changed" if arm == "changed" else "random"
            yield f"  {share:.0%} {which} positions from {names[1]}: {part.value:+.1%}{half}{kept}"


def _layers(weights: pd.DataFrame) -> pd.DataFrame:
    """Change of the weights by layer and kind, the layers in order."""
    import pandas as pd

    from sharpscope.analysis.text import number

    order = weights["layer"].map(lambda name: int(name) if name.isdecimal() else -1)
    groups = weights.assign(order=order).groupby(["order", "layer", "kind"], sort=True)
    rows = []
    for (_, layer, kind), part in groups:
        size = part["size"].sum()
        row = {"layer": layer, "kind": kind, "norm": math.sqrt((part["norm"] ** 2).sum())}
        row["largest singular value"] = part["spectral_norm"].max()
        row["effective rank"] = part["effective_rank"].median()
        row["angle [°]"] = part["angle"].max()
        row["in bfloat16 [%]"] = 100 * (part["changed_bfloat16"] * part["size"]).sum() / size
        rows.append({k: v if isinstance(v, str) else number(v) for k, v in row.items()})
    return pd.DataFrame(rows)
