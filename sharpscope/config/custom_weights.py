"""Token weights defined by the user: a registry, and functions given by import path."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from sharpscope.errors import UserError, nearest

if TYPE_CHECKING:
    from torch import Tensor

WeightFunction = Callable[..., "Tensor"]


@dataclass(frozen=True)
class Registered:
    """A function (StepTensors, **arguments) → weights (N, T), and its declared properties."""

    function: WeightFunction
    pointwise: bool
    bounds: tuple[float, float] | None


_REGISTRY: dict[str, Registered] = {}


def register_token_weight(
    name: str, *, pointwise: bool = False, bounds: tuple[float, float] | None = None
) -> Callable[[WeightFunction], WeightFunction]:
    """Decorator that makes `function(step, **arguments) -> weights (N, T)` available as `{kind: custom, function: name}`.

    Args:
        name: without a colon.
        pointwise: a token's weight depends on the statistics of that token only (no batch statistics, no randomness).
        bounds: (L, U) with L ≤ w ≤ U; checked. The control `reverse` and the saturation need them.

    Raises:
        UserError: the name holds a colon or is taken by another function, or the bounds are not 0 ≤ L < U.

    Examples:
        >>> import torch
        >>> import sharpscope
        >>> @sharpscope.register_token_weight("one_minus_p", pointwise=True)
        ... def one_minus_p(step):
        ...     return 1 - step.logp.exp()
        >>> from types import SimpleNamespace
        >>> one_minus_p(SimpleNamespace(logp=torch.tensor([[0.5, 0.25]]).log()))
        tensor([[0.5000, 0.7500]])
    """
    if ":" in name:
        raise UserError(f"register_token_weight name {name!r}: leave out the colon, it marks an import path")
    if bounds is not None and not 0 <= bounds[0] < bounds[1]:
        raise UserError(f"register_token_weight {name!r}: bounds {bounds} must satisfy 0 <= L < U")

    def decorate(function: WeightFunction) -> WeightFunction:
        """Register `function` and return it unchanged."""
        known = _REGISTRY.get(name)
        if known is not None and _origin(known.function) != _origin(function):
            raise UserError(
                f"register_token_weight {name!r}: already taken by {':'.join(_origin(known.function))}; choose another name"
            )
        _REGISTRY[name] = Registered(function, pointwise, bounds)
        return function

    return decorate


register_shaping = register_token_weight
"""Name of `register_token_weight` in version 0.1."""


def _origin(function: Any) -> tuple[str, str]:
    return (getattr(function, "__module__", "?"), getattr(function, "__qualname__", repr(function)))


def find_token_weight(name: str) -> Registered:
    """The registered function called `name`, or the one at the import path `package.module:function`.

    The module is looked for as Python does, and then in the working directory.

    Raises:
        UserError: no such name, module or function, or it cannot be called.
    """
    if name in _REGISTRY:
        return _REGISTRY[name]
    module_name, colon, attribute = name.partition(":")
    if not colon or not module_name or not attribute:
        raise UserError(
            f"weight function {name!r}: neither registered nor an import path `package.module:function`"
            + (nearest(name, _REGISTRY) if _REGISTRY else "")
        )
    function = getattr(_module(name, module_name), attribute, None)
    if not callable(function):
        raise UserError(f"weight function {name!r}: module {module_name!r} has no function {attribute!r}")
    for registered in _REGISTRY.values():  # decorated, but named by its path: the decorator's promises hold
        if registered.function is function:
            return registered
    return Registered(function, pointwise=False, bounds=None)


def _module(name: str, module_name: str) -> ModuleType:
    here = str(Path.cwd())
    added = here not in sys.path
    if added:  # an installed console script does not look where it is started
        sys.path.append(here)
    try:
        return importlib.import_module(module_name)
    except Exception as error:  # whatever a user's module raises while it is imported
        raise UserError(
            f"weight function {name!r}: importing {module_name!r} failed with {type(error).__name__}: {error}; "
            "check the path and the module"
        ) from error
    finally:
        if added:
            sys.path.remove(here)
