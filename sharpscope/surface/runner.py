"""Run the loss-surface probes that a `ProbesSpec` asks for, on a probe set or on given texts.

`run` is the one implementation behind `sharpscope probe` and the probes of a training run. Callers choose the batches and
decide what to do with the rows. A probe set is fixed prompts in a Parquet file that the runs of a study share.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from sharpscope.config.run import (
    Backend,
    ObjectiveName,
    ProbedOperator,
    ProbesSpec,
    SharpnessKind,
)
from sharpscope.errors import UserError, first_line, nearest
from sharpscope.policy import render_prompts
from sharpscope.policy.directions import length
from sharpscope.progress import Tell, silent, tell_price
from sharpscope.surface.algorithms.density import ITERATIONS
from sharpscope.surface.estimate import Estimate, attempted, labeled, with_prompts
from sharpscope.surface.language_model import (
    LmSurface,
    Objective,
    TokenBatch,
    completion_batch,
    lm_surface,
    rollout_batch,
    select_parameters,
)
from sharpscope.surface.operators import adam_scale, threshold
from sharpscope.surface.perturbation import (
    FORWARD,
    PAIRS,
    Radius,
    average_sharpness,
    cross_fitted,
    find_radius,
    sharpness,
)
from sharpscope.surface.spectrum import PRODUCT, curvature
from sharpscope.tasks import Example, Task
from sharpscope.traces.files import publish

if TYPE_CHECKING:
    import pandas as pd

    from sharpscope.policy import Policy, Rollouts

TOLERANCE = 1e-2  # relative residual of eigenpairs
TOP = 2
MAX_PRODUCTS = 60
TRACE_PROBES = 4
"""Eigenvalues, Hessian-vector products for them, and random vectors for the trace."""


@dataclass(frozen=True)
class ProbeBatch:
    """The losses to probe on one set of prompts."""

    name: str  # value of the `probe_set` column
    objectives: tuple[Objective, ...] = ()
    seed: int = 0  # of every random vector


@dataclass(frozen=True)
class Measured:
    """Results of some probes of one loss of one batch."""

    estimates: list[Estimate]
    radius: Radius | None = None  # of the perturbations; None before it is known


def run(
    model: nn.Module,
    batches: Iterable[ProbeBatch],
    spec: ProbesSpec,
    *,
    radius: Radius | None = None,
    backend: Backend = "lanczos",
    optimizer: torch.optim.Optimizer | None = None,
    tell: Tell = silent,
) -> Iterator[Measured]:
    """Probe a model's loss surface on each batch; results are yielded as they are found.

    A measure that fails gives a row without value that says why, and the others go on.

    Args:
        model: Hugging Face causal language model.
        batches: a generator may draw completions of the model lazily.
        spec: probes to run and their memory limits.
        radius: of the perturbations, such as that of an earlier probe; None: by `choose_radius` on the first batch.
        backend: of `curvature`.
        optimizer: AdamW with the moments that `preconditioned` means.
        tell: is told how long a loss takes at most, from its first pass.

    Raises:
        CheckError: the probed loss differs from the model's own (see `lm_surface`).
        UserError: the model or a batch cannot be probed.
    """
    for selection in spec.parameters:
        select_parameters(model, selection)  # an unknown name is an error before anything expensive
    for batch in batches:
        labels = {"probe_set": batch.name}
        if batch.objectives and radius is None and spec.kinds:
            radius = choose_radius(model, batch, spec, tell)
            if radius.evaluations or radius.why:
                yield Measured(
                    labeled([radius.estimate()], functional="expected_failure", **labels), radius
                )
        for objective in batch.objectives:
            with limited_surface(model, objective, spec) as surface:
                began = time.perf_counter()
                loss, gradient, base = surface.gradient_by_prompt()
                one = time.perf_counter() - began
                what = f"{objective.name} of {batch.name}, {len(base)} prompts"
                tell_price(tell, what, one * passes(spec, len(base)))
                rho = math.nan if radius is None else radius.rho
                point = Point(
                    surface,
                    spec,
                    batch.seed,
                    (loss, gradient),
                    base,
                    rho,
                    backend,
                    optimizer,
                )
                for probe in PROBES.values():
                    for rows in probe(point):
                        counted = [replace(row, prompts=row.prompts or len(base)) for row in rows]
                        found = labeled(counted, functional=objective.name, **labels)
                        yield Measured(found, radius)


def passes(spec: ProbesSpec, prompts: int) -> float:
    """Forward and backward passes over so many prompts that the probes of a loss take at most, after that of its gradient."""
    costs = {"sam": 1 + 2 * FORWARD, "asam": FORWARD, "average": 2 * PAIRS * FORWARD}
    products = MAX_PRODUCTS + TRACE_PROBES + ITERATIONS * spec.density_probes
    # residuals, and values by prompt, of the largest and the smallest eigenvalues
    products += 2 * (TOP + 1)
    operators = len(spec.operators) * len(spec.parameters) * products * PRODUCT
    share = min(spec.curvature_prompts, prompts) / prompts
    return sum(costs[kind] for kind in spec.kinds) + share * operators


def choose_radius(
    model: nn.Module,
    batch: ProbeBatch,
    spec: ProbesSpec,
    tell: Tell = silent,
) -> Radius:
    """The spec's radius, or for `auto` that of `find_radius` on the expected failure of a batch.

    Without rewarded completions every text of the batch counts as a success, such as the verified solutions of `nll`.
    """
    if spec.rho != "auto":
        return Radius(spec.rho)
    rewarded = [one for one in batch.objectives if one.name != "nll"]
    objective = (rewarded or batch.objectives)[0]
    rows = (
        objective.batch
        if rewarded
        else replace(objective.batch, reward=torch.ones_like(objective.batch.reward))
    )
    try:
        with limited_surface(
            model,
            Objective("expected_failure", rows, objective.temperature),
            spec,
        ) as surface:
            return find_radius(surface, tell)
    except torch.OutOfMemoryError as problem:
        return Radius(math.nan, why=f"no radius: {first_line(problem)}; set probes.rho")


@dataclass(frozen=True)
class Point:
    """One loss at the model's weights, which all its probes share."""

    surface: LmSurface  # guarded
    spec: ProbesSpec
    seed: int  # of random vectors
    at: tuple[float, Tensor]  # L(θ) and ∇L(θ) (P,)
    base: Tensor  # (k,) the loss by prompt
    rho: float  # radius of perturbations; NaN if none was found
    backend: Backend  # of eigenvalues and trace
    optimizer: torch.optim.Optimizer | None = None  # with the moments of `preconditioned`


def _losses(point: Point) -> Iterator[list[Estimate]]:
    """The loss, and the norm of its gradient."""
    loss = point.at[0]
    norm = length(point.at[1])
    no_loss = "" if math.isfinite(loss) else "the loss is not finite"
    no_norm = "" if math.isfinite(norm) else "the gradient is not finite"
    rows = [with_prompts(Estimate("loss", "loss", loss, why=no_loss), point.base)]
    yield [*rows, Estimate("perturbation", "gradient_norm", norm, why=no_norm)]


def _perturbations(point: Point) -> Iterator[list[Estimate]]:
    """The sharpness measures of the spec at the radius."""
    given = point.surface, point.rho, point.seed, point.base

    def measure(kind: SharpnessKind) -> list[Estimate]:
        """The rows of one measure."""
        surface, rho, seed, base = given
        if kind == "average":
            return [average_sharpness(surface, seed, base)]
        return sharpness(surface, None, rho, kind, at=point.at, base=base).estimates()

    known = math.isfinite(point.rho)
    for kind in (kind for kind in point.spec.kinds if known or kind == "average"):
        yield labeled(attempted("perturbation", kind, partial(measure, kind)), seed=point.seed)
        if kind == "sam":
            halves = attempted("perturbation", "sam_cross_fitted", lambda: [cross_fitted(*given)])
            yield labeled(halves, seed=point.seed)


def _curvatures(point: Point) -> Iterator[list[Estimate]]:
    """Eigenvalues, trace and density of the operators on the first prompts, for each selection of parameters."""
    spec = point.spec
    objective = point.surface.objective
    if not spec.curvature_prompts:
        return
    few = point.surface.prompts(torch.tensor(objective.batch.prompts) < spec.curvature_prompts)
    prompts = len(few.objective.prompt_weight)

    def measure(surface: LmSurface, name: ProbedOperator) -> list[Estimate]:
        """The rows of one operator on a selection of parameters."""
        scale, limit = None, list[Estimate]()
        if name == "adamw":
            if point.optimizer is None:
                raise UserError("operators, adamw: needs the moments of a run's checkpoint")
            scale = adam_scale(point.optimizer, surface.parameters)
            limit = [Estimate("curvature", "adamw.threshold", threshold(point.optimizer))]
        found = curvature(
            surface,
            None,
            point.seed,
            top=TOP,
            tolerance=TOLERANCE,
            max_products=MAX_PRODUCTS,
            trace_probes=TRACE_PROBES,
            backend=point.backend,
            memory_mb=spec.memory_mb,
            check=spec.check,
            by_prompt=True,
            operator="hessian" if name == "adamw" else name,
            scale=scale,
            density_probes=spec.density_probes,
        ).estimates()
        return [*found, *limit]

    for selection in spec.parameters:
        # the other parameters are fixed: the operators are blocks of the whole ones
        surface = few.over(few.objective, selection)
        for operator in spec.operators:
            rows = attempted("curvature", "largest", partial(measure, surface, operator))
            yield labeled(rows, prompts=prompts, parameters=selection)


PROBES: dict[str, Callable[[Point], Iterator[list[Estimate]]]] = {
    "loss": _losses,
    "perturbation": _perturbations,
    "curvature": _curvatures,
}
"""What is measured of each loss, the cheap measures first: name → function that yields rows of the `probes` table."""


def limited_surface(
    model: nn.Module,
    objective: Objective,
    spec: ProbesSpec,
    *,
    twice: bool = False,
) -> AbstractContextManager[LmSurface]:
    """`lm_surface` within the memory limits of a spec, with its self-check.

    Its attention is fused where neither the spec's operators nor the caller (`twice`) need a second derivative.
    """
    fused = not twice and set(spec.operators) == {"finite_difference"}
    return lm_surface(model, objective, memory_mb=spec.memory_mb, check=spec.check, fused=fused)


# -- Probe sets

SPLITS = ("train", "heldout")


@dataclass(frozen=True)
class ProbeItem:
    """A prompt of a probe set."""

    split: str  # `train` or `heldout`
    example: Example
    # as the initial policy's tokenizer renders it, any prefill included
    prompt_ids: tuple[int, ...]
    # a completion that the task scored correct, end token included; empty: none found
    solution: tuple[int, ...] = ()


@dataclass(frozen=True)
class Drawn:
    """Completions of the probed policy with their success; rows of a prompt are adjacent."""

    rollouts: Rollouts  # N rows
    correct: Tensor  # (N,) 0 or 1 (or a success between)


# (examples, samples, seed) -> `samples` completions per example, drawn from the probed policy.
Draw = Callable[[Sequence[Example], int, int], Drawn]


@dataclass(frozen=True)
class ProbeSet:
    """Fixed prompts with the key that they were built from. Equal keys and contents have equal hashes."""

    task: str  # name, with the settings of its data
    policy: str  # the initial policy that all methods of the study start from
    seed: int  # of the choice of prompts and of the solutions
    items: tuple[ProbeItem, ...]  # those of one split adjacent

    @property
    def content_hash(self) -> str:
        """First 16 hex digits of the SHA-256 of key and items."""
        canonical = [self.task, self.policy, self.seed, [_row(item) for item in self.items]]
        text = json.dumps(canonical, sort_keys=True, ensure_ascii=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def name(self, split: str) -> str:
        """Value of the `probe_set` column: `<task>/<split>@<hash>`."""
        return f"{self.task}/{split}@{self.content_hash}"

    @property
    def splits(self) -> tuple[str, ...]:
        """The splits that have items."""
        return tuple(split for split in SPLITS if any(item.split == split for item in self.items))

    def split(self, split: str) -> tuple[ProbeItem, ...]:
        """The items of one split, which must exist."""
        chosen = tuple(item for item in self.items if item.split == split)
        if not chosen:
            raise UserError(
                f"probe set, split '{split}'{nearest(split, {item.split for item in self.items})}"
            )
        return chosen

    def first(self, prompts: int) -> ProbeSet:
        """The first prompts of each split, under a hash of their own: numbers on different prompts are not compared."""
        kept = [item for split in self.splits for item in self.split(split)[:prompts]]
        return replace(self, items=tuple(kept))

    def solutions(self, split: str) -> TokenBatch:
        """The stored solutions of a split, of which there must be one, as rows for `nll`; only solution tokens are scored."""
        solved = [item for item in self.split(split) if item.solution]
        if not solved:
            raise UserError(
                f"probe set, split '{split}': no prompt has a verified solution; draw more, or take a better policy"
            )
        return completion_batch([(item.prompt_ids, item.solution) for item in solved])

    def draw(
        self,
        split: str,
        samples: int,
        draw: Draw,
        seed: int,
    ) -> Drawn:
        """New completions of the probed policy on the prompts of a split."""
        return draw([item.example for item in self.split(split)], samples, seed)

    def save(self, path: Path | str) -> Path:
        """Write the Parquet file atomically and return its path."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        path = Path(path)
        rows = [_row(item) for item in self.items]
        key = {
            "task": self.task,
            "policy": self.policy,
            "seed": self.seed,
            "hash": self.content_hash,
        }
        ids = pa.list_(pa.int64())
        fields = [(name, pa.string()) for name in ("split", "prompt", "answer", "meta")]
        schema = pa.schema([*fields, ("prompt_ids", ids), ("solution", ids)])
        table = pa.Table.from_pylist(rows, schema).replace_schema_metadata(
            {"sharpscope.probe_set": json.dumps(key)}
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(path.name + ".tmp")
        pq.write_table(table, aside)
        publish(aside, path)
        return path

    @staticmethod
    def load(path: Path | str) -> ProbeSet:
        """Read a probe set.

        Raises:
            UserError: not a probe set, of another format, or changed since it was written.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            table = pq.read_table(path)
            key = json.loads((table.schema.metadata or {})[b"sharpscope.probe_set"])
            items = []
            for row in table.to_pylist():
                example = Example.from_row(row["prompt"], row["answer"], json.loads(row["meta"]))
                ids = tuple(row["prompt_ids"]), tuple(row["solution"])
                items.append(ProbeItem(row["split"], example, *ids))
            loaded = ProbeSet(key["task"], key["policy"], int(key["seed"]), tuple(items))
            intact = loaded.content_hash == key["hash"]
        except (OSError, pa.ArrowException, LookupError, ValueError, TypeError) as problem:
            raise UserError(
                f"probe_set, {path}: cannot be read as one ({type(problem).__name__}: {first_line(problem)})"
            ) from problem
        if not intact:
            raise UserError(
                f"probe_set, {path}: its contents do not match its hash {key['hash']}; it was changed or damaged"
            )
        return loaded


def build_probe_set(
    task: Task,
    draw: Draw,
    encode: Callable[[Sequence[Example]], Sequence[Sequence[int]]],
    *,
    name: str,
    policy: str,
    seed: int,
    train: int,
    heldout: int,
    tries: int = 8,
) -> ProbeSet:
    """Choose prompts and, for each, the first of `tries` completions of the initial policy that the task scores as correct.

    `encode` gives prompts as token ids, as the policy sees them. A split with fewer than `train` or `heldout` prompts is taken whole.
    """
    splits = task.splits()
    if not splits.get("train"):
        raise UserError(f"task, {task.name}: has no training prompts to probe")
    items: list[ProbeItem] = []
    for split, count in zip(SPLITS, (train, heldout), strict=True):
        given = splits.get(split, [])
        order = torch.randperm(len(given), generator=torch.Generator().manual_seed(seed))
        examples = [given[i] for i in order[:count].tolist()]
        if examples:
            solutions = _solutions(draw(examples, tries, seed), len(examples))
            found = zip(examples, encode(examples), solutions, strict=True)
            items += [
                ProbeItem(split, example, tuple(ids), solution) for example, ids, solution in found
            ]
    return ProbeSet(name, policy, seed, tuple(items))


def _solutions(drawn: Drawn, prompts: int) -> list[tuple[int, ...]]:
    """The first correct completion of each prompt without inserted tokens, one that was not cut if there is one; () if none."""
    rollouts = drawn.rollouts
    solutions: list[tuple[int, ...]] = [()] * prompts
    for cut in (False, True):
        for row in range(len(rollouts.input_ids)):
            prompt = int(rollouts.group[row])
            length = int(rollouts.completion_mask[row].sum())
            complete = length > 0 and bool(rollouts.completion_mask[row, :length].all())
            right = float(drawn.correct[row]) == 1.0 and bool(rollouts.truncated[row]) == cut
            if complete and right and not solutions[prompt]:
                solutions[prompt] = tuple(rollouts.completion_ids[row, :length].tolist())
    return solutions


def _row(item: ProbeItem) -> dict[str, object]:
    example = item.example
    chat = {
        "messages": list(example.messages),
        "prefill": example.prefill,
        "templated": example.templated,
    }
    meta = {**example.meta, **{name: value for name, value in chat.items() if value}}
    return {
        "split": item.split,
        "prompt": example.prompt,
        "answer": example.answer,
        "meta": json.dumps(meta, sort_keys=True, default=str),
        "prompt_ids": list(item.prompt_ids),
        "solution": list(item.solution),
    }


def probe_set_batches(
    probe_set: ProbeSet,
    spec: ProbesSpec,
    draw: Draw,
    *,
    temperature: float = 1.0,
    seed: Callable[[str], int] = lambda part: 0,
) -> Iterator[ProbeBatch]:
    """Batches of a probe set, one for each split that the spec names, whose completions are drawn when it is requested."""
    for split in probe_set.splits:
        if split in spec.splits:
            objectives = []
            part = seed(split)
            for name in dict.fromkeys(spec.functionals):
                if name == "nll":
                    objectives.append(Objective(name, probe_set.solutions(split), temperature))
                else:
                    drawn = probe_set.draw(split, spec.samples, draw, part)
                    objectives.append(rollout_objective(name, drawn, temperature=temperature))
            yield ProbeBatch(probe_set.name(split), tuple(objectives), part)


def rollout_objective(name: ObjectiveName, drawn: Drawn, *, temperature: float = 1.0) -> Objective:
    """A loss over drawn completions, with the success as reward."""
    return Objective(
        name,
        rollout_batch(drawn.rollouts, reward=drawn.correct.double()),
        temperature,
    )


# -- Texts


def read_rows(path: Path | str) -> pd.DataFrame:
    """Rows of a JSONL or Parquet file with the texts `prompt` and `completion`.

    Optional are `reward`, a success in [0, 1]; `truncated`, whether the completion was cut at a length limit, so that no end-of-text
    token is added; and `meta`, a dictionary with `messages`, `prefill` and `templated` (see `sharpscope.tasks.Example`). Where a row
    does not have them they are NaN, False and {}.
    """
    import pandas as pd

    path = Path(path)
    if not path.is_file():
        raise UserError(f"data, {path}: no such file")
    if path.suffix not in (".parquet", ".jsonl", ".json"):
        raise UserError(f"data, {path}: ends in '{path.suffix}'; give a .jsonl or .parquet file")
    try:
        if path.suffix == ".parquet":
            found = pd.read_parquet(path)
        else:
            found = pd.read_json(path, lines=True, dtype=False, convert_dates=False)
    except (OSError, ValueError) as problem:
        raise UserError(
            f"data, {path}: cannot be read as {path.suffix[1:]} ({problem})"
        ) from problem
    if found.empty:
        raise UserError(f"data, {path}: holds no rows")
    found = found.reindex(columns=["prompt", "completion", "reward", "truncated", "meta"])
    texts = found[["prompt", "completion"]].map(lambda value: isinstance(value, str)).all(axis=1)
    if not texts.all():
        raise UserError(
            f"data, {path} row {int(texts.argmin()) + 1}: needs the texts 'prompt' and 'completion'"
        )
    meta = found["meta"].map(lambda value: value if isinstance(value, dict) else {})
    reward = pd.to_numeric(found["reward"], errors="coerce").astype(float)
    return found.assign(reward=reward, truncated=found["truncated"] == 1, meta=meta)


def text_batches(
    policy: Policy,
    rows: pd.DataFrame,
    functionals: Sequence[ObjectiveName] = ("nll",),
    *,
    seed: int = 0,
    label: str = "data",
) -> list[ProbeBatch]:
    """The batch of given texts (see `read_rows`) for `run`, with `label` in the `probe_set` column.

    `nll` needs only texts. `expected_failure` needs rewards and assumes that the policy wrote the completions: the anchors
    are its own log-probabilities.
    """
    missing = int(rows["reward"].isna().sum())
    if missing and any(name != "nll" for name in functionals):
        raise UserError(
            f"data: {missing} of {len(rows)} rows have no reward, which {', '.join(functionals)} needs; use nll alone"
        )
    examples = [
        Example.from_row(prompt, "", meta)
        for prompt, meta in zip(rows["prompt"], rows["meta"], strict=True)
    ]
    prompts = render_prompts(examples, policy)
    pairs: list[tuple[Sequence[int], Sequence[int]]] = []
    texts = zip(prompts, rows["completion"], rows["truncated"], strict=True)
    for number, (prompt, completion, truncated) in enumerate(texts, 1):
        ids = list(policy.tokenizer(completion, add_special_tokens=False)["input_ids"])
        if not truncated and (not ids or ids[-1] not in policy.eos_ids) and policy.eos_ids:
            ids.append(policy.eos_ids[0])
        if not prompt or not ids:
            raise UserError(
                f"data, row {number}: the {'completion' if prompt else 'prompt'} is empty"
            )
        length = len(prompt) + len(ids)
        if policy.context is not None and length > policy.context:
            raise UserError(
                f"data, row {number}: {length} tokens, the context is {policy.context}; leave it out"
            )
        pairs.append((prompt, ids))
    reward = torch.tensor(rows["reward"].fillna(1.0).to_numpy(dtype=float))
    batch = completion_batch(pairs, reward=reward).to(policy.device)
    return [ProbeBatch(label, tuple(Objective(name, batch) for name in functionals), seed)]
