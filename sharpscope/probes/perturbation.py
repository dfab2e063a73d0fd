"""Sharpness by perturbation: the rise of the loss within radius rho of the parameters, and slices of the loss.

A perturbation is ε = T∘u with ‖u‖₂ ≤ rho, where T = 1, or T = |θ| for adaptive measures. Nothing is divided by a weight, so
weights that are exactly zero are not perturbed by adaptive measures.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import get_args

import torch
from torch import Tensor

from sharpscope.config.probes import Check, SharpnessKind
from sharpscope.errors import UserError, nearest
from sharpscope.probes.estimate import Estimate, html_table, with_prompts
from sharpscope.probes.fingerprint import remembered_closure
from sharpscope.probes.hessian.api import sub_generator
from sharpscope.probes.hessian.check import check_gradient
from sharpscope.probes.surface import ClosureSurface, LossFn, Surface, common_dtype, flatten, moved, size_of, untouched

KINDS: tuple[SharpnessKind, ...] = get_args(SharpnessKind)


@dataclass(frozen=True)
class Sharpness:
    """The rise of the loss at one radius.

    Attributes:
        value: L(θ+ε) − L(θ) after one step (`sam`, `asam`), at the best point found (`worst`), or its mean over Gaussian ε
            (`average`) [unit of the loss].
        std_error: standard error of `average`; NaN for the others.
        first_order: rho·‖T∘∇L‖, the largest linearized rise in the ball; also given for `average`, whose own first-order
            term is 0.
        ratio: value / first_order; NaN if the gradient is zero.
        gradient_norm: ‖∇L‖₂.
        loss: L(θ).
        rho: radius.
        kind: `sam`, `asam`, `average` or `worst`.
        adaptive: whether T = |θ|.
        samples: number of gradients (`sam`, `asam`: 1; `worst`: 1 + steps) or of antithetic pairs (`average`).
        converged: None for direct evaluations; for others whether the value is reliable.
        why: reason for `converged = False`.
        residual: for `worst` ‖proj(u + rho·g/G) − u‖/rho with G the largest gradient norm seen, 0 at a stationary point; NaN
            for the others.
        seed: seed of the random directions.
        seconds: wall-clock time.
        checked: relative error of the gradient found by `check_gradient`; None if not checked, NaN if inconclusive.
        by_prompt: (k,) one value for each prompt, with mean `value` (see `Objective.by_prompt`); None if prompts are not known. Their
            standard error treats the perturbation as fixed. To first order that is the error of `worst` too, as its perturbation is a
            maximum; for `sam` and `asam` it neglects terms of second order in rho. The upward bias of a maximum over the prompts
            drawn is no part of it.
    """

    value: float
    std_error: float
    first_order: float
    ratio: float
    gradient_norm: float
    loss: float
    rho: float
    kind: SharpnessKind
    adaptive: bool
    samples: int
    converged: bool | None
    why: str
    residual: float
    seed: int
    seconds: float
    checked: float | None = None
    by_prompt: Tensor | None = None

    def _repr_html_(self) -> str:
        error = f" ± {self.std_error:.1e}" if math.isfinite(self.std_error) else ""
        rows = {
            "rise of the loss": f"{self.value:.4g}{error}",
            "first-order term": f"{self.first_order:.4g}",
            "loss": f"{self.loss:.4g}",
            "gradient norm": f"{self.gradient_norm:.4g}",
            "converged": {None: "direct evaluation", True: "yes", False: f"no: {self.why}"}[self.converged],
        }
        name = f"{'adaptive ' if self.adaptive and self.kind != 'asam' else ''}{self.kind}"
        return html_table(f"sharpness, {name}, radius {self.rho:g}", rows)

    @property
    def quantity(self) -> str:
        """Name in the `probes` table: `sam`, `asam`, `average`, `worst`, `adaptive_average`, `adaptive_worst`."""
        return f"adaptive_{self.kind}" if self.adaptive and self.kind in ("average", "worst") else self.kind

    def estimates(self, probe: str = "perturbation", prefix: str = "") -> list[Estimate]:
        """Rows of the `probes` table: the value, `<quantity>_first_order` and `<quantity>_ratio`."""
        name = prefix + self.quantity
        whole = Estimate(
            probe,
            name,
            self.value,
            self.std_error,
            self.samples,
            self.rho,
            self.converged,
            self.residual,
            self.seed,
            self.seconds,
            why=self.why,
        )
        undefined = "" if math.isfinite(self.ratio) else "the first-order term is zero or not finite"
        return [
            with_prompts(whole, self.by_prompt),
            Estimate(
                probe,
                f"{name}_first_order",
                self.first_order,
                rho=self.rho,
                seed=self.seed,
                why=self.why if math.isnan(self.first_order) else "",
            ),
            Estimate(
                probe,
                f"{name}_ratio",
                self.ratio,
                rho=self.rho,
                seed=self.seed,
                converged=self.converged,
                why=undefined or self.why,
            ),
        ]


def sharpness(
    loss_fn: LossFn,
    parameters: Sequence[Tensor],
    rho: float,
    kind: SharpnessKind = "sam",
    steps: int = 20,
    seed: int = 0,
    *,
    adaptive: bool = False,
    samples: int = 16,
    tolerance: float = 1e-2,
    check: Check = "first",
) -> Sharpness:
    """Sharpness of any loss at the current parameters.

    - `sam`: one step, ε = rho·∇L/‖∇L‖ (arXiv 2010.01412).
    - `asam`: one step, ε = rho·T²∇L/‖T∇L‖ with T = |θ| and no stabilizer (arXiv 2102.11600).
    - `worst`: projected gradient ascent in the ball, starting after one step of `sam`; a lower bound of the maximum. With
      `adaptive` the ball is ‖T⁻¹ε‖ ≤ rho.
    - `average`: mean over ε = rho/√P·T∘z with z standard normal, so that E‖u‖² = rho²; to second order rho²/(2P)·tr H. Pairs
      ±ε cancel the first-order noise. Where the loss is known by prompt (the probes of a run), each pair is evaluated on its
      own part of the prompts.

    Parameters, `.grad`, random state and attention kernel are restored afterwards, also if this raises.

    Args:
        loss_fn: zero-argument closure that computes a scalar loss from `parameters`. It must be deterministic; 4 calls at the
            start and 2 at the end are compared.
        parameters: leaf tensors. Half-precision tensors are perturbed as float32 copies; frozen ones are left out.
        rho: radius [parameters' L2 norm; relative to |θ| if adaptive].
        kind: measure, see above.
        steps: maximum number of gradient steps of `worst`.
        seed: seed of the random directions.
        adaptive: use T = |θ| for `average` and `worst` too.
        samples: antithetic pairs of `average`, at least 2.
        tolerance: residual at which `worst` has converged.
        check: when to compare the gradient with a finite difference of losses (see `check_gradient`): `first` call with this
            closure and these parameters, `always` or `off`.

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
    surface = ClosureSurface(loss_fn, parameters)
    known = remembered_closure(loss_fn, surface.parameters) if check == "first" else {}
    with untouched(list(parameters)), surface.deterministic():
        error = known.get("gradient")
        if error is None and check != "off":
            error = check_gradient(surface)
            if not math.isnan(error):
                known["gradient"] = error
        result = sharpness_of(
            surface, rho, kind, steps=steps, seed=seed, adaptive=adaptive, samples=samples, tolerance=tolerance
        )
        return replace(result, checked=error)


def sharpness_of(
    surface: Surface,
    rho: float,
    kind: SharpnessKind = "sam",
    *,
    steps: int = 20,
    seed: int = 0,
    adaptive: bool = False,
    samples: int = 16,
    tolerance: float = 1e-2,
    at: tuple[float, Tensor] | None = None,
    base: Tensor | None = None,
) -> Sharpness:
    """`sharpness` of a surface that is already guarded.

    `at` is (L(θ), ∇L(θ)) if already computed; `base` is `surface.by_prompt()` at θ, None for no values by prompt.
    """
    if kind not in KINDS:
        raise UserError(f"kind, '{kind}'{nearest(kind, KINDS)}")
    if not (rho > 0 and math.isfinite(rho)):
        raise UserError(f"rho, {rho}: must be positive and finite")
    if steps < 1 or samples < 2:
        raise UserError(f"steps, {steps}, samples, {samples}: at least 1 step and 2 samples")
    began = time.perf_counter()
    adaptive = adaptive or kind == "asam"
    loss, gradient = surface.gradient() if at is None else at
    scale = _scale(surface) if adaptive else None
    scaled = gradient if scale is None else gradient * scale  # ∇_u L = T∘∇L
    length = float(scaled.double().norm())
    estimate = _Measured(math.nan, samples=1)
    if not (math.isfinite(loss) and math.isfinite(length)):
        estimate = _Measured(
            math.nan, samples=1, converged=False, why=f"the loss is {loss} and its gradient's norm {length}"
        )
    elif kind == "average":
        estimate = _average(surface, rho, scale, samples, sub_generator(seed, "average"), loss, base)
    elif kind == "worst":
        estimate = _worst(surface, rho, scale, steps, tolerance, sub_generator(seed, "worst"), loss, scaled, base)
    elif length == 0:
        estimate = _Measured(
            0.0, samples=1, converged=False, why="the gradient is zero, so one step has no direction; use kind='worst'"
        )
    else:
        with moved(surface.parameters, _step(scaled * (rho / length), scale)):
            rise, by_prompt = _rise(surface, loss, base)
            estimate = _Measured(rise, samples=1, by_prompt=by_prompt)
    estimate = estimate.checked(loss, surface)
    first_order = rho * length
    return Sharpness(
        value=estimate.value,
        std_error=estimate.std_error,
        first_order=first_order,
        ratio=estimate.value / first_order if first_order > 0 else math.nan,
        gradient_norm=float(gradient.double().norm()),
        loss=loss,
        rho=rho,
        kind=kind,
        adaptive=adaptive,
        samples=estimate.samples,
        converged=estimate.converged,
        why=estimate.why,
        residual=estimate.residual,
        seed=seed,
        seconds=time.perf_counter() - began,
        by_prompt=estimate.by_prompt,
    )


def sharpness_grid(
    surface: Surface,
    rhos: Sequence[float],
    kinds: Sequence[tuple[SharpnessKind, bool]] = (
        ("sam", False),
        ("asam", True),
        ("average", False),
        ("worst", False),
    ),
    *,
    steps: int = 20,
    samples: int = 16,
    seed: int = 0,
    at: tuple[float, Tensor] | None = None,
    base: Tensor | None = None,
) -> list[Sharpness]:
    """`sharpness_of` for each (kind, adaptive) and radius; all share one gradient at θ, `at` if given."""
    at = surface.gradient() if at is None else at
    return [
        sharpness_of(surface, rho, kind, adaptive=adaptive, steps=steps, samples=samples, seed=seed, at=at, base=base)
        for kind, adaptive in kinds
        for rho in rhos
    ]


@dataclass(frozen=True)
class _Measured:
    value: float
    samples: int
    std_error: float = math.nan
    converged: bool | None = None
    why: str = ""
    residual: float = math.nan
    by_prompt: Tensor | None = None

    def checked(self, loss: float, surface: Surface) -> _Measured:
        """Not converged if the value is not finite or is within rounding of the loss."""
        if self.why:
            return self
        rounding = 4 * torch.finfo(common_dtype(surface.parameters)).eps * abs(loss)
        if not math.isfinite(self.value):
            return _Measured(
                math.nan, self.samples, self.std_error, False, "the perturbed loss is not finite", self.residual
            )
        if abs(self.value) <= rounding and rounding > 0:
            why = f"{self.value:.1e} is within rounding of the loss {loss:.3g}; use a larger rho or float64"
            return replace(self, converged=False, why=why)
        return self


def _rise(surface: Surface, loss: float, base: Tensor | None) -> tuple[float, Tensor | None]:
    """L − L(θ) at the parameters' present values, and by prompt (k,) if `base` is given."""
    if base is None:
        return surface.value() - loss, None
    values = surface.by_prompt()
    assert values is not None
    return float((values - base).mean()), values - base


def gradient_norm(
    surface: Surface, at: tuple[float, Tensor], base: Tensor, rho: float, ahead: Tensor | None = None
) -> Estimate:
    """‖∇L‖₂ with its standard error over prompts: row `gradient_norm` of the `probes` table.

    The values by prompt are ⟨∇L_i, ∇L⟩/‖∇L‖, the slopes at 0 of the parabola through the losses at θ + t·∇L/‖∇L‖ with t = 0,
    −rho/16 and rho, the point of `sam`; without this, t = ±rho/4. The error of both is rho²/16·L'''/6, L''' along the gradient.

    Args:
        surface: surface, already guarded.
        at: L(θ) and ∇L(θ).
        base: `surface.by_prompt()` at θ.
        rho: radius that the loss's resolution suits [parameters' L2 norm].
        ahead: (k,) `by_prompt` of `sam` at this radius, which saves an evaluation.
    """
    began = time.perf_counter()
    norm = float(at[1].double().norm())
    estimate = Estimate("perturbation", "gradient_norm", norm)
    if not (norm > 0 and math.isfinite(norm)):
        return replace(estimate, why="" if norm == 0 else "the gradient is not finite", prompts=len(base))

    def quotient(t: float) -> Tensor:
        """(L(θ + t·g/‖g‖) − L(θ))/t of each prompt, (k,)."""
        with moved(surface.parameters, at[1] * (t / norm)):
            rise = _rise(surface, at[0], base)[1]
        assert rise is not None
        return rise / t

    if ahead is None or not bool(ahead.isfinite().all()):
        values = (quotient(rho / 4) + quotient(-rho / 4)) / 2
    else:
        values = (ahead / rho + 16 * quotient(-rho / 16)) / 17
    return replace(with_prompts(estimate, values - values.mean() + norm), seconds=time.perf_counter() - began)


def _scale(surface: Surface) -> Tensor:
    """T = |θ| (P,)."""
    return flatten([parameter.detach().abs() for parameter in surface.parameters], surface.parameters)


def _step(u: Tensor, scale: Tensor | None) -> Tensor:
    """ε = T∘u."""
    return u if scale is None else u * scale


def _directions(surface: Surface, generator: torch.Generator) -> Iterator[Tensor]:
    """Standard normal vectors (P,), drawn on the CPU so that they do not depend on the device."""
    like = surface.parameters
    size, dtype, device = size_of(like), common_dtype(like), like[0].device
    while True:
        yield torch.randn(size, generator=generator, dtype=dtype).to(device)


def _average(
    surface: Surface,
    rho: float,
    scale: Tensor | None,
    samples: int,
    generator: torch.Generator,
    loss: float,
    base: Tensor | None,
) -> _Measured:
    if base is not None and len(base) >= 2 * samples:
        return _average_of_parts(surface, rho, scale, samples, generator, base)
    rises, by_prompt = [], None if base is None else torch.zeros_like(base)
    for _, z in zip(range(samples), _directions(surface, generator), strict=False):
        step = _step(z.mul_(rho / math.sqrt(z.numel())), scale)
        pair = []
        for sign in (1.0, -1.0):
            with moved(surface.parameters, step * sign):
                rise, values = _rise(surface, loss, base)
            pair.append(rise)
            if by_prompt is not None and values is not None:
                by_prompt += values / (2 * samples)
        rises.append(sum(pair) / 2)
    drawn = torch.tensor(rises, dtype=torch.float64)
    return _Measured(float(drawn.mean()), samples, float(drawn.std()) / math.sqrt(samples), by_prompt=by_prompt)


def _average_of_parts(
    surface: Surface, rho: float, scale: Tensor | None, samples: int, generator: torch.Generator, base: Tensor
) -> _Measured:
    """Average-case sharpness with one pair ±ε for each of `samples` parts of the prompts, which costs two losses in all.

    As each part's rise is unbiased over its ε, so is their sum. The standard error over the draws counts a part and its pair as
    one draw, so that it includes the differences between parts.
    """
    rises = -base
    parts = [torch.arange(first, len(base), samples) for first in range(samples)]
    for part, z in zip(parts, _directions(surface, generator), strict=False):
        step = _step(z.mul_(rho / math.sqrt(z.numel())), scale)
        for sign in (1.0, -1.0):
            with moved(surface.parameters, step * sign):
                values = surface.by_prompt(part)
            assert values is not None
            rises = rises + values / 2
    value = float(rises.mean())
    # A part's rise less its share of the mean.
    off = torch.stack([(rises[part] - value).sum() / len(base) for part in parts])
    error = math.sqrt(samples / (samples - 1) * float(off.square().sum()))
    return _Measured(value, samples, error, by_prompt=rises)


def _worst(
    surface: Surface,
    rho: float,
    scale: Tensor | None,
    steps: int,
    tolerance: float,
    generator: torch.Generator,
    loss: float,
    start: Tensor,
    base: Tensor | None,
) -> _Measured:
    """Projected gradient ascent in u; a step that lowers the loss is undone and shortened, so the last point is the best."""

    def projected(u: Tensor) -> Tensor:
        length = float(u.double().norm())
        return u * (rho / length) if length > rho else u

    direction = start
    if float(start.double().norm()) == 0:  # a critical point: any direction may be the steep one
        direction = next(_directions(surface, generator))
        direction = direction if scale is None else direction * (scale > 0)
        if float(direction.norm()) == 0:
            return _Measured(0.0, 1, converged=True, residual=0.0)  # every weight is zero: the ball is a point
    u = direction * (rho / float(direction.double().norm()))
    best, gradient = _climb(surface, u, scale)
    reach, used, residual, largest = 4.0, 1, math.inf, 0.0  # reach: a step in units of rho / the largest gradient seen
    while math.isfinite(best):
        largest = max(largest, float(gradient.double().norm()))
        unit = rho / largest if largest > 0 else 0.0
        residual = float((projected(u + gradient * unit) - u).double().norm()) / rho
        if residual <= tolerance or used >= steps:
            break
        candidate = projected(u + gradient * (reach * unit))
        value, slope = _climb(surface, candidate, scale)
        used += 1
        if value >= best:
            u, best, gradient, reach = candidate, value, slope, min(4 * reach, 1e6)
        else:
            reach /= 8
            if not math.isfinite(value) or reach < 1e-8:
                break
    converged = residual <= tolerance
    why = "" if converged else f"after {used} steps the ascent still moves by {residual:.0%} of rho"
    if best < loss and converged:  # a stationary point below the start: the ball's center is higher
        return _Measured(0.0, 1 + used, converged=False, why="the ascent ended below its start", residual=residual)
    by_prompt = None
    if converged and base is not None:
        with moved(surface.parameters, _step(u, scale)):
            rises = _rise(surface, loss, base)[1]
        by_prompt = None if rises is None else rises - rises.mean() + (best - loss)
    return _Measured(best - loss, 1 + used, converged=converged, why=why, residual=residual, by_prompt=by_prompt)


def _climb(surface: Surface, u: Tensor, scale: Tensor | None) -> tuple[float, Tensor]:
    """L(θ + T∘u) and its gradient in u."""
    with moved(surface.parameters, _step(u, scale)):
        value, gradient = surface.gradient()
    return value, gradient if scale is None else gradient * scale


@dataclass(frozen=True)
class MSharpness:
    """m-sharpness: mean sharpness of groups of m examples (arXiv 2010.01412, section 4.1).

    Attributes:
        value: mean over the groups.
        std_error: standard error over prompts, NaN for one prompt; over groups if no prompts are given.
        first_order: mean of rho·‖T∘∇L_i‖ over the groups.
        groups: the sharpness of each group.
    """

    value: float
    std_error: float
    first_order: float
    groups: tuple[Sharpness, ...]

    def estimates(self, m: int, probe: str = "perturbation") -> list[Estimate]:
        """Rows `m<m>_<kind>` and `m<m>_<kind>_first_order` of the `probes` table."""
        one = self.groups[0]
        bad = [group.why for group in self.groups if group.converged is False]
        converged = False if bad else one.converged
        why = f"{len(bad)} of {len(self.groups)} groups: {bad[0]}" if bad else ""
        seconds = sum(group.seconds for group in self.groups)
        name = f"m{m}_{one.quantity}"
        return [
            Estimate(
                probe,
                name,
                self.value,
                self.std_error,
                len(self.groups),
                one.rho,
                converged,
                seed=one.seed,
                seconds=seconds,
                why=why,
            ),
            Estimate(
                probe,
                f"{name}_first_order",
                self.first_order,
                rho=one.rho,
                seed=one.seed,
                why=why if math.isnan(self.first_order) else "",
            ),
        ]


def m_sharpness(
    loss_fns: Sequence[LossFn],
    parameters: Sequence[Tensor],
    rho: float,
    kind: SharpnessKind = "sam",
    steps: int = 20,
    seed: int = 0,
    **options: bool | int | float | str,
) -> MSharpness:
    """m-sharpness of closures, one for each group of m examples; the other arguments are those of `sharpness`.

    Raises:
        UserError: fewer than 2 groups, or see `sharpness`.
    """
    return _mean(
        [sharpness(loss_fn, parameters, rho, kind, steps, seed, **options) for loss_fn in loss_fns]  # type: ignore[arg-type]
    )


def m_sharpness_of(
    surfaces: Sequence[Surface],
    rho: float,
    kind: SharpnessKind = "sam",
    *,
    steps: int = 20,
    seed: int = 0,
    prompts: Sequence[int] | None = None,
) -> MSharpness:
    """`m_sharpness` of surfaces that are already guarded.

    Args:
        surfaces: one for each group.
        rho: see `sharpness`.
        kind: see `sharpness`.
        steps: see `sharpness`.
        seed: see `sharpness`.
        prompts: prompt of each group, since groups of one prompt are not independent; None treats groups as independent.
    """
    return _mean([sharpness_of(surface, rho, kind, steps=steps, seed=seed) for surface in surfaces], prompts)


def _mean(groups: list[Sharpness], prompts: Sequence[int] | None = None) -> MSharpness:
    if len(groups) < 2:
        raise UserError(f"m, {len(groups)} groups: at least 2 (fewer examples per group, or more examples)")
    values = torch.tensor([group.value for group in groups], dtype=torch.float64)
    value, first = values.mean(), sum(group.first_order for group in groups) / len(groups)
    _, cluster = torch.tensor(range(len(groups)) if prompts is None else prompts).unique(return_inverse=True)
    clusters = int(cluster.max()) + 1
    if clusters < 2:
        return MSharpness(float(value), math.nan, first, tuple(groups))
    # The contribution of each prompt to the mean; its groups' mean if all prompts have equally many groups.
    share = torch.bincount(cluster).double() * clusters / len(groups)
    total = torch.zeros(clusters, dtype=torch.float64).index_add_(0, cluster, values)
    means = total * (clusters / len(groups)) + value * (1 - share)
    return MSharpness(float(value), float(means.std()) / math.sqrt(clusters), first, tuple(groups))


def filter_normalized(parameters: Sequence[Tensor], generator: torch.Generator) -> Tensor:
    """A random direction (P,) in which each row of a matrix has the norm of that row of the weights (arXiv 1712.09913).

    One-dimensional tensors (biases, gains of norms) are 0 in it. A distance of 1 along it, unnormalized, adds noise as large
    as the matrices themselves.
    """
    parts: list[Tensor | None] = []
    for parameter in parameters:
        if parameter.ndim < 2:
            parts.append(None)
            continue
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter)
        axes = tuple(range(1, parameter.ndim))
        norm = torch.linalg.vector_norm(noise, dim=axes, keepdim=True)
        parts.append(noise * (torch.linalg.vector_norm(parameter.detach(), dim=axes, keepdim=True) / norm))
    return flatten(parts, parameters)


def loss_slices(
    surface: Surface,
    distances: Sequence[float],
    *,
    top: Tensor | None = None,
    random: int = 2,
    random_scale: float = 0.1,
    seed: int = 0,
    at: tuple[float, Tensor] | None = None,
    base: Tensor | None = None,
) -> list[Estimate]:
    """The loss along the gradient, the top eigenvector and random filter-normalized directions.

    Args:
        surface: surface to evaluate, already guarded.
        distances: signed steps [parameters' L2 norm]. Along random directions they are rescaled so that the farthest is
            `random_scale` times the length of the filter-normalized direction.
        top: (P,) unit top eigenvector, or None to leave it out.
        random: number of random directions.
        random_scale: see `distances`.
        seed: seed of the random directions.
        at: (L(θ), ∇L(θ)) if already computed.
        base: `surface.by_prompt()` at θ, for standard errors over prompts with the directions fixed; None leaves them out.

    Returns:
        Rows `slice_gradient`, `slice_eigenvector`, `slice_random_<i>` with the loss in `value` and the distance in `rho`, without
        values by prompt; directions of length 0 are left out.

    Raises:
        UserError: all distances are 0.
    """
    farthest = max((abs(d) for d in distances), default=0.0)
    if farthest == 0:
        raise UserError("distances: at least one must not be zero")
    began = time.perf_counter()
    loss, gradient = surface.gradient() if at is None else at
    points: list[tuple[str, float, float, Tensor | None]] = []

    def follow(name: str, unit: Tensor, scale: float) -> None:
        """Add the losses along a direction of length 1, at the distances times `scale`."""
        for distance in (step * scale for step in distances):
            if distance == 0:
                points.append((name, distance, loss, base))
                continue
            with moved(surface.parameters, unit * distance):
                each = None if base is None else surface.by_prompt()
                points.append((name, distance, surface.value() if each is None else float(each.mean()), each))

    norm = gradient.norm()
    if norm > 0:
        follow("gradient", gradient / norm, 1.0)
    if top is not None:
        follow("eigenvector", top.to(gradient), 1.0)
    for index in range(random):
        direction = filter_normalized(surface.parameters, sub_generator(seed, f"slice_{index}"))
        length = float(direction.norm())
        if length > 0:
            follow(f"random_{index}", direction / length, random_scale * length / farthest)
    seconds = (time.perf_counter() - began) / max(len(points), 1)
    return [
        replace(
            with_prompts(Estimate("slice", f"slice_{name}", value, rho=distance, seed=seed, seconds=seconds), each),
            prompt_values=(),
        )
        for name, distance, value, each in points
    ]
