"""Run the loss-surface probes that a `ProbesSpec` asks for.

`run` is the one implementation behind `sharpscope probe`, `probe_policy` and the probes of a training run. Callers choose
the batches (`probe_set_batches` makes those of a probe set) and decide what to do with the rows.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor, nn

from sharpscope.config.probes import KINDS, Check, ObjectiveName, ProbesSpec
from sharpscope.errors import CheckError
from sharpscope.probes.estimate import Estimate, labeled, problems, with_prompts
from sharpscope.probes.gradient_norm import squared_gradient_norm
from sharpscope.probes.hessian import (
    Curvature,
    CurvatureSettings,
    Operator,
    adamw_preconditioner,
    adamw_threshold,
    curvature_of,
)
from sharpscope.probes.hessian.causal_lm import LmSurface, lm_surface
from sharpscope.probes.objectives import Objective, group_normalized, rollout_batch, staleness
from sharpscope.probes.parameter_groups import parameter_groups
from sharpscope.probes.perturbation import gradient_norm, loss_slices, m_sharpness_of, sharpness_grid
from sharpscope.probes.probe_set import Draw, Drawn, ProbeSet

SLICE_POINTS = tuple(i / 5 for i in range(-5, 6))  # of the largest radius


@dataclass(frozen=True)
class ProbeBatch:
    """The losses to probe on one set of prompts.

    Attributes:
        name: value of the `probe_set` column.
        objectives: the losses over this batch.
        seed: seed of every random vector.
        slices: take loss slices on this batch, where the spec asks for slices.
        drawn: completions for `squared_gradient_norm`; None leaves it out.
        temperature: softmax temperature of `drawn`.
    """

    name: str
    objectives: tuple[Objective, ...] = ()
    seed: int = 0
    slices: bool = True
    drawn: Drawn | None = None
    temperature: float = 1.0


@dataclass(frozen=True)
class Measured:
    """Results of the probes on one loss of one batch.

    Attributes:
        batch: the batch.
        estimates: rows of the `probes` table.
        objective: the loss, with the anchors it was evaluated with; None for the rows of `squared_gradient_norm`.
        curvature: curvature over all parameters, with eigenvectors; None if it was not measured or failed its check.
    """

    batch: ProbeBatch
    estimates: tuple[Estimate, ...]
    objective: Objective | None = None
    curvature: Curvature | None = None

    @property
    def problems(self) -> tuple[str, ...]:
        """One line for each estimate that is not reliable."""
        return problems(self.estimates)


def run(
    model: nn.Module,
    batches: Iterable[ProbeBatch],
    spec: ProbesSpec,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    curvature: bool = True,
    perturbation: bool = True,
) -> Iterator[Measured]:
    """Probe a model's loss surface on each batch.

    Results are yielded one at a time, so that eigenvectors need not be held for all of them and rows measured before an
    error are not lost. The model is restored after each result. Memory limits and the self-check are those of `spec`. Where
    Hessian products fail the self-check, one row says so in place of the curvature.

    Args:
        model: Hugging Face causal language model.
        batches: batches to probe. A generator may draw completions of the model lazily.
        spec: probes to run, their precision and their memory limits.
        optimizer: AdamW optimizer for the preconditioned Hessian; None leaves that out.
        curvature: run the curvature probes.
        perturbation: run the perturbation probes and loss slices.

    Yields:
        One `Measured` per loss, then one for `squared_gradient_norm` if the batch has completions for it.

    Raises:
        CheckError: the probed loss differs from the model's own (see `lm_surface`).
        UserError: the model or a batch cannot be probed.
    """
    for batch in batches:
        for objective in batch.objectives:
            yield _measure(
                model, objective, batch, spec, optimizer=optimizer, curvature=curvature, perturbation=perturbation
            )
        if batch.drawn is not None:
            rows = squared_gradient_norm(
                model,
                batch.drawn,
                temperature=batch.temperature,
                seed=batch.seed,
                microbatch_tokens=spec.microbatch_tokens,
                head_mb=spec.head_mb,
                memory_mb=spec.basis_mb,
                check=spec.check,
            )
            yield Measured(batch, tuple(labeled(rows, probe_set=batch.name)))


def measure(
    model: nn.Module,
    objective: Objective,
    spec: ProbesSpec,
    *,
    seed: int = 0,
    probe_set: str = "",
    optimizer: torch.optim.Optimizer | None = None,
    curvature: bool = True,
    perturbation: bool = True,
    slices: bool = True,
) -> Measured:
    """Probe one loss; see `run` for the arguments, and `ProbeBatch` for `seed`, `probe_set` and `slices`."""
    batch = ProbeBatch(probe_set, (objective,), seed, slices)
    (measured,) = run(model, [batch], spec, optimizer=optimizer, curvature=curvature, perturbation=perturbation)
    return measured


def probe_set_batches(
    probe_set: ProbeSet,
    spec: ProbesSpec,
    draw: Draw,
    *,
    temperature: float = 1.0,
    seed: Callable[[str], int] = lambda part: 0,
    slices: Collection[str] = ("train",),
) -> Iterator[ProbeBatch]:
    """Batches of a probe set: one for each split that the spec names, then the training prompts again for `squared_gradient_norm`.

    Completions are drawn from the probed model when a batch is requested. Those for the gradient norm are drawn anew, so that
    it is independent of the other estimates.

    Args:
        probe_set: fixed prompts.
        spec: names the losses, the splits and the numbers of completions.
        draw: draws completions of the probed model.
        temperature: softmax temperature of the completions and the losses.
        seed: seed of a part: `train`, `heldout` or `two batches`.
        slices: splits on which loss slices may be taken.
    """
    for split in probe_set.splits:
        if split not in spec.splits:
            continue
        own = seed(split)
        objectives = probe_set_objectives(probe_set, split, spec, draw, temperature=temperature, seed=own)
        yield ProbeBatch(probe_set.name(split), tuple(objectives.values()), own, split in slices)
    split = probe_set.splits[0]
    if spec.gradient_samples and len(probe_set.split(split)) >= 2:
        own = seed("two batches")
        drawn = probe_set.draw(split, spec.gradient_samples, draw, own)
        yield ProbeBatch(probe_set.name(split), seed=own, drawn=drawn, temperature=temperature)


def probe_set_objectives(
    probe_set: ProbeSet, split: str, spec: ProbesSpec, draw: Draw, *, temperature: float = 1.0, seed: int = 0
) -> dict[ObjectiveName, Objective]:
    """The losses that a spec names, on one split of a probe set; those over completions share one draw.

    The advantage of `surrogate` is (success − prompt mean)/(standard deviation + 1e-4), as in GRPO, without token weights,
    so that it is the same measure for all methods.
    """
    objectives: dict[ObjectiveName, Objective] = {}
    drawn: Drawn | None = None
    for name in spec.functionals:
        if name == "nll":
            objectives[name] = Objective("nll", probe_set.solutions(split), temperature)
            continue
        drawn = probe_set.draw(split, spec.samples, draw, seed) if drawn is None else drawn
        objectives[name] = rollout_objective(name, drawn, temperature=temperature)
    return objectives


def rollout_objective(name: ObjectiveName, drawn: Drawn, *, temperature: float = 1.0, stale: bool = False) -> Objective:
    """A loss over drawn completions, with the success as reward and its group-normalized value as advantage."""
    success = drawn.correct.double()
    batch = rollout_batch(drawn.rollouts, reward=success, advantage=group_normalized(success, drawn.rollouts.group))
    return Objective(name, batch, temperature, stale=stale)


def limited_surface(
    model: nn.Module, objective: Objective, spec: ProbesSpec, check: Check | None = None
) -> AbstractContextManager[LmSurface]:
    """`lm_surface` within the memory limits of a spec, with its self-check or the one given."""
    return lm_surface(
        model,
        objective,
        microbatch_tokens=spec.microbatch_tokens,
        graph_mb=spec.graph_mb,
        head_mb=spec.head_mb,
        check=spec.check if check is None else check,
    )


def measured_cost(model: nn.Module, objective: Objective, spec: ProbesSpec) -> dict[str, float]:
    """Seconds of one Hessian product, one gradient and one loss evaluation, for `ProbesSpec.cost`.

    Each is timed at the second call, so that building the graph is not included.
    """

    def second(call: Callable[[], object]) -> float:
        """Time of the second of two calls [seconds]; the first one warms up."""
        call()
        began = time.perf_counter()
        call()
        return time.perf_counter() - began

    with limited_surface(model, objective, spec, "off") as surface:
        hessian, (_, gradient) = surface.hessian(), surface.gradient()
        return {
            "product_s": second(lambda: hessian @ gradient),
            "gradient_s": second(surface.gradient),
            "value_s": second(surface.value),
        }


def _measure(
    model: nn.Module,
    objective: Objective,
    batch: ProbeBatch,
    spec: ProbesSpec,
    *,
    optimizer: torch.optim.Optimizer | None,
    curvature: bool,
    perturbation: bool,
) -> Measured:
    """All probes of one loss, from one evaluation of its gradient."""
    result, seed = None, batch.seed
    with limited_surface(model, objective, spec) as surface:
        rows: list[Estimate] = []
        if objective.stale:
            rows.append(_stale_row(surface, spec))
        began = time.perf_counter()
        loss, gradient, base = surface.gradient_by_prompt()
        at = loss, gradient
        why = "" if math.isfinite(loss) else "the loss is not finite"
        rows.append(with_prompts(Estimate("loss", "loss", loss, why=why), base))
        if curvature and spec.curvature:
            part = _first_prompts(surface, spec.curvature_prompts)
            whole = _Curvatures(part, spec, seed, (*at, base) if part is surface else part.gradient_by_prompt())
            before = len(rows)
            try:
                result = whole.plain(time.perf_counter() - began)
                rows += [*result.estimates(), *whole.preconditioned(optimizer)]
                rows += whole.gauss_newton()
                del whole  # frees the graph that the products share
                rows += _groups(part, spec, seed, base if part is surface else part.by_prompt())
            except CheckError as problem:
                # Keep what was measured with products that had passed the check.
                quantity = "largest" if result is None else "gauss_newton_largest"
                rows.append(
                    Estimate("curvature", quantity, math.nan, converged=False, seed=seed, why=f"left out: {problem}")
                )
            rows[before:] = labeled(rows[before:], prompts=len(part.objective.prompt_weight))
        if perturbation:
            # The gradient's norm is of all prompts, with its standard error; that of curvature's prompts alone is left out.
            rows = [row for row in rows if row.quantity != "gradient_norm"]
            rows += _perturbations(surface, spec, seed, at, base)
        # At a loss that is not finite there is nothing to draw; the rows of the other probes say why.
        finite = math.isfinite(at[0]) and bool(at[1].isfinite().all())
        if perturbation and spec.slices and batch.slices and finite:
            top = result.vectors[0] if result is not None and result.converged else None
            points = [max(spec.rhos) * point for point in SLICE_POINTS]
            rows += loss_slices(surface, points, top=top, seed=seed, at=at, base=base)
        named = labeled(rows, functional=objective.name, probe_set=batch.name)
        return Measured(batch, tuple(named), surface.objective, result)


class _Curvatures:
    """Curvature of one surface in its variants, which share its gradient, its Hessian's graph and Lanczos's start."""

    def __init__(self, surface: LmSurface, spec: ProbesSpec, seed: int, at: tuple[float, Tensor, Tensor]) -> None:
        self.surface, self.spec, self.seed, self.at, self.base = surface, spec, seed, at[:2], at[2]
        self.settings = CurvatureSettings(
            **{field.name: getattr(spec, field.name) for field in fields(CurvatureSettings)}
        )
        self._hessian: Operator | None = None
        self._start: Tensor | None = None
        if spec.backend == "lanczos" and math.isfinite(at[0]):
            self._hessian = surface.hessian()
            self._start = surface.start()

    def plain(self, gradient_seconds: float) -> Curvature:
        """Curvature of the Hessian itself."""
        result = curvature_of(
            self.surface,
            self.settings,
            seed=self.seed,
            operator=self._hessian,
            at=self.at,
            start=self._start,
            base=self.base,
            check=self.spec.check != "off",
        )
        return replace(result, seconds_by_part=result.seconds_by_part | {"gradient": gradient_seconds})

    def gauss_newton(self) -> list[Estimate]:
        """Rows for the Gauss-Newton matrix."""
        if not self.spec.gauss_newton:
            return []
        settings = replace(self.settings, backend="lanczos")
        result = curvature_of(
            self.surface,
            settings,
            seed=self.seed,
            operator=self.surface.gauss_newton(),
            at=self.at,
            start=self._start,
            check=self.spec.check != "off",
        )
        return [e for e in result.estimates(prefix="gauss_newton_") if not e.quantity.endswith("gradient_norm")]

    def preconditioned(self, optimizer: torch.optim.Optimizer | None) -> list[Estimate]:
        """The largest eigenvalue of D^(−1/2) H D^(−1/2), D of AdamW, and the one above which AdamW is not stable at its lr."""
        if not self.spec.preconditioned or optimizer is None:
            return []
        diagonal = adamw_preconditioner(optimizer, self.surface.parameters)
        result = curvature_of(
            self.surface,
            _ends(self.spec, smallest=False),
            seed=self.seed,
            preconditioner=diagonal,
            operator=self._hessian,
            at=self.at,
            start=self._start,
            base=self.base,
            check=self.spec.check != "off",
        )
        rows = [e for e in result.estimates(prefix="preconditioned_") if not e.quantity.endswith("gradient_norm")]
        group = optimizer.param_groups[0]
        if group["lr"] > 0:
            limit = adamw_threshold(float(group["lr"]), float(group["betas"][0]))
            rows.append(Estimate("curvature", "preconditioned_threshold", limit))
        return rows


def _ends(spec: ProbesSpec, *, smallest: bool) -> CurvatureSettings:
    """Settings of a variant: the extreme eigenvalues only."""
    return CurvatureSettings(
        top=1,
        smallest=smallest,
        tolerance=spec.tolerance,
        max_products=spec.max_products,
        trace_probes=0,
        density_samples=0,
        basis_mb=spec.basis_mb,
    )


def _groups(surface: LmSurface, spec: ProbesSpec, seed: int, base: Tensor) -> list[Estimate]:
    """Extreme eigenvalues of each group of parameters alone."""
    rows: list[Estimate] = []
    if spec.groups:
        for name, tensors in parameter_groups(surface.model, surface.parameters).items():
            result = curvature_of(
                surface.restricted(tensors), _ends(spec, smallest=True), seed=seed, base=base, check=spec.check != "off"
            )
            rows += labeled(result.estimates(), parameters=name)
    return rows


def _first_prompts(surface: LmSurface, count: int) -> LmSurface:
    """The surface over the rows of the first `count` prompts; the surface itself for 0 or if there are no more."""
    objective = surface.objective
    if not count or count >= len(objective.prompt_weight):
        return surface
    rows = [row for row, prompt in enumerate(objective.batch.prompts) if prompt < count]
    return surface.over(objective.rows(torch.tensor(rows, device=objective.batch.lengths.device)))


def _perturbations(
    surface: LmSurface, spec: ProbesSpec, seed: int, at: tuple[float, Tensor], base: Tensor
) -> list[Estimate]:
    """Sharpness at every radius and the gradient's norm, from one gradient.

    The standard error of m-sharpness is over prompts where each group lies within one prompt, and else over groups, which
    counts groups that share a prompt as independent.
    """
    kinds = [KINDS[kind] for kind in spec.kinds]
    grid = sharpness_grid(
        surface, spec.rhos, kinds, steps=spec.worst_steps, samples=spec.average_samples, seed=seed, at=at, base=base
    )
    ahead = [point.by_prompt for point in grid if point.kind == "sam" and point.rho == spec.rhos[0]]
    rows = [replace(gradient_norm(surface, at, base, spec.rhos[0], *ahead), seed=seed)]
    rows += [row for point in grid for row in point.estimates()]
    if spec.m:
        count = len(surface.objective.batch)
        cuts = [torch.arange(start, min(start + spec.m, count)) for start in range(0, count, spec.m)]
        # The last group may be short; it would count as much as a full one.
        cuts = [cut for cut in cuts if len(cut) == spec.m]
        if len(cuts) >= 2:
            parts = [surface.over(surface.objective.rows(cut)) for cut in cuts]
            prompt = surface.objective.batch.prompts
            within = all(len({prompt[row] for row in cut.tolist()}) == 1 for cut in cuts)
            prompts = [prompt[int(cut[0])] for cut in cuts] if within else None
            results = [m_sharpness_of(parts, rho, seed=seed, prompts=prompts) for rho in spec.rhos]
            of_groups = [row for one in results for row in one.estimates(spec.m)]
            if within:
                of_groups = [replace(row, prompt_std_error=row.std_error) for row in of_groups]
            rows += of_groups
        else:
            why = f"{count} rows make fewer than 2 groups of m = {spec.m}"
            rows.append(Estimate("perturbation", f"m{spec.m}_sam", math.nan, converged=False, seed=seed, why=why))
    return rows


def _stale_row(surface: LmSurface, spec: ProbesSpec) -> Estimate:
    stale = staleness(surface.objective, surface.logp(), spec.stale_threshold)
    why = (
        ""
        if stale.valid
        else f"only {stale.share:.0%} of the rows are effective, below {spec.stale_threshold:.0%}: invalid"
    )
    return Estimate(
        "rollouts",
        "effective_samples",
        stale.effective_samples,
        samples=len(surface.objective.batch),
        converged=stale.valid,
        why=why,
    )
