"""Run the loss-surface probes that a `ProbesSpec` asks for.

`run` is the one implementation behind `sharpscope probe` and the probes of a training run. Callers choose the batches
(`probe_set_batches` makes those of a probe set) and decide what to do with the rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sharpscope.config.probes import Backend, ObjectiveName, ProbesSpec
from sharpscope.errors import first_line
from sharpscope.probes.estimate import Estimate, attempted, labeled, with_prompts
from sharpscope.probes.hessian import adamw_preconditioner, adamw_threshold, curvature
from sharpscope.probes.language_model import LmSurface, lm_surface
from sharpscope.probes.objectives import Objective, rollout_batch
from sharpscope.probes.perturbation import Radius, find_radius, sharpness
from sharpscope.probes.probe_set import Draw, Drawn, ProbeSet
from sharpscope.probes.surface import length

TOLERANCE = 1e-2  # relative residual of eigenpairs


@dataclass(frozen=True)
class ProbeBatch:
    """The losses to probe on one set of prompts."""

    name: str  # value of the `probe_set` column
    objectives: tuple[Objective, ...] = ()
    seed: int = 0  # of every random vector


@dataclass(frozen=True)
class Measured:
    """Results of some probes of one loss of one batch."""

    batch: ProbeBatch
    estimates: tuple[Estimate, ...]
    radius: Radius | None = None  # of the perturbations; None before it is known


def run(
    model: nn.Module,
    batches: Iterable[ProbeBatch],
    spec: ProbesSpec,
    *,
    radius: Radius | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    curvature: bool = True,
    perturbation: bool = True,
    backend: Backend = "lanczos",
) -> Iterator[Measured]:
    """Probe a model's loss surface on each batch.

    Results are yielded as they are found, so that what was measured before an interruption is not lost. A measure that fails gives
    a row without value that says why, and the others go on. The model is restored after each loss.

    Args:
        model: Hugging Face causal language model.
        batches: a generator may draw completions of the model lazily.
        spec: probes to run and their memory limits.
        radius: of the perturbations, such as that of an earlier probe; None: by `choose_radius` on the first batch.
        optimizer: AdamW for the preconditioned Hessian; None leaves that out.
        curvature: run the curvature probes on the spec's `curvature_prompts`.
        perturbation: run the perturbation probes.
        backend: `lanczos`, or `pyhessian` for its eigenvalues and trace.

    Raises:
        CheckError: the probed loss differs from the model's own (see `lm_surface`).
        UserError: the model or a batch cannot be probed.
    """
    for batch in batches:
        if batch.objectives and radius is None and perturbation:
            radius = choose_radius(model, batch, spec)
            if radius.evaluations or radius.why:
                yield Measured(batch, _named(batch, "expected_failure", [radius.estimate()]), radius)
        for objective in batch.objectives:
            with limited_surface(model, objective, spec) as surface:
                loss, gradient, base = surface.gradient_by_prompt()
                rho = math.nan if radius is None else radius.rho
                point = Point(surface, spec, batch.seed, (loss, gradient), base, rho, optimizer, backend)
                for name, probe in PROBES.items():
                    if (name != "perturbation" or perturbation) and (name != "curvature" or curvature):
                        for rows in probe(point):
                            yield Measured(batch, _named(batch, objective.name, rows), radius)


def choose_radius(model: nn.Module, batch: ProbeBatch, spec: ProbesSpec) -> Radius:
    """The spec's radius, or for `auto` that of `find_radius` on the expected failure of a batch.

    Without rewarded completions, every text of the batch counts as a success, such as the verified solutions of `nll`; saturation
    depends on correct completions only.
    """
    if spec.rho != "auto":
        return Radius(spec.rho)
    rewarded = [one for one in batch.objectives if one.name != "nll"]
    objective = (rewarded or batch.objectives)[0]
    rows = objective.batch if rewarded else replace(objective.batch, reward=torch.ones_like(objective.batch.reward))
    try:
        with limited_surface(model, Objective("expected_failure", rows, objective.temperature), spec) as surface:
            return find_radius(surface)
    except torch.OutOfMemoryError as problem:
        return Radius(math.nan, why=f"no radius: {first_line(problem)}; lower probes.microbatch_tokens")


def _named(batch: ProbeBatch, functional: str, rows: list[Estimate]) -> tuple[Estimate, ...]:
    return tuple(labeled(rows, probe_set=batch.name, functional=functional))


@dataclass(frozen=True)
class Point:
    """One loss at the model's weights, which all its probes share."""

    surface: LmSurface  # guarded
    spec: ProbesSpec
    seed: int  # of random vectors
    at: tuple[float, Tensor]  # L(θ) and ∇L(θ) (P,)
    base: Tensor  # (k,) the loss by prompt
    rho: float  # radius of perturbations; NaN if none was found
    optimizer: torch.optim.Optimizer | None  # AdamW for the preconditioned Hessian
    backend: Backend  # of eigenvalues and trace


def _losses(point: Point) -> Iterator[list[Estimate]]:
    """The loss, and the norm of its gradient."""
    loss, norm = point.at[0], length(point.at[1])
    no_loss = "" if math.isfinite(loss) else "the loss is not finite"
    no_norm = "" if math.isfinite(norm) else "the gradient is not finite"
    rows = [with_prompts(Estimate("loss", "loss", loss, why=no_loss), point.base)]
    yield [*rows, Estimate("perturbation", "gradient_norm", norm, why=no_norm)]


def _perturbations(point: Point) -> Iterator[list[Estimate]]:
    """The sharpness measures of the spec at the radius."""
    for kind in point.spec.kinds if math.isfinite(point.rho) else ():
        measure = partial(sharpness, point.surface, None, point.rho, kind, at=point.at, base=point.base)
        rows = attempted("perturbation", kind, lambda measure=measure: measure().estimates())  # type: ignore[misc]
        yield labeled(rows, seed=point.seed)


def _curvatures(point: Point) -> Iterator[list[Estimate]]:
    """Curvature on the first prompts: of the Hessian, and of the Hessian preconditioned by AdamW."""
    spec, optimizer = point.spec, point.optimizer
    if not spec.curvature_prompts:
        return
    surface = _first_prompts(point.surface, spec.curvature_prompts)
    at = point.at if surface is point.surface else surface.gradient()
    limits: dict[str, Any] = {"tolerance": TOLERANCE, "max_products": spec.max_products, "memory_mb": spec.memory_mb}
    limits |= {"check": spec.check, "at": at, "by_prompt": True}

    def plain() -> list[Estimate]:
        options: dict[str, Any] = {"top": spec.top, "trace_probes": spec.trace_probes, "backend": point.backend}
        return curvature(surface, None, point.seed, **options, **limits).estimates()[1:]

    def preconditioned() -> list[Estimate]:
        assert optimizer is not None
        diagonal = adamw_preconditioner(optimizer, surface.parameters)
        options: dict[str, Any] = {"preconditioner": diagonal, "smallest": False, "trace_probes": 0}
        rows = curvature(surface, None, point.seed, **options, **limits).estimates("preconditioned_")[1:]
        group = optimizer.param_groups[0]
        if group["lr"] > 0:
            limit = adamw_threshold(float(group["lr"]), float(group["betas"][0]))
            rows.append(Estimate("curvature", "preconditioned_threshold", limit))
        return rows

    prompts = len(surface.objective.prompt_weight)
    rows = attempted("curvature", "largest", plain)
    yield labeled(rows, prompts=prompts)
    if optimizer is not None:
        yield labeled(attempted("curvature", "preconditioned_largest", preconditioned), prompts=prompts)


PROBES: dict[str, Callable[[Point], Iterator[list[Estimate]]]] = {
    "loss": _losses,
    "perturbation": _perturbations,
    "curvature": _curvatures,
}
"""What is measured of each loss, the cheap measures first: name → function that yields rows of the `probes` table."""


def _first_prompts(surface: LmSurface, count: int) -> LmSurface:
    """The surface over the rows of the first `count` prompts; the surface itself if there are no more."""
    objective = surface.objective
    if count >= len(objective.prompt_weight):
        return surface
    rows = [row for row, prompt in enumerate(objective.batch.prompts) if prompt < count]
    return surface.over(objective.rows(torch.tensor(rows, device=objective.batch.lengths.device)))


def limited_surface(model: nn.Module, objective: Objective, spec: ProbesSpec) -> AbstractContextManager[LmSurface]:
    """`lm_surface` within the memory limits of a spec, with its self-check."""
    return lm_surface(
        model, objective, microbatch_tokens=spec.microbatch_tokens, memory_mb=spec.memory_mb, check=spec.check
    )


def probe_set_batches(
    probe_set: ProbeSet,
    spec: ProbesSpec,
    draw: Draw,
    *,
    temperature: float = 1.0,
    seed: Callable[[str], int] = lambda part: 0,
) -> Iterator[ProbeBatch]:
    """Batches of a probe set, one for each split that the spec names, whose completions are drawn when it is requested.

    Args:
        probe_set: fixed prompts.
        spec: names the losses, the splits and the numbers of completions.
        draw: draws completions of the probed model.
        temperature: of the completions and the losses.
        seed: of a split.
    """
    for split in probe_set.splits:
        if split in spec.splits:
            part = seed(split)
            objectives = [
                Objective("nll", probe_set.solutions(split), temperature)
                if name == "nll"
                else rollout_objective(name, probe_set.draw(split, spec.samples, draw, part), temperature=temperature)
                for name in dict.fromkeys(spec.functionals)
            ]
            yield ProbeBatch(probe_set.name(split), tuple(objectives), part)


def rollout_objective(name: ObjectiveName, drawn: Drawn, *, temperature: float = 1.0) -> Objective:
    """A loss over drawn completions, with the success as reward."""
    return Objective(name, rollout_batch(drawn.rollouts, reward=drawn.correct.double()), temperature)
