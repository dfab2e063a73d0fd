"""Weights sharded over processes (FSDP2), and gathered again for drawing, probing and saving.

The repeated layers are sharded. Embeddings, the last norm and the output layer stay whole on every process, because the
output layer is used outside the model's forward pass (log-probabilities are computed in chunks).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from sharpscope.errors import UserError
from sharpscope.policy.adapters import has_adapters
from sharpscope.policy.head import backbone
from sharpscope.policy.recompute import layers_of

_reshard: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()  # the argument of `shard`


def shard(model: nn.Module, reshard: bool = True) -> None:
    """Shard the layers' parameters over all processes, in place. Gradients are summed over processes, not averaged.

    Raises:
        UserError: the model has adapters, or an architecture that does not mark its layers.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if has_adapters(model):
        raise UserError("policy.lora: adapters are not sharded; launch without --use_fsdp (data-parallel processes)")
    layers = layers_of(model)
    inside = {parameter for layer in layers for parameter in layer.parameters()}
    outside = {parameter for parameter in model.parameters() if parameter not in inside}
    device = next(model.parameters()).device.type
    mesh = init_device_mesh(device, (torch.distributed.get_world_size(),))
    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(backbone(model), mesh=mesh, reshard_after_forward=reshard, ignored_params=outside)
    for module in _sharded_modules(model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
    _reshard[model] = reshard


def is_sharded(model: nn.Module) -> bool:
    """Whether some parameter is sharded."""
    return any(is_shard(parameter) for parameter in model.parameters())


def is_shard(tensor: Tensor) -> bool:
    """Whether this process holds only a part of the tensor (FSDP2)."""
    return hasattr(tensor, "to_local")


def full_tensor(tensor: Any) -> Any:
    """A sharded tensor gathered, for which every process must call this; anything else unchanged."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _sharded_modules(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "set_gradient_divide_factor")]


@contextmanager
def unsharded(model: nn.Module) -> Iterator[None]:
    """Within it every process holds all weights, so that each can run any number of forward passes on its own."""
    modules = _sharded_modules(model)
    for module in modules:
        module.set_reshard_after_forward(False, recurse=False)
        module.unshard()
    try:
        yield
    finally:
        for module in modules:
            module.set_reshard_after_forward(_reshard[model], recurse=False)
            module.reshard()


@dataclass(frozen=True)
class ModelView:
    """A model as probes see it: unsharded, with gradients in `.grad`, its trainable parameters and their optimizer."""

    model: nn.Module
    parameters: list[nn.Parameter]
    optimizer: torch.optim.AdamW


def gathered_copy(
    model: nn.Module, optimizer: torch.optim.AdamW, device: torch.device, *, keep: bool = True
) -> ModelView:
    """An unsharded copy of a sharded model with weights, gradients and optimizer state. Every process must call it.

    Args:
        model: sharded.
        optimizer: over its trainable parameters.
        device: of the copy.
        keep: False if this process does not need the copy and only takes part in the communication.
    """
    for module in _sharded_modules(model):
        module.reshard()  # a forward pass without a backward pass may have left it unsharded
    with torch.device("meta"):
        plain: Any = type(model)(copy.deepcopy(model.config))
    kind = next(model.parameters()).dtype
    plain = plain.to(kind).eval()
    plain = plain.to_empty(device=device if keep else "meta")
    plain.tie_weights()
    twins: dict[Tensor, nn.Parameter] = {}
    named: dict[str, nn.Parameter] = dict(plain.named_parameters())
    with torch.no_grad():
        for name, divided in model.named_parameters():
            twin = named[name]
            twins[divided] = twin
            _fill(twin, full_tensor(divided.detach()), keep)
            twin.requires_grad_(divided.requires_grad)
            gradient = None if divided.grad is None else full_tensor(divided.grad)
            if gradient is not None and keep:
                twin.grad = gradient.to(device)
        held = dict(plain.named_buffers())
        for name, buffer in model.named_buffers():
            _fill(held[name], buffer, keep)
    groups = [
        {name: value for name, value in group.items() if name != "params"}
        | {"params": [twins[p] for p in group["params"]]}
        for group in optimizer.param_groups
    ]
    copied = torch.optim.AdamW(groups)
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            entry = full_tensor(value)
            if keep:
                copied.state[twins[parameter]][name] = entry if name == "step" else entry.to(device)
    return ModelView(plain, [p for p in plain.parameters() if p.requires_grad], copied)


def _fill(target: Tensor, value: Tensor, keep: bool) -> None:
    if keep:
        target.copy_(value)


def shard_state(whole: ModelView, model: nn.Module, optimizer: torch.optim.AdamW) -> None:
    """Give a sharded model's optimizer its part of the state in `whole`."""
    from torch.distributed.tensor import distribute_tensor

    names = dict(model.named_parameters())
    for name, twin in whole.model.named_parameters():
        parameter: Any = names[name]
        for entry, value in whole.optimizer.state.get(twin, {}).items():
            part = value
            if entry != "step" and is_shard(parameter):
                part = distribute_tensor(value.to(parameter.device), parameter.device_mesh, parameter.placements)
            optimizer.state[parameter][entry] = part
