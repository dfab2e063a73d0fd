"""Loss surfaces: a loss with its parameters, gradient and Hessian; here of any closure, in `language_model` of a causal model."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from sharpscope.errors import UserError
from sharpscope.probes.fingerprint import remembered_closure
from sharpscope.probes.guard import gradients, random_state

if TYPE_CHECKING:
    from sharpscope.config.probes import Check
    from sharpscope.probes.lanczos import Operator

LossFn = Callable[[], Tensor]
CALLS = 4
"""Number of evaluations of a closure that must agree before a probe starts."""


class Surface(ABC):
    """L(θ) over a fixed batch. Vectors are flat, (P,): the parameters concatenated in order."""

    parameters: tuple[Tensor, ...]

    @abstractmethod
    def loss(self) -> Tensor:
        """L(θ) as a scalar with its graph; memory is not bounded."""

    @abstractmethod
    def value(self) -> float:
        """L(θ) at the parameters' present values."""

    @abstractmethod
    def gradient(self) -> tuple[float, Tensor]:
        """L(θ) and ∇L(θ) (P,)."""

    @abstractmethod
    def hessian(self) -> Operator:
        """∇²L(θ) at the parameters' present values, as an operator on (P,)."""

    def by_prompt(self) -> Tensor | None:
        """One value for each prompt, (k,) float64, with mean L(θ) (see `Objective.by_prompt`); None if prompts are not known."""
        return None

    def curvature_by_prompt(self, vector: Tensor) -> Tensor | None:
        """vᵀH_i v of each prompt's Hessian, (k,) float64 with mean vᵀHv; None if prompts are not known."""
        return None

    def ceiling(self, loss: float) -> float:
        """The largest rise that the loss can have from the value `loss`; NaN if it has no bound or the bound is not known."""
        return math.nan

    def check(self, operator: Operator) -> float:
        """Relative error of a product of the Hessian `operator`; see `check_products`."""
        from sharpscope.probes.check import check_products

        return check_products(self, operator)


def length(vector: Tensor) -> float:
    """‖v‖ accumulated in float64: a float32 sum of 1e8 squares on a CPU is 3 % too small."""
    if vector.device.type != "cpu":
        return float(torch.linalg.vector_norm(vector, dtype=torch.float64))
    blocks = vector.detach().reshape(-1).split(2**17)  # a whole copy in float64 takes ten times as long on a CPU
    return math.sqrt(sum(float(block @ block) for block in map(Tensor.double, blocks)))


def inner(rows: Tensor, vector: Tensor) -> Tensor:
    """Inner products (k,) of rows (k, P) with a vector (P,) in float64, accumulated from blocks of columns."""
    blocks = zip(rows.split(2**16, dim=1), vector.split(2**16), strict=True)
    return torch.stack([(a @ b).double() for a, b in blocks]).sum(0)


def flatten(tensors: Sequence[Tensor | None], like: Sequence[Tensor]) -> Tensor:
    """Detached tensors concatenated to (P,), with None as zeros, in the widest dtype and on the first device of `like`."""
    dtype, device = common_dtype(like), like[0].device
    parts = [
        torch.zeros(reference.numel(), dtype=dtype, device=device)
        if tensor is None
        else tensor.detach().reshape(-1).to(device=device, dtype=dtype)
        for tensor, reference in zip(tensors, like, strict=True)
    ]
    return torch.cat(parts)


def unflatten(vector: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """A vector (P,) split into the shapes of `like`; views where dtype and device agree."""
    parts = vector.split([tensor.numel() for tensor in like])
    return [
        part.view(tensor.shape).to(device=tensor.device, dtype=tensor.dtype)
        for part, tensor in zip(parts, like, strict=True)
    ]


def size_of(tensors: Sequence[Tensor]) -> int:
    """P, the number of elements of all tensors."""
    return sum(tensor.numel() for tensor in tensors)


def common_dtype(tensors: Sequence[Tensor]) -> torch.dtype:
    """The widest dtype of `tensors`."""
    return reduce(torch.promote_types, (tensor.dtype for tensor in tensors))


def checked_parameters(parameters: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The tensors of `parameters` that require grad, in order and without duplicates.

    Raises:
        UserError: no tensor requires grad, or one is not a floating-point leaf.
    """
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
def working_precision(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Context in which half-precision tensors are replaced by float32 copies; the original storage is not written to.

    Perturbations are below the resolution of half precision: rho = 0.05 over 1.5 B parameters moves each by 1.3e-6.
    """
    before = [(tensor, tensor.data) for tensor in tensors]
    try:
        for tensor, data in before:
            if data.dtype in (torch.bfloat16, torch.float16):
                tensor.data = data.float()
        yield
    finally:
        for tensor, data in before:
            tensor.data = data


@contextmanager
def untouched(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Restore the data, `.grad` and random state of tensors after the block; see `guarded` for modules.

    The block must assign `.data`, not write in place. Attention uses SDPA's MATH kernel inside, which has second derivatives.
    """
    with (
        random_state(),
        gradients(parameters),
        working_precision(parameters),
        sdpa_kernel(SDPBackend.MATH),
        torch.enable_grad(),
    ):
        yield


@contextmanager
def moved(parameters: Sequence[Tensor], step: Tensor, *, relative_error: float = 0.05) -> Iterator[None]:
    """Context in which the parameters are θ + step, (P,); afterwards they are θ in the original storage.

    Raises:
        UserError: rounding to the parameters' dtype changes the step by more than `relative_error` of its norm.
    """
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


class ClosureSurface(Surface):
    """Surface of a zero-argument closure that returns a scalar loss of `parameters`."""

    def __init__(self, loss_fn: LossFn, parameters: Sequence[Tensor]) -> None:
        self.loss_fn = loss_fn
        self.parameters = checked_parameters(parameters)

    def loss(self) -> Tensor:
        """The scalar loss with its graph.

        Raises:
            UserError: the closure does not return one real number.
        """
        loss = self.loss_fn()
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise UserError(f"loss_fn, {shape}: must return one floating-point number, with its graph")
        return loss.reshape(())

    def value(self) -> float:
        """L(θ)."""
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

    def hessian(self) -> Operator:
        """∇²L(θ); the operator keeps the graph of the gradient."""
        from sharpscope.probes.lanczos import Operator, graph_product

        return Operator.on(self.parameters, graph_product(self.loss(), self.parameters))

    @contextmanager
    def deterministic(self) -> Iterator[None]:
        """Check that the closure is deterministic: `CALLS` evaluations before the block and two after it agree to rounding.

        Raises:
            UserError: two evaluations differ, for example because of dropout, sampling or a changing batch.
        """
        first, rounding = self.value(), 64 * torch.finfo(common_dtype(self.parameters)).eps

        def compare(calls: int) -> None:
            for again in [self.value() for _ in range(calls)]:
                if not (math.isclose(first, again, rel_tol=rounding) or (math.isnan(first) and math.isnan(again))):
                    raise UserError(
                        f"loss_fn, {first!r} then {again!r} at the same parameters: not deterministic; switch dropout off "
                        "(model.eval()), fix every seed inside the closure, and use the same batch in every call"
                    )

        compare(CALLS - 1)
        yield
        compare(2)


@contextmanager
def opened(
    loss_fn: LossFn | Surface, parameters: Sequence[Tensor] | None, check: Check
) -> Iterator[tuple[Surface, dict[str, Any]]]:
    """The surface of a closure, guarded, with the cache of its checks; a surface as it is.

    Raises:
        UserError: a closure without parameters, or one that is not deterministic.
    """
    if parameters is None:
        if callable(loss_fn):
            raise UserError("parameters, none: a closure needs the tensors that its loss is computed from")
        yield loss_fn, {}
        return
    if not callable(loss_fn):
        raise UserError(
            f"loss_fn, {type(loss_fn).__name__}: give a function that returns the loss, not the loss itself"
        )
    surface = ClosureSurface(loss_fn, parameters)
    known = remembered_closure(loss_fn, surface.parameters) if check == "first" else {}
    with untouched(list(parameters)), surface.deterministic():
        yield surface, known
