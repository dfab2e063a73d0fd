"""Sharpness by perturbation: the rise of the loss within radius rho of the parameters.

A perturbation is ε = T∘u with ‖u‖₂ ≤ rho, where T = 1, or T = |θ| for `asam`. Nothing is divided by a weight, so weights that
are exactly zero are not perturbed by `asam`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sharpscope.config.run import Check, SharpnessKind
from sharpscope.errors import UserError, nearest
from sharpscope.policy.directions import length
from sharpscope.progress import Tell, silent, tell_price
from sharpscope.surface.estimate import Estimate, with_prompts
from sharpscope.surface.operators import common_dtype, flatten
from sharpscope.surface.surface import (
    LossFn,
    Surface,
    check_derivatives,
    check_once,
    moved,
    opened,
)
from sharpscope.traces.schema import MAX_SATURATION

if TYPE_CHECKING:
    from sharpscope.surface.language_model import LmSurface

KINDS: tuple[SharpnessKind, ...] = ("sam", "asam")
"""Measures of one step along the gradient; see `average_sharpness` for the third."""
MIN_SATURATION, TARGET_SATURATION = 0.05, 0.15
EVALUATIONS = 16  # largest number of losses of the search for a radius
REACH, PAIRS = 0.02, 8
"""Norm of the noise of average sharpness over that of the weights, ten times that of rounding to bfloat16, and pairs of it."""
FORWARD = 1 / 3
"""Cost of a forward pass, in forward and backward passes."""


@dataclass(frozen=True, kw_only=True)
class Sharpness:
    """The rise of the loss at one radius. Its standard error over prompts neglects terms of second order in the radius."""

    value: float  # L(θ+ε) − L(θ) [unit of the loss]
    first_order: float  # rho·‖T∘∇L‖, the largest linearized rise in the ball
    gradient_norm: float  # ‖∇L‖₂
    loss: float  # L(θ)
    ceiling: float  # the largest rise that the loss allows, 1 − L(θ) for `expected_failure`; NaN if it has no bound
    rho: float  # radius
    kind: SharpnessKind
    why: str  # reason why the value is not reliable; empty if it is
    seconds: float
    # relative error found by `check_derivatives`; None if not checked, NaN if inconclusive
    checked: float | None = None
    # (k,) one value for each prompt, with mean `value`; None if not known
    by_prompt: Tensor | None = None

    @property
    def saturation(self) -> float:
        """Value / ceiling: above `MAX_SATURATION` the value measures the ceiling; NaN if there is none."""
        return self.value / self.ceiling if self.ceiling > 0 else math.nan

    def estimates(self) -> list[Estimate]:
        """Rows of the `probes` table: the value, named after its kind, and `<kind>_first_order`."""
        whole = Estimate(
            "perturbation",
            self.kind,
            self.value,
            samples=1,
            rho=self.rho,
            converged=False if self.why else None,
            seconds=self.seconds,
            ceiling=self.ceiling,
            saturation=self.saturation,
            why=self.why,
        )
        why = self.why if math.isnan(self.first_order) else ""
        first = Estimate("perturbation", f"{self.kind}_first_order", self.first_order)
        return [with_prompts(whole, self.by_prompt), replace(first, rho=self.rho, why=why)]


def sharpness(
    loss_fn: LossFn | Surface,
    parameters: Sequence[Tensor] | None,
    rho: float,
    kind: SharpnessKind = "sam",
    *,
    check: Check = "first",
    at: tuple[float, Tensor] | None = None,
    base: Tensor | None = None,
) -> Sharpness:
    """Sharpness of any loss at the current parameters: its rise after one step of length rho along the gradient.

    - `sam`: ε = rho·∇L/‖∇L‖ (arXiv 2010.01412).
    - `asam`: ε = rho·T²∇L/‖T∇L‖ with T = |θ| and no stabilizer (arXiv 2102.11600).

    Parameters, `.grad`, random state and attention kernel are restored afterwards, also if this raises.

    Args:
        loss_fn: zero-argument closure that computes a scalar loss from `parameters`. It must be deterministic; 4 calls at the
            start and 2 at the end are compared. Or a surface that is already guarded (see `lm_surface`).
        parameters: leaf tensors. Half-precision tensors are perturbed as float32 copies; frozen ones are left out. None for a
            surface.
        rho: radius [parameters' L2 norm; relative to |θ| for `asam`].
        kind: measure, see above.
        check: when to compare the gradient of a closure with a finite difference of losses (see `check_derivatives`): `first` call
            with this closure and these parameters, `always` or `off`.
        at: (L(θ), ∇L(θ)) if already computed.
        base: `surface.by_prompt()` at θ; None for no values by prompt.

    Raises:
        UserError: unknown kind, rho ≤ 0, a step below the resolution of the parameters, or a loss that is not deterministic.
        CheckError: the gradient differs from the finite difference.

    Examples:
        SAM sharpness of ‖θ‖² at θ = (3, 4): ‖θ‖ = 5, so L(θ + ε) = (5 + 0.1)².

        >>> import torch
        >>> import sharpscope
        >>> theta = torch.tensor([3.0, 4.0], dtype=torch.float64, requires_grad=True)
        >>> rise = sharpscope.sharpness(lambda: theta.square().sum(), [theta], rho=0.1, kind="sam")
        >>> round(rise.value, 6), round(rise.first_order, 6)
        (1.01, 1.0)
    """
    if kind not in KINDS:
        raise UserError(f"kind, '{kind}'{nearest(kind, KINDS)}")
    if not (rho > 0 and math.isfinite(rho)):
        raise UserError(f"rho, {rho}: must be positive and finite")
    with opened(loss_fn, parameters, check) as (surface, known):
        checked = None
        if parameters is not None:
            checked = check_once(known, "gradient", check, lambda: check_derivatives(surface))
        began = time.perf_counter()
        loss, gradient = surface.gradient() if at is None else at
        step, along = _step(surface, gradient, rho, kind)
        value, by_prompt, why = _rise(surface, loss, step, along, base)
        return Sharpness(
            value=value,
            first_order=rho * along,
            gradient_norm=length(gradient),
            loss=loss,
            ceiling=surface.ceiling(loss),
            rho=rho,
            kind=kind,
            why=why,
            seconds=time.perf_counter() - began,
            checked=checked,
            by_prompt=by_prompt,
        )


def _step(
    surface: Surface,
    gradient: Tensor,
    rho: float,
    kind: SharpnessKind,
) -> tuple[Tensor, float]:
    """The step ε (P,) of length rho along the gradient, and ‖T∘∇L‖; no step where that is 0 or not finite."""
    scale: Tensor | float = 1.0
    if kind == "asam":
        scale = flatten([p.detach().abs() for p in surface.parameters], surface.parameters)
    scaled = gradient * scale  # ∇_u L = T∘∇L
    along = length(scaled)
    return scaled * (rho / along if 0 < along < math.inf else 0.0) * scale, along


def _rise(
    surface: Surface,
    loss: float,
    step: Tensor,
    along: float,
    base: Tensor | None,
) -> tuple[float, Tensor | None, str]:
    """L(θ + ε) − L(θ), its values by prompt if `base` has those of L(θ), and why the rise is not reliable."""
    if not (math.isfinite(loss) and math.isfinite(along)):
        return math.nan, None, f"the loss is {loss} and its gradient's norm {along}"
    if along == 0:
        return 0.0, None, "the gradient is zero, so one step has no direction"
    each: Tensor | None = None
    with moved(surface.parameters, step):
        if base is None:
            value = surface.value() - loss
        else:
            each = surface.by_prompt() - base  # type: ignore[operator]
            value = float(each.mean())
    if not math.isfinite(value):
        return math.nan, None, "the perturbed loss is not finite"
    return value, each, _rounding(surface, loss, value)


def _rounding(
    surface: Surface,
    loss: float,
    rise: float,
    advice: str = "use a larger rho or float64",
) -> str:
    """Why a rise of the loss is not reliable: it is within rounding; empty if it is not."""
    rounding = 4 * torch.finfo(common_dtype(surface.parameters)).eps * abs(loss)
    if abs(rise) > rounding or rounding == 0:
        return ""
    return f"{rise:.1e} is within rounding of the loss {loss:.3g}; {advice}"


def cross_fitted(surface: LmSurface, rho: float, seed: int, base: Tensor) -> Estimate:
    """SAM sharpness whose direction has not seen the prompts on which the rise is measured: the row `sam_cross_fitted`.

    The prompts are split at random; the step along each half's gradient is measured on the other half. The plain estimate is above
    that of infinitely many prompts, since its direction fits the batch's noise, this one below, since half of the prompts give a
    noisier direction: together they bracket it. `base` (k,) is `surface.by_prompt()`. The error over prompts holds the directions
    fixed.
    """
    began, values = time.perf_counter(), torch.full_like(base, math.nan)
    order = torch.randperm(len(base), generator=torch.Generator().manual_seed(seed))
    halves = [order[: len(base) // 2].sort().values, order[len(base) // 2 :].sort().values]
    if not len(halves[0]):
        raise UserError("sam_cross_fitted: needs two prompts, one for the direction")
    prompts = torch.tensor(surface.objective.batch.prompts)
    surfaces = [surface.prompts(torch.isin(prompts, half)) for half in halves]
    found = [one.gradient_by_prompt()[1:] for one in surfaces]
    for half, one, (direction, _), (_, start) in zip(
        halves,
        surfaces,
        found[::-1],
        found,
        strict=True,
    ):
        if (norm := length(direction)) > 0:
            with moved(surface.parameters, direction * (rho / norm)):
                values[half] = one.by_prompt() - start
    value = float(values.mean())
    ceiling = surface.ceiling(float(base.mean()))
    known = math.isfinite(value)
    estimate = Estimate(
        "perturbation",
        "sam_cross_fitted",
        value,
        rho=rho,
        seconds=time.perf_counter() - began,
        ceiling=ceiling,
        saturation=value / ceiling if ceiling > 0 else math.nan,
        why="" if known else "a half's gradient is zero or its loss not finite",
    )
    return with_prompts(estimate, values if known else None)


def average_sharpness(
    surface: LmSurface,
    seed: int,
    base: Tensor,
    *,
    reach: float = REACH,
    samples: int = PAIRS,
) -> Estimate:
    """Average sharpness E[L(θ + ε)] − L(θ) over Gaussian ε with E‖ε_i‖² = (reach·‖θ_i‖)² in each tensor i: the row `average`.

    Since the noise is relative to each tensor's norm, rescaling two layers against each other changes nothing. Noise is drawn in
    pairs ±ε, so that the gradient drops out and the mean is half a trace of the rescaled Hessian up to fourth order. `reach` is in
    the row's `rho`. The standard error is over `samples` pairs, the prompts' over prompts with the noise fixed. `base` (k,) is
    `surface.by_prompt()`.
    """
    began, generator = time.perf_counter(), torch.Generator().manual_seed(seed)
    rises = []
    for _ in range(samples):
        parts = [
            torch.randn(p.shape, generator=generator)
            * (reach * length(p.detach()) / math.sqrt(p.numel()))
            for p in surface.parameters
        ]
        noise = flatten(parts, surface.parameters)
        for sign in (1, -1):
            with moved(surface.parameters, noise * sign):
                rises.append(surface.by_prompt() - base)
    each = torch.stack(rises).view(samples, 2, -1).mean(1)  # (samples, k)
    over_noise = each.mean(1)
    value = float(over_noise.mean())
    found = Estimate(
        "perturbation",
        "average",
        value,
        std_error=float(over_noise.std()) / math.sqrt(samples) if samples > 1 else math.nan,
        samples=samples,
        rho=reach,
        seed=seed,
        seconds=time.perf_counter() - began,
        why=_rounding(surface, float(base.mean()), value, "use float64"),
    )
    return with_prompts(found, each.mean(0))


@dataclass(frozen=True)
class Radius:
    """The radius of the perturbations of a model."""

    rho: float  # NaN if none was found
    # of SAM sharpness of `expected_failure` at `rho`; NaN if the radius was given
    saturation: float = math.nan
    evaluations: int = 0  # of the loss
    seconds: float = 0.0
    why: str = ""  # reason for NaN

    @property
    def passes(self) -> float:
        """Forward and backward passes that the search took: one for the gradient, and its losses."""
        return 1 + FORWARD * self.evaluations

    def estimate(self) -> Estimate:
        """Row `radius` of the `probes` table."""
        found = Estimate("perturbation", "radius", self.rho, why=self.why, seconds=self.seconds)
        return replace(found, samples=self.evaluations, saturation=self.saturation)


def find_radius(surface: Surface, tell: Tell = silent) -> Radius:
    """A radius at which SAM sharpness is a moderate part of its ceiling.

    From the radius at which the first-order term predicts `TARGET_SATURATION`, the radius is changed by factors of 4 until the
    target is bracketed, then log rho is bisected. The search ends within a factor of 4/3 of the target, or after `EVALUATIONS` losses
    with the best radius whose saturation is between `MIN_SATURATION` and `MAX_SATURATION`. The surface is guarded. `tell` is told how
    long that takes at most.
    """
    began = time.perf_counter()
    loss, gradient = surface.gradient()
    one = time.perf_counter() - began
    tell_price(tell, "choice of the radius", FORWARD * EVALUATIONS * one)
    ceiling = surface.ceiling(loss)
    norm = length(gradient)
    if not (ceiling > 0 and 0 < norm < math.inf):
        reason = (
            "no completion is correct" if ceiling == 0 else f"the gradient's norm is {norm:.3g}"
        )
        why = f"no radius: {reason}, so the expected failure cannot rise; set probes.rho"
        return Radius(math.nan, seconds=one, why=why)
    rho = TARGET_SATURATION * ceiling / norm
    ends = [0.0, math.inf]  # the largest radius below the target, and the smallest above it
    seen: list[tuple[float, float, float]] = []  # distance from the target, radius, saturation
    while len(seen) < EVALUATIONS and min(seen, default=ends[1:])[0] > math.log(4 / 3):
        try:
            with moved(surface.parameters, gradient * (rho / norm)):
                saturation = (surface.value() - loss) / ceiling
        except UserError:  # below the parameters' resolution
            saturation = 0.0
        distance = abs(math.log(saturation / TARGET_SATURATION)) if saturation > 0 else math.inf
        seen.append((distance, rho, saturation))
        # where it is not finite the radius is too large
        ends[0 if saturation < TARGET_SATURATION else 1] = rho
        if ends[0] > 0 and ends[1] < math.inf:
            rho = math.sqrt(ends[0] * ends[1])
        else:
            rho *= 4 if ends[0] > 0 else 1 / 4
    fit = [one for one in seen if MIN_SATURATION <= one[2] <= MAX_SATURATION]
    _, rho, saturation = min(fit, default=(math.inf, math.nan, math.nan))
    found = ", ".join(f"{full:.2f} at {radius:.2g}" for _, radius, full in seen[-3:])
    limits = f"{MIN_SATURATION:g} and {MAX_SATURATION:g} (found {found})"
    why = "" if fit else f"no radius with a saturation between {limits}; set probes.rho"
    return Radius(rho, saturation, len(seen), time.perf_counter() - began, why)
