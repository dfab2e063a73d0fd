"""A cache of facts about a model that is cleared when the model changes.

Values of weights are not compared, since training changes them at every step. Compared are modules, functions and parameters (by
identity; parameters also by type, shape, device and `requires_grad`), plain attributes of modules (soft caps, scales, active
adapters), the number of hooks, and configurations. Not detected are changed values of buffers and state in other objects.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import FunctionType, MethodType, NoneType
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from sharpscope.probes.guard import model_configs

_OWN = frozenset(vars(nn.Module()))  # attributes of every module, such as the training mode
_SCALARS = (bool, int, float, str, NoneType, torch.dtype)
_known: WeakKeyDictionary[Any, tuple[Any, list[ref[Any]], dict[str, Any]]] = WeakKeyDictionary()


def remembered(model: nn.Module) -> dict[str, Any]:
    """The cache of a model: a dictionary that is empty again after the model has changed."""
    facts: list[Any] = [_plain(vars(config)) for config in model_configs(model)]
    objects: list[Any] = []
    for module in model.modules():
        held = {name: value for name, value in vars(module).items() if name not in _OWN}
        functions = [value for value in held.values() if isinstance(value, FunctionType | MethodType)]
        parameters = {name: p for name, p in module._parameters.items() if p is not None}
        objects += [module, *functions, *parameters.values()]
        hooks = len(module._forward_hooks) + len(module._forward_pre_hooks)
        facts.append((type(module), hooks, {name: id(child) for name, child in module._modules.items()}, _plain(held)))
        facts += [(name, p.dtype, p.shape, p.requires_grad, p.device) for name, p in parameters.items()]
    return _cache(model, facts, objects)


def remembered_closure(loss_fn: Callable[[], Tensor], parameters: Sequence[Tensor]) -> dict[str, Any]:
    """The cache of a closure over `parameters`; always empty if the closure has no weak references."""
    try:
        return _cache(loss_fn, None, parameters)
    except TypeError:
        return {}


def _cache(key: Any, facts: Any, objects: Sequence[Any]) -> dict[str, Any]:
    """The dictionary of `key`, a new one unless facts and objects are the same as before and the objects still live."""
    facts = (facts, [id(one) for one in objects])
    known = _known.get(key)
    if known is None or known[0] != facts or any(held() is None for held in known[1]):
        known = _known[key] = facts, [ref(one) for one in objects], {}
    return known[2]


def _plain(value: Any, depth: int = 3) -> Any:
    """A value as something that can be compared; of other objects the type alone."""
    if isinstance(value, _SCALARS):
        return type(value), value
    if depth and isinstance(value, list | tuple | set | frozenset):
        return type(value), [_plain(part, depth - 1) for part in value]
    if depth and isinstance(value, dict):
        return type(value), {str(name): _plain(part, depth - 1) for name, part in value.items()}
    return type(value)
