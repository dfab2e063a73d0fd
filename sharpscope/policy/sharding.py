"""Shard weights over processes (FSDP2), and gather them for generation, probes and saving.

`shard` shards the repeated layers. Embeddings, the final norm and the output layer are replicated, because the output layer
is used outside the model's forward pass (log-probabilities are computed in chunks). The other functions also take models
that another trainer has sharded.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from sharpscope import distributed
from sharpscope.errors import UserError
from sharpscope.policy.head import backbone, layers_of
from sharpscope.policy.loading import has_adapters


def shard(model: nn.Module, reshard_after_forward: bool = True) -> None:
    """Shard the layers' parameters over all processes, in place. Gradients are summed over processes, not averaged.

    Raises:
        UserError: The model has adapters, or its architecture does not mark the layers.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if has_adapters(model):
        raise UserError(
            "policy.lora: adapters are not sharded; launch without --use_fsdp (data-parallel processes)"
        )
    layers = layers_of(model)
    inside = {parameter for layer in layers for parameter in layer.parameters()}
    outside = {parameter for parameter in model.parameters() if parameter not in inside}
    device = next(model.parameters()).device.type
    mesh = init_device_mesh(device, (torch.distributed.get_world_size(),))
    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard_after_forward)
    fully_shard(
        backbone(model),
        mesh=mesh,
        reshard_after_forward=reshard_after_forward,
        ignored_params=outside,
    )
    for module in _sharded_modules(model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo does not support scaled sums


def is_sharded(model: nn.Module) -> bool:
    """Whether any parameter is sharded over processes."""
    return any(is_shard(parameter) for parameter in model.parameters())


def is_shard(tensor: Tensor) -> bool:
    """Whether the tensor is sharded over processes (FSDP2)."""
    return hasattr(tensor, "to_local")


def copies(tensor: Any) -> int:
    """Number of processes that hold the same part of a sharded tensor; above 1 where groups of processes hold whole models (HSDP)."""
    mesh = tensor.device_mesh
    return math.prod(
        mesh.size(axis) for axis, placed in enumerate(tensor.placements) if placed.is_replicate()
    )


def local_part(tensor: Any) -> Tensor:
    """The part of a tensor that this process holds, detached; all of a tensor that is not sharded."""
    return (tensor.to_local() if is_shard(tensor) else tensor).detach()


def sum_over_parts(terms: Iterable[tuple[Tensor, Sequence[float]]], count: int) -> list[float]:
    """Sums (count,) over tensors of the numbers (count,) of this process's part of each: every part counts once.

    All processes must call it if a tensor is sharded.
    """
    whole = [0.0] * count
    parts = [0.0] * count
    sharded = False
    for tensor, numbers in terms:
        shard = is_shard(tensor)
        target, held = (parts, copies(tensor)) if shard else (whole, 1)
        for index, number in enumerate(numbers):
            target[index] += number / held
        sharded = sharded or shard
    if sharded:
        parts = [sum(values) for values in zip(*distributed.gather(parts), strict=True)]
    return [x + y for x, y in zip(whole, parts, strict=True)]


def full_tensor(tensor: Any) -> Any:
    """Gather a sharded tensor (all processes must call it); return other values unchanged."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _sharded_modules(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "set_gradient_divide_factor")]


def reshard(model: nn.Module) -> None:
    """Free gathered weights, so that the parameters are the shards; nothing for a model that is not sharded.

    A forward pass without a backward pass can leave them gathered.
    """
    for module in _sharded_modules(model):
        module.reshard()


@contextmanager
def unsharded(model: nn.Module, layers: bool = True) -> Iterator[None]:
    """Gather all weights on every process, so that each can run any number of forward passes.

    Without `layers` only the other weights, such as the output layer's: then all processes must run the layers equally often.
    """
    modules = [
        m
        for m in _sharded_modules(model)
        if layers or not isinstance(m, GradientCheckpointingLayer)
    ]
    # torch has no function that returns this setting, which can differ between modules.
    before = [
        (group, group.post_forward_mesh_info) for module in modules for group in _groups(module)
    ]
    for module in modules:
        module.set_reshard_after_forward(False, recurse=False)
        module.unshard()
    try:
        yield
    finally:
        for group, setting in before:
            group.post_forward_mesh_info = setting
        for module in modules:
            module.reshard()


def summation_factor(model: nn.Module) -> float:
    """What FSDP2's reduction multiplies a gradient by that all processes compute alike: 1 where it averages."""
    groups = [group for module in _sharded_modules(model) for group in _groups(module)]
    divided = next((group.gradient_divide_factor for group in groups), None)
    return distributed.world_size() / divided if divided else 1.0


def recover(model: nn.Module) -> None:
    """Make a sharded model usable again after an error in the middle of a forward pass, in every process."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

    for module in _sharded_modules(model):
        state = module._get_fsdp_state()
        state._state_ctx.iter_forward_root = None
        state._training_state = TrainingState.IDLE
        for group in _groups(module):
            group._training_state = TrainingState.IDLE
        module.reshard()


def copy_bytes(model: nn.Module, copies: int) -> float:
    """Size of `copies` whole copies of a model's weights [bytes]."""
    return copies * float(sum(p.numel() * p.element_size() for p in model.parameters()))


def _groups(module: Any) -> list[Any]:
    """FSDP2's groups of parameters of a module; torch before 2.10 has one or none."""
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


@dataclass(frozen=True)
class ModelView:
    """The input of a probe: an unsharded model with gradients in `.grad`, its trainable parameters and their optimizer."""

    model: nn.Module
    parameters: list[nn.Parameter]
    optimizer: torch.optim.Optimizer


def gathered_copy(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    *,
    keep: bool = True,
    moments: bool = True,
) -> ModelView:
    """Copy a sharded model with all weights and gradients, and with `moments` the optimizer's state, to `device`.

    All processes must call it; with `keep` False they only take part in the collectives.
    """
    from torch.distributed.fsdp import FSDPModule

    reshard(model)
    plain_type: Any = next(kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))
    with torch.device("meta"):
        plain = plain_type(copy.deepcopy(model.config))
    plain = plain.to(next(model.parameters()).dtype).eval()
    plain = plain.to_empty(device=device if keep else "meta")
    plain.tie_weights()
    copies: dict[Tensor, nn.Parameter] = {}
    named: dict[str, nn.Parameter] = dict(plain.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            copied = copies[parameter] = named[name]
            copied.requires_grad_(parameter.requires_grad)
            whole = full_tensor(parameter.detach())
            gradient = full_tensor(parameter.grad)
            if keep:
                copied.copy_(whole)
                copied.grad = None if gradient is None else gradient.to(device)
        buffers = dict(plain.named_buffers())
        for name, buffer in model.named_buffers() if keep else ():
            buffers[name].copy_(buffer)
    groups = [
        group | {"params": [copies[p] for p in group["params"]]} for group in optimizer.param_groups
    ]
    copied_optimizer = type(optimizer)(groups, lr=optimizer.defaults["lr"])  # type: ignore[call-arg]
    for tensor, state in optimizer.state.items() if moments else ():
        for name, value in state.items():
            entry = full_tensor(value)
            if keep:
                copied_optimizer.state[copies[tensor]][name] = (
                    entry if name == "step" else entry.to(device)
                )
    return ModelView(plain, [p for p in plain.parameters() if p.requires_grad], copied_optimizer)


def shard_state(whole: ModelView, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Shard the optimizer state of `whole` into the optimizer of a sharded model."""
    from torch.distributed.tensor import distribute_tensor

    names = dict(model.named_parameters())
    for name, full_parameter in whole.model.named_parameters():
        parameter: Any = names[name]
        for entry, value in whole.optimizer.state.get(full_parameter, {}).items():
            part = value
            if entry != "step" and is_shard(parameter):
                part = distribute_tensor(
                    value.to(parameter.device),
                    parameter.device_mesh,
                    parameter.placements,
                )
            optimizer.state[parameter][entry] = part
