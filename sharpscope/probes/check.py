"""Check of gradients and Hessian products by finite differences."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from sharpscope.errors import CheckError
from sharpscope.probes.lanczos import Operator
from sharpscope.probes.surface import Surface, common_dtype, moved

TOLERANCE = 0.01
"""Largest relative error of a product that passes.

At the best step, central differences have an error of about u^(2/3) with u the rounding of a gradient: 3e-5 in float32 for one
rounding, 3e-3 for a thousand. A missing term makes an error of some tenths.
"""
STEPS = (1.0, 10.0, 100.0, 1000.0, 0.1, 0.01)
"""Factors of the first step; larger steps avoid rounding, smaller ones third derivatives and kinks."""


def check_products(surface: Surface, operator: Operator | None = None, name: str = "loss_fn") -> float:
    """Relative error of one Hessian product of a surface, by finite differences.

    Let v be the normalized gradient plus a random unit vector. H v is compared with the central difference
    (∇L(θ + εv) − ∇L(θ − εv))/2ε of gradients, and ⟨∇L, v⟩ with that of losses. Use a small surface for a language model
    (`LmSurface.checked`), since this takes tens of gradients.

    Args:
        surface: already guarded.
        operator: its Hessian if it exists already.
        name: what is checked, for the message.

    Returns:
        The largest ‖difference‖/‖product‖. NaN if the check is inconclusive: a product is not finite, or finite differences at
        different steps disagree, as in float32 for a loss with many kinks (ReLU, maxima, routing).

    Raises:
        CheckError: the error exceeds `TOLERANCE` at every step, and at some step 4 times the difference from the step before.
    """
    first = check_gradient(surface, name)
    gradient = surface.gradient()[1]
    vector = _direction(gradient)
    product = (surface.hessian() if operator is None else operator) @ vector
    error = _error(surface, lambda: surface.gradient()[1], product, vector, gradient)
    if error > TOLERANCE:
        raise CheckError(
            f"{name}: a Hessian product and the finite difference of gradients differ by {error:.0%} (tolerance {TOLERANCE:.0%}): "
            "an operation has no second derivative (such as an autograd.Function), or a part of the loss is detached; use "
            "PyTorch operations or another attention or experts implementation, hold detached parts fixed outside of the "
            "closure, or use the perturbation probes, which need no second derivatives",
            "hessian",
            error,
            TOLERANCE,
        )
    return max(error, first) if error >= 0 and first >= 0 else error


def check_gradient(surface: Surface, name: str = "loss_fn") -> float:
    """Relative error of ⟨∇L, v⟩ with v as in `check_products`, against a central difference of losses; NaN if inconclusive.

    Raises:
        CheckError: as for `check_products`.
    """
    loss, gradient = surface.gradient()
    vector = _direction(gradient)
    slope, start = (torch.tensor([x], dtype=torch.float64) for x in (float(gradient.double() @ vector.double()), loss))
    error = _error(surface, lambda: torch.tensor([surface.value()], dtype=torch.float64), slope, vector, start)
    if error > TOLERANCE:
        raise CheckError(
            f"{name}: its gradient and the finite difference of losses differ by {error:.0%} (tolerance {TOLERANCE:.0%}): an "
            "autograd.Function with a wrong backward pass, or a detached part of the loss; compose it of PyTorch operations, "
            "and hold detached parts fixed outside of the closure; check='off' skips this check",
            "gradient",
            error,
            TOLERANCE,
        )
    return error


def _direction(gradient: Tensor) -> Tensor:
    """The normalized gradient plus a random unit vector, (P,), so that all directions enter."""
    random = torch.randn(len(gradient), generator=torch.Generator().manual_seed(0), dtype=gradient.dtype)
    vector = random.to(gradient.device)
    vector /= vector.norm()
    length = float(gradient.norm())
    if not (math.isfinite(length) and length > 0):
        return vector
    unit = gradient / length
    return vector + unit if float(vector @ unit) >= 0 else vector - unit  # never near 0


def _error(surface: Surface, function: Callable[[], Tensor], derivative: Tensor, vector: Tensor, base: Tensor) -> float:
    """Relative error of `derivative`, that of `function` (`base` at θ) along `vector`; NaN if inconclusive.

    The first step is u^(1/3)·ℓ/‖v‖ with ℓ = ‖base‖·‖v‖/‖derivative‖, the length over which `function` changes by
    its own size, but at most ‖θ‖. Steps that change it by less than 100 roundings are ignored.
    """
    size, length = float(derivative.norm()), float(vector.norm())
    if not (math.isfinite(size) and bool(base.isfinite().all())):
        return math.nan
    rounding = torch.finfo(common_dtype(surface.parameters)).eps
    lengths = [math.sqrt(sum(float(p.detach().double().square().sum()) for p in surface.parameters))]
    lengths += [float(base.norm()) * length / size] if size > 0 else []
    scale = min((value for value in lengths if value > 0), default=1.0)
    last: Tensor | None = None
    wrong = math.nan

    def at(step: float) -> Tensor:
        with moved(surface.parameters, vector * step, relative_error=math.inf):
            return function()

    for factor in STEPS:
        step = factor * rounding ** (1 / 3) * scale / length
        difference = at(step).sub_(at(-step)).div_(2 * step)
        error = _relative(difference, derivative)
        if error <= TOLERANCE:
            return error
        seen = max(size, float(difference.norm())) * step > 100 * rounding * float(base.norm())
        if last is not None and seen and error > max(TOLERANCE, 4 * _relative(difference, last)):
            wrong = error if math.isnan(wrong) else min(wrong, error)
        last = difference
    return wrong


def _relative(a: Tensor, b: Tensor) -> float:
    """‖a − b‖/max(‖a‖, ‖b‖); 0 if both are 0."""
    largest = max(float(a.norm()), float(b.norm()))
    return 0.0 if largest == 0 else float((a - b).norm()) / largest
