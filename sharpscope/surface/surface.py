"""Loss surfaces: a loss with its parameters, gradient and Hessian; here of any closure, in `language_model` of a causal model.

Gradients and Hessian products are checked by finite differences.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from sharpscope.errors import CheckError, UserError
from sharpscope.policy.directions import length
from sharpscope.policy.guard import (
    Facts,
    gradients,
    random_state,
    remembered_closure,
    working_precision,
)
from sharpscope.surface.operators import (
    FiniteDifference,
    Operator,
    common_dtype,
    flatten,
    graph_product,
    unflatten,
)

if TYPE_CHECKING:
    from sharpscope.config.run import Check, OperatorName

LossFn = Callable[[], Tensor]
TOLERANCE = 0.01
"""Largest relative error of a derivative that passes the check.

At the best step, central differences have an error of about u^(2/3) with u the rounding: 3e-5 in float32 for one rounding, 3e-3
for a thousand. A missing term makes an error of some tenths.
"""
STEPS = (1.0, 10.0, 100.0, 1000.0, 0.1, 0.01)
"""Factors of the check's first step; larger steps avoid rounding, smaller ones third derivatives and kinks."""


class Surface:
    """L(θ) of a zero-argument closure over a fixed batch. Vectors are flat, (P,): the parameters concatenated in order."""

    parameters: tuple[Tensor, ...]

    def __init__(self, loss_fn: LossFn, parameters: Sequence[Tensor]) -> None:
        self.loss_fn = loss_fn
        self.parameters = checked_parameters(parameters)

    def loss(self) -> Tensor:
        """L(θ) as a scalar with its graph; memory is not bounded."""
        loss = self.loss_fn()
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            given = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise UserError(
                f"loss_fn, {given}: must return one floating-point number, with its graph"
            )
        return loss.reshape(())

    def value(self) -> float:
        """L(θ) at the parameters' present values."""
        with torch.no_grad():
            return float(self.loss().double())

    def gradient(self) -> tuple[float, Tensor]:
        """L(θ) and ∇L(θ) (P,); parameters that the loss does not use have gradient 0."""
        loss = self.loss()
        if not loss.requires_grad:
            raise UserError(
                "loss_fn: its value does not depend on the parameters; does it run under no_grad or detach?"
            )
        gradients = torch.autograd.grad(loss, self.parameters, allow_unused=True)
        return float(loss.detach().double()), flatten(gradients, self.parameters)

    def operator(self, name: OperatorName = "hessian") -> Operator:
        """A curvature operator at the parameters' present values, which keeps graphs; a closure has a Hessian only.

        Raises:
            UserError: an operator that needs the model's outputs, which a closure does not tell.
        """
        if name == "finite_difference":
            return self.finite_difference()
        if name != "hessian":
            raise UserError(
                f"operator, '{name}': a closure gives no outputs of a model; use hessian or finite_difference, "
                "or the products of sharpscope.surface.operators"
            )
        return Operator(self.parameters, graph_product(self.loss(), self.parameters))

    def hessian(self) -> Operator:
        """∇²L(θ) at the parameters' present values."""
        return self.operator("hessian")

    def finite_difference(self) -> FiniteDifference:
        """∇²L(θ) by differences of gradients; see `FiniteDifference`."""

        def gradient_at(step: Tensor) -> Tensor:
            """∇L at the present weights plus a flat step."""
            with moved(self.parameters, step, relative_error=math.inf):
                return self.gradient()[1]

        return FiniteDifference(self.parameters, gradient_at)

    def by_prompt(self) -> Tensor | None:
        """One value for each prompt, (k,) float64, with mean L(θ) (see `Objective.by_prompt`); None if prompts are not known."""
        return None

    def curvature_by_prompt(
        self,
        vector: Tensor,
        operator: OperatorName = "hessian",
    ) -> Tensor | None:
        """vᵀA_i v of each prompt's operator, (k,) float64 with mean vᵀAv; None if prompts are not known."""
        return None

    def ceiling(self, loss: float) -> float:
        """The largest rise that the loss can have from the value `loss`; NaN if it has no bound or the bound is not known."""
        return math.nan

    def check(self, operator: Operator) -> float:
        """Relative error of the gradient and of a product of the Hessian `operator`; see `check_derivatives`."""
        return check_derivatives(self, operator)


@contextmanager
def opened(
    loss_fn: LossFn | Surface,
    parameters: Sequence[Tensor] | None,
    check: Check,
) -> Iterator[tuple[Surface, Facts]]:
    """The surface of a closure, with the cache of its checks; a surface as it is.

    The data of the parameters, `.grad` and random state are restored after the block. Attention uses SDPA's MATH kernel inside,
    which has second derivatives. Four evaluations before the block and two after it must agree to rounding.
    """
    if parameters is None:
        if callable(loss_fn):
            raise UserError(
                "parameters, none: a closure needs the tensors that its loss is computed from"
            )
        yield loss_fn, {}
        return
    if not callable(loss_fn):
        name = type(loss_fn).__name__
        raise UserError(
            f"loss_fn, {name}: give a function that returns the loss, not the loss itself"
        )
    surface = Surface(loss_fn, parameters)
    known = remembered_closure(loss_fn, surface.parameters) if check == "first" else {}
    precision = working_precision(parameters)
    attention = sdpa_kernel(SDPBackend.MATH)
    with random_state(), gradients(parameters), precision, attention, torch.enable_grad():
        first, rounding = surface.value(), 64 * torch.finfo(common_dtype(surface.parameters)).eps

        def compare(calls: int) -> None:
            """Compare the first value with so many further ones."""
            for again in [surface.value() for _ in range(calls)]:
                if not (
                    math.isclose(first, again, rel_tol=rounding)
                    or (math.isnan(first) and math.isnan(again))
                ):
                    raise UserError(
                        f"loss_fn, {first!r} then {again!r} at the same parameters: not deterministic; switch dropout off "
                        "(model.eval()), fix every seed inside the closure, and use the same batch in every call"
                    )

        compare(3)
        yield surface, known
        compare(2)


def checked_parameters(parameters: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The tensors of `parameters` that require grad, in order and without duplicates; all must be floating-point leaves."""
    distinct = {id(tensor): tensor for tensor in parameters}
    for tensor in distinct.values():
        if not tensor.is_leaf or not tensor.is_floating_point():
            raise UserError(
                f"parameters, {tensor.dtype} of shape {tuple(tensor.shape)}: not a floating-point leaf; "
                "pass the tensors that the loss is computed from"
            )
    trainable = tuple(tensor for tensor in distinct.values() if tensor.requires_grad)
    if not trainable:
        raise UserError("parameters, none requires grad: pass tensors with requires_grad=True")
    return trainable


@contextmanager
def moved(
    parameters: Sequence[Tensor],
    step: Tensor,
    *,
    relative_error: float = 0.05,
) -> Iterator[None]:
    """Context in which the parameters are θ + step, (P,), with at most this error by rounding; afterwards θ in the original storage."""
    before = [tensor.data for tensor in parameters]
    try:
        lost = 0.0
        for tensor, part in zip(parameters, unflatten(step, parameters), strict=True):
            start = tensor.data
            tensor.data = start + part
            lost += length((tensor.data - start).sub_(part)) ** 2
        size = length(step)
        if math.sqrt(lost) > relative_error * size:
            raise UserError(
                f"rho, step of norm {size:.3g}: below the resolution of {common_dtype(parameters)} "
                f"(rounding changes it by {math.sqrt(lost) / size:.0%}); use a larger rho or float64 parameters"
            )
        yield
    finally:
        for tensor, data in zip(parameters, before, strict=True):
            tensor.data = data


def check_once(known: Facts, name: str, check: Check, measure: Callable[[], float]) -> float | None:
    """The error that a check has found or finds now, in the cache `known` unless it is inconclusive; None if the check is off."""
    if check == "off":
        return None
    found = known.get(name)
    if isinstance(found, float):
        return found
    error = measure()
    if not math.isnan(error):
        known[name] = error
    return error


def check_derivatives(
    surface: Surface,
    hessian: Operator | None = None,
    name: str = "loss_fn",
) -> float:
    """Relative error of the gradient and, if given, of a product of the Hessian of a guarded surface, by finite differences.

    Let v be the normalized gradient plus a random unit vector. ⟨∇L, v⟩ is compared with the central difference
    (L(θ + εv) − L(θ − εv))/2ε of losses, and H v with that of gradients, in tens of evaluations.

    Returns:
        The largest ‖difference‖/‖derivative‖. NaN if the check is inconclusive: a derivative is not finite, or finite differences
        at different steps disagree, as in float32 for a loss with many kinks (ReLU, maxima, routing).

    Raises:
        CheckError: the error exceeds `TOLERANCE` at every step, and at some step 4 times the difference from the step before.
    """
    loss, gradient = surface.gradient()
    vector = _direction(gradient)
    slope, start = (
        torch.tensor([x], dtype=torch.float64)
        for x in (float(gradient.double() @ vector.double()), loss)
    )
    first = _error(
        surface,
        lambda: torch.tensor([surface.value()], dtype=torch.float64),
        slope,
        vector,
        start,
    )
    _require(
        first,
        "gradient",
        f"{name}: its gradient and the finite difference of losses",
        "an autograd.Function with a wrong backward pass, or a detached part of the loss; compose it of PyTorch operations, "
        "and hold detached parts fixed outside of the closure; check='off' skips this check",
    )
    if hessian is None:
        return first
    second = _error(surface, lambda: surface.gradient()[1], hessian @ vector, vector, gradient)
    _require(
        second,
        "hessian",
        f"{name}: a Hessian product and the finite difference of gradients",
        "an operation has no second derivative (such as an autograd.Function), or a part of the loss is detached; use "
        "PyTorch operations or another attention or experts implementation, hold detached parts fixed outside of the "
        "closure, or use the perturbation probes, which need no second derivatives",
    )
    return max(first, second) if first >= 0 and second >= 0 else second


def _require(error: float, probe: str, what: str, advice: str) -> None:
    if error > TOLERANCE:
        text = f"{what} differ by {error:.0%} (tolerance {TOLERANCE:.0%}): {advice}"
        raise CheckError(text, probe, error, TOLERANCE)


def _direction(gradient: Tensor) -> Tensor:
    """The normalized gradient plus a random unit vector, (P,), so that all directions enter."""
    random = torch.randn(
        len(gradient),
        generator=torch.Generator().manual_seed(0),
        dtype=gradient.dtype,
    )
    vector = random.to(gradient.device)
    vector /= vector.norm()
    size = float(gradient.norm())
    if not (math.isfinite(size) and size > 0):
        return vector
    unit = gradient / size
    return vector + unit if float(vector @ unit) >= 0 else vector - unit  # never near 0


def _error(
    surface: Surface,
    function: Callable[[], Tensor],
    derivative: Tensor,
    vector: Tensor,
    base: Tensor,
) -> float:
    """Relative error of `derivative`, that of `function` (`base` at θ) along `vector`; NaN if inconclusive.

    The first step is u^(1/3)·ℓ/‖v‖, ℓ at most ‖θ‖ and the length over which `function` changes by its own size.
    """
    size = float(derivative.norm())
    along = float(vector.norm())
    if not (math.isfinite(size) and bool(base.isfinite().all())):
        return math.nan
    rounding = torch.finfo(common_dtype(surface.parameters)).eps
    lengths = [math.sqrt(sum(length(p) ** 2 for p in surface.parameters))]
    if size > 0:
        lengths.append(float(base.norm()) * along / size)
    scale = min((value for value in lengths if value > 0), default=1.0)
    last: Tensor | None = None
    wrong = math.nan

    def at(step: float) -> Tensor:
        """The function at the present weights plus step · vector."""
        with moved(surface.parameters, vector * step, relative_error=math.inf):
            return function()

    for factor in STEPS:
        step = factor * rounding ** (1 / 3) * scale / along
        difference = at(step).sub_(at(-step)).div_(2 * step)
        error = _relative(difference, derivative)
        if error <= TOLERANCE:
            return error
        # A step that changes the function by less than 100 roundings shows nothing.
        seen = max(size, float(difference.norm())) * step > 100 * rounding * float(base.norm())
        if last is not None and seen and error > max(TOLERANCE, 4 * _relative(difference, last)):
            wrong = error if math.isnan(wrong) else min(wrong, error)
        last = difference
    return wrong


def _relative(a: Tensor, b: Tensor) -> float:
    """‖a − b‖/max(‖a‖, ‖b‖); 0 if both are 0."""
    largest = max(float(a.norm()), float(b.norm()))
    return 0.0 if largest == 0 else float((a - b).norm()) / largest
