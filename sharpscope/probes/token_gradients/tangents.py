"""Forward mode for several directions at once, operation by operation.

PyTorch's forward mode computes values along with each direction's derivatives, and many small operations for every composed
one. Here a pass computes the values once, and each tensor that depends on a direction carries its tangents, one for each
direction. Linear maps, normalizations, rotary positions and activations have rules of their own; any other function is
differentiated on its own by PyTorch's forward mode.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, resolve_name

from sharpscope.probes.token_gradients.shortcuts import CONCATENATIONS, MEANS, NEGATIONS, POWERS, PRODUCTS, ROOTS, SUMS
from sharpscope.probes.token_gradients.uses import DETACHMENTS, Use, tensors_in

Tangents = list[Tensor | None]
"""Of a tensor, one for each direction; None where it does not depend on that direction."""

# Linear in their first argument, which alone may depend on a direction.
_LINEAR = {
    Tensor.__getitem__,
    Tensor.view,
    Tensor.reshape,
    torch.reshape,
    Tensor.transpose,
    torch.transpose,
    Tensor.permute,
    Tensor.contiguous,
    Tensor.clone,
    Tensor.to,
    Tensor.float,
    Tensor.flatten,
    torch.flatten,
    Tensor.unsqueeze,
    torch.unsqueeze,
    Tensor.squeeze,
    torch.squeeze,
    Tensor.expand,
    Tensor.chunk,
    torch.chunk,
    Tensor.split,
    torch.split,
    Tensor.mT.__get__,  # type: ignore[attr-defined]
}


class NotPushedError(Exception):
    """A pass does something that its tangents cannot follow."""


class _Later:
    """Tangents that are computed at first use, since the operation that follows may not need them."""

    def __init__(self, make: Callable[[], Tangents]) -> None:
        self._make: Callable[[], Tangents] | None = make
        self._made: Tangents = []

    def __call__(self) -> Tangents:
        if self._make is not None:
            self._made, self._make = self._make(), None
        return self._made


def carry(x: Tensor, tangents: Tangents) -> Tensor:
    """Give `x` its tangents."""
    x._tangents = tangents  # type: ignore[attr-defined]
    return x


def carried(x: Any) -> Tangents | None:
    """The tangents of `x`, None if it has none."""
    found = getattr(x, "_tangents", None)
    return found() if isinstance(found, _Later) else found


@dataclass
class Own:
    """Sums of ⟨l_t, v⟩ over the uses of parameters: the part of a derivative that reaches a token at its own position.

    Attributes:
        uses: parameter name -> its one use in the local pass and the cotangent of the use's output there.
        sums: (B, L) for each direction.
        seen: the uses that the pass went through.
    """

    uses: dict[str, tuple[Use, Tensor]]
    sums: list[Tensor]
    seen: list[int] = field(default_factory=list)

    def add(self, name: str | None, rates: Tangents) -> None:
        """Add what a parameter moves the output of its use by, in each direction."""
        known = None if name is None else self.uses.get(name)
        if known is None:
            return
        use, cotangent = known
        self.seen.append(id(use))
        for total, rate in zip(self.sums, rates, strict=True):
            if rate is not None:
                total.add_(use.canonical(rate * cotangent).sum((-1, -2)))

    def complete(self) -> bool:
        """Whether each use was seen once."""
        return sorted(self.seen) == sorted({id(use) for use, _ in self.uses.values()})


class Keeping(TorchFunctionMode):
    """A forward pass that keeps the outputs of its linear maps, for `Pushing` over the same rows.

    Attributes:
        room: bytes that are left.
        values: the outputs, in order; none where there was not enough room for all.
    """

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room
        self.values: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is F.linear and self.room > 0:
            self.room -= out.nbytes
            self.values.append(out.detach())
            if self.room <= 0:
                self.values.clear()
        return out


class Pushing(TorchFunctionMode):
    """A forward pass whose tensors carry tangents.

    Attributes:
        names: id of a tensor that stands in for a parameter -> the parameter's name.
    """

    def __init__(
        self, count: int, names: Mapping[int, str], own: Own | None = None, kept: Sequence[Tensor] = ()
    ) -> None:
        """`kept`: `Keeping.values` of a pass over the same rows, or nothing."""
        super().__init__()
        self._count, self.names, self._own = count, names, own
        self._kept = iter(kept) if kept else None

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        given = tensors_in((args, kwargs))
        run = self._recalled if func is F.linear and self._kept is not None else func
        if func in DETACHMENTS or not any(hasattr(x, "_tangents") for x in given) or not torch.is_grad_enabled():
            return run(*args, **kwargs)
        versions = [x._version for x in given]
        out = run(*args, **kwargs)
        if versions != [x._version for x in given]:
            raise NotPushedError(f"{resolve_name(func)} writes in place")
        if not any(x.dtype.is_floating_point for x in tensors_in(out)):
            return out
        if any(out is x for x in given):  # a cast to the type that it has
            return out
        self._rule(func, args, kwargs, out)
        return out

    def _recalled(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """The output that the other pass had here."""
        out = next(self._kept or iter(()), None)
        if out is None or out.shape != (*input.shape[:-1], len(weight)):
            raise NotPushedError("the pass differs from the one whose values were kept")
        return out.detach()

    def _rule(self, func: Any, args: tuple, kwargs: dict, out: Any) -> None:
        x = args[0] if args else None
        if func is F.linear:
            given = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
            return self._linear(out, given["input"], given["weight"], given.get("bias"))
        if func is F.embedding and len(args) > 1:
            return self._embedding(args, out)
        if func in PRODUCTS and len(args) == 2 and not kwargs:
            return self._product(args[0], args[1], out)
        if func in SUMS and len(args) == 2 and not kwargs:
            return self._sum(args[0], args[1], out)
        if func in POWERS and len(args) == 2 and isinstance(x, Tensor) and args[1] == 2:
            out._square = x
            return self._later(out, lambda: _each(carried(x), lambda t: (t * x).mul_(2)))
        if func in MEANS and x is not None and hasattr(x, "_square") and _over_last(args, kwargs):
            whole, size = x._square, x.shape[-1]
            return self._set(
                out, _each(carried(whole), lambda t: torch.linalg.vecdot(whole, t)[..., None].mul_(2 / size))
            )
        if func in ROOTS:
            return self._set(out, _each(carried(x), lambda t: t * (out * out * out).mul_(-0.5)))
        if func is F.silu and not kwargs.get("inplace") and len(args) == 1:
            return self._set(out, _each(carried(x), lambda t: torch.ops.aten.silu_backward(t, x)))
        if func in NEGATIONS and isinstance(x, Tensor):
            out._minus = x
            return self._later(out, lambda: _each(carried(x), torch.neg))
        if func in CONCATENATIONS and args:
            return self._concatenation(args, kwargs, out)
        if func in _LINEAR and hasattr(x, "_tangents") and _alone(args, kwargs):
            return self._rearranged(func, args, kwargs, out)
        return self._generic(func, args, kwargs, out)

    def _set(self, out: Tensor, tangents: Tangents) -> None:
        carry(out, tangents)

    def _later(self, out: Tensor, make: Callable[[], Tangents]) -> None:
        out._tangents = _Later(make)  # type: ignore[attr-defined]

    def _linear(self, out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        moved, weights = carried(x) or [None] * self._count, carried(weight) or [None] * self._count
        biases = carried(bias) or [None] * self._count
        rates: Tangents = []
        for u, b in zip(weights, biases, strict=True):
            if u is not None:
                rates.append(F.linear(x, u, b))
            else:
                rates.append(None if b is None else b.expand_as(out))
        if self._own is not None:
            self._own.add(self._name(weight, bias), rates)
        tangents: Tangents = []
        for rate, t, u in zip(rates, moved, weights, strict=True):
            if t is None:
                tangents.append(rate)
            elif rate is None or u is None:
                tangents.append(F.linear(t, weight) if rate is None else F.linear(t, weight) + rate)
            else:  # the rate is this function's own tensor
                rows = rate.view(-1, rate.shape[-1]).addmm_(t.reshape(-1, t.shape[-1]), weight.mT)
                tangents.append(rows.view_as(rate))
        self._set(out, tangents)

    def _name(self, *parameters: Tensor | None) -> str | None:
        return next((self.names[id(p)] for p in parameters if hasattr(p, "_tangents") and id(p) in self.names), None)

    def _embedding(self, args: tuple, out: Tensor) -> None:
        ids, weight = args[:2]
        tangents = _each(carried(weight), lambda u: F.embedding(ids, u))
        if self._own is not None:
            self._own.add(self._name(weight), tangents)
        self._set(out, tangents)

    def _product(self, a: Any, b: Any, out: Tensor) -> None:
        shape = out.shape  # what is computed later must not hold `out`, which holds it
        for x, other in ((a, b), (b, a)):
            if not hasattr(other, "_tangents"):
                if hasattr(x, "_turns"):
                    out._turned = (x._turns, other)  # type: ignore[attr-defined]
                out._kept = (x, other)  # type: ignore[attr-defined]
                return self._later(out, lambda x=x, other=other: _each(carried(x), lambda t: _shaped(t * other, shape)))  # type: ignore[misc]
        ours, others = carried(a) or [], carried(b) or []
        if self._own is not None:
            self._own.add(self._name(a), _each(ours, lambda t: t * b))
            self._own.add(self._name(b), _each(others, lambda u: a * u))
        tangents: Tangents = []
        for t, u in zip(ours, others, strict=True):
            if t is None or u is None:
                tangents.append(None if t is u else _shaped(t * b if u is None else a * u, shape))
            elif t.shape == out.shape:
                tangents.append((t * b).addcmul_(a, u))
            else:
                tangents.append(_shaped(a * u, shape).addcmul_(t, b))
        self._set(out, tangents)

    def _sum(self, a: Any, b: Any, out: Tensor) -> None:
        for first, second in ((a, b), (b, a)):
            kept, turned = getattr(first, "_kept", None), getattr(second, "_turned", None)
            if kept and turned and kept[0] is turned[0] and isinstance(kept[1], Tensor):
                cos, sin = kept[1], turned[1]
                if cos.shape[-1] == sin.shape[-1] == out.shape[-1]:
                    return self._set(out, [t if t is None else _rotated(t, cos, sin) for t in carried(kept[0]) or []])
        tangents: Tangents = []
        for t, u in zip(carried(a) or [None] * self._count, carried(b) or [None] * self._count, strict=True):
            if t is None or u is None:
                given = t if u is None else u
                tangents.append(None if given is None else _shaped(given, out.shape))
            else:
                tangents.append(_shaped(t + u, out.shape))
        self._set(out, tangents)

    def _concatenation(self, args: tuple, kwargs: dict, out: Tensor) -> None:
        parts = args[0]
        if len(parts) == 2 and out.shape[-1] == 2 * parts[0].shape[-1]:
            minus, left = getattr(parts[0], "_minus", None), getattr(parts[1], "_left", None)
            right = getattr(minus, "_right", None)
            if left is not None and left is right and (kwargs.get("dim") == -1 or args[1:] == (-1,)):
                out._turns = left  # type: ignore[attr-defined]

        count = self._count

        def make() -> Tangents:
            """Concatenate the parts' tangents for each direction, 0 where a part has none."""
            found = [carried(part) or [None] * count for part in parts]
            tangents: Tangents = []
            for each in zip(*found, strict=True):
                if all(t is None for t in each):
                    tangents.append(None)
                    continue
                whole = [torch.zeros_like(part) if t is None else t for part, t in zip(parts, each, strict=True)]
                tangents.append(torch.cat(whole, *args[1:], **kwargs))
            return tangents

        self._later(out, make)

    def _rearranged(self, func: Any, args: tuple, kwargs: dict, out: Any) -> None:
        x = args[0]
        if func is Tensor.__getitem__ and isinstance(args[1], tuple) and len(args[1]) == 2 and args[1][0] is Ellipsis:
            half, at = x.shape[-1] // 2, args[1][1]
            if 2 * half == x.shape[-1] and isinstance(at, slice):
                if at == slice(None, half):
                    out._left = x
                elif at == slice(half, None):
                    out._right = x
        results = _each(carried(x), lambda t: func(t, *args[1:], **kwargs))
        if isinstance(out, Tensor):
            return self._set(out, results)
        for i, part in enumerate(out):
            self._set(part, _each(results, lambda several, i=i: several[i]))  # type: ignore[misc]

    def _generic(self, func: Any, args: tuple, kwargs: dict, out: Any) -> None:
        outs = [x for x in tensors_in(out) if x.dtype.is_floating_point]
        found: list[Tangents] = [[] for _ in outs]
        for k in range(self._count):
            with forward_ad.dual_level():
                dual = func(*_dual(args, k), **_dual(kwargs, k))
                parts = [forward_ad.unpack_dual(x).tangent for x in tensors_in(dual) if x.dtype.is_floating_point]
            for tangents, part in zip(found, parts, strict=True):
                tangents.append(part)
        for x, tangents in zip(outs, found, strict=True):
            if any(t is not None for t in tangents):
                self._set(x, tangents)


def _each(tangents: Tangents | None, function: Callable[[Tensor], Any]) -> Any:
    return [None if t is None else function(t) for t in tangents or []]


def _alone(args: tuple, kwargs: dict) -> bool:
    """Whether no argument but the first carries tangents."""
    return not any(hasattr(x, "_tangents") for x in tensors_in((args[1:], kwargs)))


def _over_last(args: tuple, kwargs: dict) -> bool:
    """Whether a mean is over the last dimension, which it keeps."""
    return (tuple(args[1:2]) in ((-1,), ((-1,),)) and bool(kwargs.get("keepdim"))) or tuple(args[1:]) == (-1, True)


def _shaped(t: Tensor, shape: torch.Size) -> Tensor:
    return t if t.shape == shape else t.expand(shape).clone()


def _rotated(t: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """(t₁, t₂)·cos + (−t₂, t₁)·sin."""
    half = t.shape[-1] // 2
    moved = t * cos
    moved[..., :half].addcmul_(t[..., half:], sin[..., :half], value=-1)
    moved[..., half:].addcmul_(t[..., :half], sin[..., half:])
    return moved


def _dual(value: Any, k: int) -> Any:
    """The arguments of a function with the k-th tangents in them."""
    if isinstance(value, Tensor):
        tangents = carried(value)
        tangent = None if tangents is None else tangents[k]
        plain = value.detach() if hasattr(value, "_tangents") else value
        return plain if tangent is None else forward_ad.make_dual(plain, tangent.to(plain))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_dual(item, k) for item in value))
    if isinstance(value, tuple | list):
        return type(value)(_dual(item, k) for item in value)
    if isinstance(value, dict):
        return {name: _dual(item, k) for name, item in value.items()}
    return value
