"""A cache of facts about a model that is cleared when the model changes.

Values of weights are not compared, since training changes them at every step. Compared are modules and parameters (by
identity, with type, shape, device and `requires_grad`), plain attributes of modules (soft caps, scales, active adapters), the
number of hooks, and the values of configurations. Not detected are changed values of buffers and state in objects that are
not modules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import FunctionType, MethodType, NoneType
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from sharpscope.probes.guard import model_configs

_OWN = frozenset(vars(nn.Module()))  # attributes of every module, such as the training mode
_SCALARS = frozenset((bool, int, float, str, NoneType, torch.dtype))
_FUNCTIONS = frozenset((FunctionType, MethodType))
_closures: WeakKeyDictionary[Callable[[], Tensor], tuple[list[ref[Tensor]], dict[str, Any]]] = WeakKeyDictionary()
_known: WeakKeyDictionary[nn.Module, tuple[list[Any], dict[str, Any]]] = WeakKeyDictionary()


def remembered(model: nn.Module) -> dict[str, Any]:
    """The cache of a model: a dictionary that is empty again after the model has changed."""
    known = _known.get(model)
    if known is not None and _same(known[0], model):
        return known[1]
    fresh: dict[str, Any] = {}
    _known[model] = [_hold(part) for part in _parts(model)], fresh
    return fresh


def remembered_closure(loss_fn: Callable[[], Tensor], parameters: Sequence[Tensor]) -> dict[str, Any]:
    """The cache of a closure over `parameters`; always empty if the closure has no weak references."""
    try:
        known = _closures.get(loss_fn)
        if known is not None and [id(held()) for held in known[0]] == [*map(id, parameters)]:
            return known[1]
        fresh: dict[str, Any] = {}
        _closures[loss_fn] = [ref(parameter) for parameter in parameters], fresh
    except TypeError:
        return {}
    return fresh


def _same(held: list[Any], model: nn.Module) -> bool:
    there = iter(held)
    for part in _parts(model):
        before = next(there, None)
        if before is None or (before() is not part if isinstance(before, ref) else before != part):
            return False
    return next(there, None) is None


def _hold(part: Any) -> Any:
    """A weak reference to an object: its `id` alone may belong to another one once it is gone."""
    return part if isinstance(part, tuple) else ref(part)


def _parts(model: nn.Module) -> Iterator[Any]:
    """Modules, parameters and functions kept in modules, compared by identity, and tuples, compared by value."""
    for module in model.modules():
        held = vars(module)
        yield module
        yield (
            type(module),
            *[(name, id(child)) for name, child in held["_modules"].items()],
            len(held["_forward_hooks"]) + len(held["_forward_pre_hooks"]),
            *[
                (name, value if type(value) in _SCALARS else _plain(value))
                for name, value in held.items()
                if name not in _OWN
            ],
        )
        yield from [value for value in held.values() if type(value) in _FUNCTIONS]
        for name, parameter in held["_parameters"].items():
            if parameter is not None:
                yield parameter
                yield name, parameter.dtype, parameter.shape, parameter.requires_grad, parameter.device
    for config in model_configs(model):
        yield ("config", _plain(vars(config)))


def _plain(value: Any, depth: int = 3) -> Any:
    """A value as something that can be compared; of other objects the type alone."""
    kind = type(value)
    if kind in _SCALARS:
        return value
    if depth and isinstance(value, list | tuple | set | frozenset):
        return kind, *[_plain(part, depth - 1) for part in value]
    if depth and isinstance(value, dict):
        return kind, *[(str(name), _plain(part, depth - 1)) for name, part in value.items()]
    return kind
