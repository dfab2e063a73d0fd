"""Self-check of Hessian products and gradients by finite differences."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sharpscope.errors import CheckError
from sharpscope.probes.hessian.causal_lm import LmSurface
from sharpscope.probes.hessian.operators import GraphHessian, Operator
from sharpscope.probes.hessian.streamed import StreamedHessian
from sharpscope.probes.objectives import Objective, token_batch
from sharpscope.probes.surface import Surface, common_dtype, moved, unflatten

TOLERANCE = 0.01
"""Largest relative error of a product that passes.

At the best step, central differences have an error of about u^(2/3) with u the rounding of a gradient: 3e-5 in float32 for one
rounding, 3e-3 for a thousand. A missing term makes an error of some tenths.
"""
STEPS = (1.0, 10.0, 100.0, 1000.0, 0.1, 0.01)
"""Factors of the first step; larger steps avoid rounding, smaller ones third derivatives and kinks."""
FEW_TOKENS = 24
"""Number of tokens of each of the two rows on which a language model is checked."""


def check_products(surface: Surface, operator: Operator | None = None) -> float:
    """Relative error of one Hessian product of a surface, by finite differences.

    Let v be the normalized gradient plus a random unit vector. A closure's H v is compared with the central difference
    (∇L(θ + εv) − ∇L(θ − εv))/2ε of its own gradients, and ⟨∇L, v⟩ with that of its losses.
    For a language model this is done for `nll` on the first tokens of two rows; the streamed product is compared with the
    graph's, in total and for each parameter tensor that has at least 1 % of the product's norm. The result is cached in
    `surface.checked`.

    Args:
        surface: surface that is already guarded.
        operator: operator whose products will be used; None to build the Hessian of a closure, and to check both kinds of
            products of a language model.

    Returns:
        The largest ‖difference‖/‖product‖. NaN if the check is inconclusive: a product is not finite, or finite differences at
        different steps disagree, as in float32 for a loss with many kinks (ReLU, maxima, routing).

    Raises:
        CheckError: the error exceeds `TOLERANCE` at every step, and at some step 4 times the difference from the step before.
        UserError: an operation lacks a derivative.
    """
    if not isinstance(surface, LmSurface):
        loss, gradient = surface.gradient()
        vector = _direction(gradient)
        first = _checked_gradient(surface, loss, vector, gradient)
        error = _product_error(
            surface, (surface.hessian() if operator is None else operator) @ vector, vector, gradient
        )
        if error > TOLERANCE:
            raise CheckError(
                f"loss_fn: a Hessian product and the finite difference of gradients differ by {error:.0%} "
                f"(tolerance {TOLERANCE:.0%}); an autograd.Function without second derivatives, or a detached part of the "
                "loss: compose it of PyTorch operations, hold detached parts fixed outside of the closure, or use "
                "`sharpness`, which needs no second derivatives; check='off' skips this check",
                "hessian",
                error,
                TOLERANCE,
            )
        return max(error, first) if error >= 0 and first >= 0 else error
    streams = operator is None or isinstance(operator, StreamedHessian)
    if streams not in surface.checked:
        surface.checked[streams] = _check_language_model(surface, streams)
    return surface.checked[streams]


def check_gradient(surface: Surface) -> float:
    """Relative error of a surface's gradient along one direction, against a central difference of its losses.

    Returns:
        Error of ⟨∇L, v⟩ with v as in `check_products`; NaN if inconclusive.

    Raises:
        CheckError: as for `check_products`.
    """
    loss, gradient = surface.gradient()
    return _checked_gradient(surface, loss, _direction(gradient), gradient)


def _checked_gradient(surface: Surface, loss: float, vector: Tensor, gradient: Tensor) -> float:
    error = _gradient_error(surface, loss, vector, gradient)
    if error > TOLERANCE:
        raise CheckError(
            f"loss_fn: its gradient and the finite difference of losses differ by {error:.0%} (tolerance {TOLERANCE:.0%}); "
            "an autograd.Function with a wrong backward pass, or a detached part of the loss: compose it of PyTorch "
            "operations, and hold detached parts fixed outside of the closure; check='off' skips this check",
            "gradient",
            error,
            TOLERANCE,
        )
    return error


def _check_language_model(surface: LmSurface, streams: bool) -> float:
    few = _few_tokens(surface)
    gradient = few.gradient()[1]
    vector = _direction(gradient)
    direct = GraphHessian([few.loss()], few.parameters) @ vector
    error = _product_error(few, direct, vector, gradient)
    name = f"model, {type(surface.model).__name__}"
    if error > TOLERANCE:
        raise CheckError(
            f"{name}: a Hessian product (mode 'graph') and the finite difference of gradients differ by {error:.0%} "
            f"(tolerance {TOLERANCE:.0%}): an operation of the model has no second derivative, or a part of it runs "
            "without autograd; use another attention or experts implementation, or the perturbation probes, which need no "
            "second derivatives",
            "hessian",
            error,
            TOLERANCE,
        )
    if streams:
        streamed = StreamedHessian(few, checkpoint=True, gauss_newton=False) @ vector
        apart = _largest_error(streamed, direct, few.parameters)
        if apart > TOLERANCE:
            raise CheckError(
                f"{name}: Hessian products of mode 'stream' and mode 'graph' differ by {apart:.0%} (tolerance "
                f"{TOLERANCE:.0%}): an operation has a wrong forward-mode derivative, or its layers pass tensors on in "
                "a way that is not followed; use mode='graph' (a larger graph_mb), or another attention implementation",
                "hessian",
                apart,
                TOLERANCE,
            )
        error = math.nan if math.isnan(error) else max(error, apart)
    return error


def _few_tokens(surface: LmSurface) -> LmSurface:
    """The surface of `nll` on the first tokens of the shortest and the longest row."""
    batch = surface.objective.batch
    rows = torch.stack([batch.lengths.argmin(), batch.lengths.argmax()]).unique()
    rows = rows[batch.lengths[rows] > 1]
    lengths = batch.lengths[rows].clamp(max=FEW_TOKENS)
    present = torch.arange(int(lengths.max()), device=lengths.device) < lengths[:, None]
    scored = present.clone()
    scored[:, 0] = False
    few = token_batch(batch.input_ids[rows, : present.shape[1]], present, scored)
    return surface.over(Objective("nll", few, surface.objective.temperature))


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


def _product_error(surface: Surface, product: Tensor, vector: Tensor, gradient: Tensor) -> float:
    """Relative error of `product` = H v against the central difference of gradients."""

    def at(step: Tensor) -> Tensor:
        with moved(surface.parameters, step, relative_error=math.inf):
            return surface.gradient()[1]

    return _difference_error(surface, at, product, vector, gradient)


def _gradient_error(surface: Surface, loss: float, vector: Tensor, gradient: Tensor) -> float:
    """Relative error of ⟨∇L, v⟩ against the central difference of losses."""

    def at(step: Tensor) -> Tensor:
        with moved(surface.parameters, step, relative_error=math.inf):
            return torch.tensor([surface.value()], dtype=torch.float64)

    base = torch.tensor([loss], dtype=torch.float64)
    return _difference_error(surface, at, (gradient.double() @ vector.double())[None].cpu(), vector, base)


def _difference_error(
    surface: Surface, function: Callable[[Tensor], Tensor], derivative: Tensor, vector: Tensor, base: Tensor
) -> float:
    """Relative error of `derivative`, the derivative of `function` along `vector`; NaN if inconclusive.

    The first step is u^(1/3)·ℓ/‖v‖ with ℓ = ‖base‖·‖v‖/‖derivative‖, the length over which `function` (`base` at 0) changes by
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
    for factor in STEPS:
        step = factor * rounding ** (1 / 3) * scale / length
        difference = function(vector * step).sub_(function(vector * -step)).div_(2 * step)
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


def _largest_error(value: Tensor, expected: Tensor, parameters: Sequence[Tensor]) -> float:
    """‖found − expected‖/‖expected‖, in total or of one parameter tensor, with norms of at least 1 % of the total."""
    whole = max(float(expected.norm()), float(value.norm()))
    if whole == 0:
        return 0.0
    pairs = zip(unflatten(value, parameters), unflatten(expected, parameters), strict=True)
    return max(float((a - b).norm()) / max(float(b.norm()), 0.01 * whole) for a, b in pairs)
