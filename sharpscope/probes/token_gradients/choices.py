"""Discrete choices of a model, such as a router's experts or an indexer's keys.

A derivative at θ keeps the choices at θ. A finite step may change a choice between close candidates, and then the difference
of two passes does not approximate the derivative.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from sharpscope.errors import UserError

# Operations that return (values, indices), indices alone, and booleans.
_SELECTIONS = {torch.topk, Tensor.topk, torch.sort, Tensor.sort, torch.max, Tensor.max, torch.min, Tensor.min}
_PLACES = {torch.argmax, Tensor.argmax, torch.argmin, Tensor.argmin, torch.argsort, Tensor.argsort}
_COMPARISONS = {
    getattr(home, name)
    for home, names in (
        (torch, ("gt", "lt", "ge", "le", "greater", "less", "greater_equal", "less_equal", "eq", "ne")),
        (Tensor, ("gt", "lt", "ge", "le", "eq", "ne", "__gt__", "__lt__", "__ge__", "__le__", "__eq__", "__ne__")),
    )
    for name in names
}


def chosen_by(func: Callable, args: tuple, out: Any) -> Tensor | None:
    """The indices or booleans that `func` computed from floating-point numbers; None if it computes none."""
    if not args or not isinstance(args[0], Tensor) or not args[0].dtype.is_floating_point:
        return None
    if func in _SELECTIONS:
        return out[1] if isinstance(out, tuple) else None  # the maximum of everything has no index
    return out if func in _PLACES or func in _COMPARISONS else None


class Choices(TorchFunctionMode):
    """Context manager that records the choices of a pass, or repeats those of another.

    Attributes:
        made: recorded choices, in order.
    """

    def __init__(self, held: list[Tensor] | None = None) -> None:
        """Record choices, or repeat `held`, the `made` of another pass over the same rows."""
        super().__init__()
        self.made: list[Tensor] = []
        self._held: Iterator[Tensor] | None = None if held is None else iter(held)

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        choice = chosen_by(func, args, out)
        if choice is None:
            return out
        if self._held is None:
            self.made.append(choice)
            return out
        held = next(self._held, None)
        if held is None or held.shape != choice.shape or held.dtype != choice.dtype:
            raise UserError(
                f"method, 'central': a finite step changes which operations the model runs (at `{func.__name__}`); use "
                "method='forward'"
            )
        if not isinstance(out, tuple):
            return held
        return type(out)((_taken(args[0], held, args[1:], kwargs or {}, func), held))


def _taken(x: Tensor, index: Tensor, args: tuple, kwargs: dict, func: Callable) -> Tensor:
    """The values of `x` at `index`, in the form in which `func` returns them."""
    topk = func in (torch.topk, Tensor.topk)
    position = 1 if topk else 0
    dim = kwargs.get("dim", args[position] if len(args) > position else -1)
    if index.ndim == x.ndim:
        return x.gather(dim, index)
    return x.gather(dim, index.unsqueeze(dim)).squeeze(dim)
