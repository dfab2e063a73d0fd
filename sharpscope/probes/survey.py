"""One round of surface probes on a model, as a `ProbesSpec` asks for it: rows of the `probes` table."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from sharpscope.config.probes import KINDS, ProbesSpec
from sharpscope.errors import CheckError
from sharpscope.probes.estimate import Estimate, labelled
from sharpscope.probes.functionals import Functional, FunctionalName, group_normalised, rollout_batch, staleness
from sharpscope.probes.grouped import m_sharpness_of
from sharpscope.probes.hessian import Curvature, CurvatureSettings, Operator, adamw_preconditioner, curvature_of
from sharpscope.probes.hessian.api import sub_generator
from sharpscope.probes.hessian.causal_lm import LmSurface, lm_surface
from sharpscope.probes.parameter_groups import parameter_groups
from sharpscope.probes.perturbation import sharpness_grid
from sharpscope.probes.probe_set import Draw, Drawn, ProbeSet
from sharpscope.probes.slices import loss_slices

if TYPE_CHECKING:
    import pandas as pd

SLICE_POINTS = tuple(i / 5 for i in range(-5, 6))  # of the largest radius


@dataclass(frozen=True)
class Measured:
    """What one functional's surface showed.

    Attributes:
        functional: with its anchors.
        curvature: of the whole parameter vector, None if left out; `sharp_alignment` projects on its `vectors`.
        estimates: rows of the `probes` table.
    """

    functional: Functional
    curvature: Curvature | None
    estimates: tuple[Estimate, ...]

    @property
    def problems(self) -> tuple[str, ...]:
        """One line for each estimate that is not to be believed; for the events table."""
        return problems(self.estimates)


def problems(estimates: Sequence[Estimate]) -> tuple[str, ...]:
    """One line for each estimate that did not converge or is NaN; a ratio says nothing that its value did not."""
    return tuple(
        f"{e.functional} {e.quantity}{'' if math.isnan(e.rho) else f' at rho {e.rho:g}'} ({e.parameters}): "
        f"{e.why or 'not finite'}"
        for e in estimates
        if not e.quantity.endswith("_ratio") and (e.converged is False or math.isnan(e.value))
    )


def measure(
    model: nn.Module,
    functional: Functional,
    spec: ProbesSpec,
    *,
    seed: int = 0,
    probe_set: str = "",
    optimizer: torch.optim.Optimizer | None = None,
    curvature: bool = True,
    perturbation: bool = True,
    slices: bool | None = None,
) -> Measured:
    """Curvature and perturbation probes of one functional.

    Args:
        model: a Hugging Face causal LM; afterwards it is as it was.
        functional: what is probed.
        spec: which probes, how finely.
        seed: of every random vector.
        probe_set: label for the rows.
        optimizer: for the AdamW-preconditioned Hessian; None: left out.
        curvature, perturbation: leave one of them out (the top eigenpair is then not there for slices).
        slices: loss slices beside the perturbations; None: as the spec says.
    """
    limits = {
        "microbatch_tokens": spec.microbatch_tokens,
        "graph_mb": spec.graph_mb,
        "head_mb": spec.head_mb,
        "check": spec.check,
    }
    with lm_surface(model, functional, **limits) as surface:  # type: ignore[arg-type]
        found: list[Estimate] = []
        if functional.stale:
            found.append(_stale_row(surface, spec))
        began = time.perf_counter()
        at = surface.gradient()  # the only one at θ: every probe below starts from it
        result = None
        if curvature:
            whole = _Curvatures(surface, spec, seed, at)
            try:
                result = whole.plain(time.perf_counter() - began)
                found += [*result.estimates(), *whole.preconditioned(optimizer)]
                found += whole.gauss_newton()
                del whole  # frees the graph that the products share
                found += _groups(surface, spec, seed)
            except CheckError as problem:
                # Nothing that these products are needed for is reported; what was checked before is.
                quantity = "largest" if result is None else "gauss_newton_largest"
                found.append(
                    Estimate("curvature", quantity, math.nan, converged=False, seed=seed, why=f"left out: {problem}")
                )
        if perturbation:
            found += _perturbations(surface, spec, seed, at)
        if perturbation and (spec.slices if slices is None else slices):
            found += _slices(surface, spec, seed, result, at)
        rows = labelled(found, functional=functional.name, probe_set=probe_set)
        return Measured(surface.functional, result, tuple(rows))


def probe_functionals(
    probe_set: ProbeSet, split: str, spec: ProbesSpec, draw: Draw, *, temperature: float = 1.0, seed: int = 0
) -> dict[FunctionalName, Functional]:
    """The functionals that a spec asks for on one split, with one set of fresh rollouts for those that need them.

    The surrogate's advantage is the success less its prompt's mean, over its standard deviation (n − 1) + 1e-4, as GRPO
    has it, without any token weights: one ruler for all methods.
    """
    found: dict[FunctionalName, Functional] = {}
    drawn: Drawn | None = None
    for name in spec.functionals:
        if name == "nll":
            found[name] = Functional("nll", probe_set.solutions(split), temperature)
            continue
        drawn = probe_set.draw(split, spec.samples, draw, seed) if drawn is None else drawn
        found[name] = drawn_functional(name, drawn, temperature=temperature)
    return found


def drawn_functional(
    name: FunctionalName, drawn: Drawn, *, temperature: float = 1.0, stale: bool = False
) -> Functional:
    """A functional over drawn rollouts: the success is the reward, its group-normalised value the advantage."""
    success = drawn.correct.double()
    batch = rollout_batch(drawn.rollouts, reward=success, advantage=group_normalised(success, drawn.rollouts.group))
    return Functional(name, batch, temperature, stale=stale)


def measured_cost(model: nn.Module, functional: Functional, spec: ProbesSpec) -> dict[str, float]:
    """Seconds of one Hessian product, one gradient and one loss, for `ProbesSpec.cost` and the run's record.

    Each is the second of two, so that building the graph is not counted.
    """
    limits = {
        "microbatch_tokens": spec.microbatch_tokens,
        "graph_mb": spec.graph_mb,
        "head_mb": spec.head_mb,
        "check": "off",
    }
    with lm_surface(model, functional, **limits) as surface:  # type: ignore[arg-type]
        hessian, (_, gradient) = surface.hessian(), surface.gradient()

        def second(call: object) -> float:
            call()  # type: ignore[operator]
            began = time.perf_counter()
            call()  # type: ignore[operator]
            return time.perf_counter() - began

        return {
            "product_s": second(lambda: hessian @ gradient),
            "gradient_s": second(surface.gradient),
            "value_s": second(surface.value),
        }


class _Curvatures:
    """Curvature of one surface in its variants, which share its gradient, its Hessian's graph and Lanczos's start."""

    def __init__(self, surface: LmSurface, spec: ProbesSpec, seed: int, at: tuple[float, Tensor]) -> None:
        self.surface, self.spec, self.seed, self.at = surface, spec, seed, at
        self.settings = CurvatureSettings(
            top=spec.top,
            smallest=spec.smallest,
            tolerance=spec.tolerance,
            max_products=spec.max_products,
            trace_probes=spec.trace_probes,
            density_samples=spec.density_samples,
            density_steps=spec.density_steps,
            backend=spec.backend,
            basis_mb=spec.basis_mb,
        )
        self._hessian: Operator | None = None
        self._start: Tensor | None = None
        if spec.backend == "lanczos" and math.isfinite(at[0]):
            self._hessian = surface.hessian()
            self._start = surface.start(sub_generator(seed, "start"))

    def plain(self, gradient_seconds: float) -> Curvature:
        """Of the Hessian itself."""
        found = curvature_of(
            self.surface,
            self.settings,
            seed=self.seed,
            operator=self._hessian,
            at=self.at,
            start=self._start,
            check=self.spec.check != "off",
        )
        return replace(found, seconds_by_part=found.seconds_by_part | {"gradient": gradient_seconds})

    def gauss_newton(self) -> list[Estimate]:
        """Of the Gauss-Newton matrix."""
        if not self.spec.gauss_newton:
            return []
        settings = replace(self.settings, backend="lanczos")
        found = curvature_of(
            self.surface,
            settings,
            seed=self.seed,
            operator=self.surface.gauss_newton(),
            at=self.at,
            start=self._start,
            check=self.spec.check != "off",
        )
        return [e for e in found.estimates(prefix="gauss_newton_") if not e.quantity.endswith("gradient_norm")]

    def preconditioned(self, optimizer: torch.optim.Optimizer | None) -> list[Estimate]:
        """The largest eigenvalue of D^(−1/2) H D^(−1/2), D of AdamW."""
        if not self.spec.preconditioned or optimizer is None:
            return []
        diagonal = adamw_preconditioner(optimizer, self.surface.parameters)
        found = curvature_of(
            self.surface,
            _ends(self.spec, smallest=False),
            seed=self.seed,
            preconditioner=diagonal,
            operator=self._hessian,
            at=self.at,
            start=self._start,
            check=self.spec.check != "off",
        )
        return [e for e in found.estimates(prefix="preconditioned_") if not e.quantity.endswith("gradient_norm")]


def _ends(spec: ProbesSpec, *, smallest: bool) -> CurvatureSettings:
    """Of a variant: the extreme eigenvalues only."""
    return CurvatureSettings(
        top=1,
        smallest=smallest,
        tolerance=spec.tolerance,
        max_products=spec.max_products,
        trace_probes=0,
        density_samples=0,
        basis_mb=spec.basis_mb,
    )


def _groups(surface: LmSurface, spec: ProbesSpec, seed: int) -> list[Estimate]:
    """Extreme eigenvalues of each group of parameters alone."""
    rows: list[Estimate] = []
    if spec.groups:
        for name, tensors in parameter_groups(surface.model, surface.parameters).items():
            found = curvature_of(
                surface.restricted(tensors), _ends(spec, smallest=True), seed=seed, check=spec.check != "off"
            )
            rows += labelled(found.estimates(), parameters=name)
    return rows


def _perturbations(surface: LmSurface, spec: ProbesSpec, seed: int, at: tuple[float, Tensor]) -> list[Estimate]:
    """Sharpness at every radius. The standard error of m-sharpness is over prompts where each group lies within one, and over
    groups where one spans several: then groups that share a prompt are taken as independent too.
    """
    kinds = [KINDS[kind] for kind in spec.kinds]
    grid = sharpness_grid(
        surface, spec.rhos, kinds, steps=spec.worst_steps, samples=spec.average_samples, seed=seed, at=at
    )
    rows = [row for point in grid for row in point.estimates()]
    if spec.m:
        count = len(surface.functional.batch)
        cuts = [torch.arange(start, min(start + spec.m, count)) for start in range(0, count, spec.m)]
        # The last group may be short; it would count as much as a full one.
        cuts = [cut for cut in cuts if len(cut) == spec.m]
        if len(cuts) >= 2:
            parts = [surface.over(surface.functional.rows(cut)) for cut in cuts]
            prompt = surface.functional.batch.prompts
            within = all(len({prompt[row] for row in cut.tolist()}) == 1 for cut in cuts)
            prompts = [prompt[int(cut[0])] for cut in cuts] if within else None
            found = [m_sharpness_of(parts, rho, seed=seed, prompts=prompts) for rho in spec.rhos]
            rows += [row for one in found for row in one.estimates(spec.m)]
        else:
            why = f"{count} rows make fewer than 2 groups of m = {spec.m}"
            rows.append(Estimate("perturbation", f"m{spec.m}_sam", math.nan, converged=False, seed=seed, why=why))
    return rows


def _slices(
    surface: LmSurface, spec: ProbesSpec, seed: int, curvature: Curvature | None, at: tuple[float, Tensor]
) -> list[Estimate]:
    """Rows with quantity `slice_<direction>`, the loss as value and the signed distance in `rho`."""
    if not (math.isfinite(at[0]) and bool(at[1].isfinite().all())):
        return []  # nothing to draw; the other probes' rows say why
    farthest = max(spec.rhos)
    top = curvature.vectors[0] if curvature is not None and curvature.converged else None
    began = time.perf_counter()
    frame: pd.DataFrame = loss_slices(surface, [farthest * point for point in SLICE_POINTS], top=top, seed=seed, at=at)
    each = (time.perf_counter() - began) / max(len(frame), 1)
    return [
        Estimate("slice", f"slice_{direction}", loss, rho=distance, seed=seed, seconds=each)
        for direction, distance, loss in zip(frame["direction"], frame["distance"], frame["loss"], strict=True)
    ]


def _stale_row(surface: LmSurface, spec: ProbesSpec) -> Estimate:
    found = staleness(surface.functional, surface.logp(), spec.stale_threshold)
    why = (
        ""
        if found.valid
        else f"only {found.share:.0%} of the rows are effective, below {spec.stale_threshold:.0%}: invalid"
    )
    return Estimate(
        "rollouts",
        "effective_samples",
        found.effective_samples,
        samples=len(surface.functional.batch),
        converged=found.valid,
        why=why,
    )
