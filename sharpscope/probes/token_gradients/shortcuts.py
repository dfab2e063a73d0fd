"""Faster backward passes of the operations between matrix products.

For small models, the derivatives of elementwise operations on batched cotangents cost more than the matrix products. Four
chains of operations are recognized, by following the tensors from one operation to the next, and get a single derivative each:
root-mean-square normalization, rotary positions, activation functions and their products with a gate. Values are those of the
model's own operations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from sharpscope.probes.token_gradients.batched import each

# The spellings of an operation that a model can use.
PRODUCTS = {torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__}
SUMS = {torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__}
POWERS = {torch.pow, Tensor.pow, Tensor.__pow__}
MEANS = {torch.mean, Tensor.mean}
ROOTS = {torch.rsqrt, Tensor.rsqrt}
NEGATIONS = {torch.neg, Tensor.neg, Tensor.__neg__}
CONCATENATIONS = {torch.cat, torch.concat}
_ACTIVATIONS = {F.silu, F.gelu, torch.tanh, Tensor.tanh, torch.sigmoid, Tensor.sigmoid}

REACH = 32  # intermediate results remembered: a chain is a few operations long


class Shortcuts(TorchFunctionMode):
    """Use the faster derivatives for a forward pass within the block.

    Attributes:
        taken: how often each chain was recognized.
    """

    def __init__(self) -> None:
        super().__init__()
        self.taken = {"norm": 0, "rotation": 0, "activation": 0, "gate": 0}
        # id of a tensor -> (itself, so that its id stays its own; what it is; of which tensors), the newest few.
        self._known: dict[int, tuple[Tensor, str, tuple[Tensor, ...]]] = {}

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if not isinstance(out, Tensor) or not out.requires_grad:
            return out
        if func in _ACTIVATIONS and out is not args[0] and out.shape == args[0].shape:
            self.taken["activation"] += 1
            slope = torch.autograd.grad(out, args[0], torch.ones_like(out))[0]  # of an elementwise function
            known = _Known.apply(_scaled(slope), out.detach(), args[0])
            self._keep(known, "activated", args[0], slope)
            return known
        if func in PRODUCTS and len(args) == 2:
            return self._product(args[0], args[1], out)
        if func in SUMS and len(args) == 2:
            return self._sum(args[0], args[1], out)
        self._note(func, args, kwargs, out)
        return out

    def _is(self, value: Any, what: str) -> tuple[Tensor, ...] | None:
        """The tensors that `value` was made of, if it is a `what`."""
        entry = self._known.get(id(value))
        return entry[2] if entry is not None and entry[1] == what else None

    def _keep(self, out: Tensor, what: str, *of: Tensor) -> None:
        self._known.pop(id(out), None)
        self._known[id(out)] = (out, what, of)
        if len(self._known) > REACH:
            del self._known[next(iter(self._known))]

    def _note(self, func: Any, args: tuple, kwargs: dict, out: Tensor) -> None:
        x = args[0] if args else None
        if func in POWERS and len(args) == 2 and isinstance(x, Tensor) and args[1] == 2:
            self._keep(out, "square", x)
        elif func in MEANS and out.ndim and out.shape[-1] == 1 and (of := self._is(x, "square")):
            if (tuple(args[1:2]) in ((-1,), ((-1,),)) and kwargs.get("keepdim")) or tuple(args[1:]) == (-1, True):
                self._keep(out, "mean", *of)
        elif func in ROOTS and (of := self._is(x, "mean")):
            self._keep(out, "root", *of)
        elif func is Tensor.__getitem__ and isinstance(x, Tensor):
            half = x.shape[-1] // 2
            if args[1] == (Ellipsis, slice(None, half)) and 2 * half == x.shape[-1]:
                self._keep(out, "left", x)
            elif args[1] == (Ellipsis, slice(half, None)) and 2 * half == x.shape[-1]:
                self._keep(out, "right", x)
        elif func in NEGATIONS and (of := self._is(x, "right")):
            self._keep(out, "minus right", *of)
        elif func in CONCATENATIONS and isinstance(x, tuple | list) and len(x) == 2:
            right, left = self._is(x[0], "minus right"), self._is(x[1], "left")
            if right and left and right[0] is left[0] and (kwargs.get("dim") == -1 or args[1:] == (-1,)):
                self._keep(out, "rotated", left[0])

    def _product(self, a: Any, b: Any, out: Tensor) -> Tensor:
        for x, other in ((a, b), (b, a)):
            if (of := self._is(other, "root")) and of[0] is x:
                self.taken["norm"] += 1
                return _Known.apply(_normed(out.detach(), other.detach()), out.detach(), x)
            if not isinstance(x, Tensor) or not isinstance(other, Tensor):
                continue
            alike = other.shape == x.shape and other.dtype == x.dtype
            if (of := self._is(x, "activated")) and other.requires_grad and alike:
                self.taken["gate"] += 1
                return _Known.apply(_scaled(of[1] * other.detach(), x.detach()), out.detach(), of[0], other)
            if not other.requires_grad:
                if (of := self._is(x, "rotated")) is not None:
                    self._keep(out, "turned", of[0], other)
                else:
                    self._keep(out, "kept", x, other)
                break
        return out

    def _sum(self, a: Any, b: Any, out: Tensor) -> Tensor:
        if not isinstance(b, Tensor) and (of := self._is(a, "mean")):
            self._keep(out, "mean", *of)
        for first, second in ((a, b), (b, a)):
            kept, turned = self._is(first, "kept"), self._is(second, "turned")
            if kept and turned and kept[0] is turned[0] and kept[1].shape[-1] == turned[1].shape[-1] == out.shape[-1]:
                self.taken["rotation"] += 1
                return _Known.apply(_rotated(kept[1], turned[1]), out.detach(), kept[0])
        return out


Pull = Callable[[Tensor], tuple[Tensor, ...]]


def _normed(y: Tensor, root: Tensor) -> Pull:
    """Y = x·root with root = (mean x² + ε)^(−1/2): dx = root·(g − y·mean(g·y))."""

    def pull(g: Tensor) -> tuple[Tensor]:
        return (torch.addcmul(g, y, (g * y).mean(-1, keepdim=True), value=-1).mul_(root),)

    return pull


def _rotated(cos: Tensor, sin: Tensor) -> Pull:
    """Y = (x₁, x₂)·cos + (−x₂, x₁)·sin: dx = g·cos + ((g·sin)₂, −(g·sin)₁)."""
    half = cos.shape[-1] // 2

    def pull(g: Tensor) -> tuple[Tensor]:
        out, turned = g * cos, g * sin
        out[..., :half] += turned[..., half:]
        out[..., half:] -= turned[..., :half]
        return (out,)

    return pull


def _scaled(*slopes: Tensor) -> Pull:
    """An elementwise function of one or several tensors, with its slope in each."""
    return lambda g: tuple(g * slope for slope in slopes)


class _Known(torch.autograd.Function):
    """A known function of some tensors, given by its value and its `Pull`."""

    @staticmethod
    def forward(ctx: Any, pull: Pull, value: Tensor, *inputs: Tensor) -> Tensor:
        ctx.pull = pull
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, *each(g, ctx.pull))
