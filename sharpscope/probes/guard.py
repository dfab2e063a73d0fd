"""Look without touching: a probe leaves the model bit for bit as it found it, also when it raises."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from sharpscope.errors import UserError


@contextmanager
def guarded(
    model: torch.nn.Module, *, weights: bool = True, attention: str | None = None, training: bool | None = False
) -> Iterator[None]:
    """Within the block the model may be perturbed and differentiated freely; afterwards it is as it was.

    Put back, also when the block raises: every parameter and buffer bitwise (in its original storage), `requires_grad`,
    `.grad` (the very tensors; inside the block it is None everywhere), the attributes of every module (what a forward
    pass may set, such as the frequencies of a rotary embedding that follow the length of the text), its train/eval
    mode, the random states of the CPU and of every CUDA device, and the attention and experts implementations of every
    sub-model. Inside, mixtures of experts compute one expert after the other: transformers' grouped matrix product has
    no forward-mode derivative.

    Args:
        model: any module; a `transformers` model if `attention` is given.
        weights: keep a copy of parameters and buffers. Pass False for probes that never write to them (no copy is
            made then but of rotary frequencies, and the others' values are not put back).
        attention: attention to use inside: None leaves it; "math" is an implementation that has forward-mode and
            second derivatives (SDPA's MATH kernel, or eager where the model runs eager or soft-caps its scores);
            any other name must be known to transformers' `AttentionInterface`.
        training: mode inside (False: dropout off); None leaves the mode of every module.

    Raises:
        UserError: when `attention` is not an implementation that transformers knows.
    """
    with ExitStack() as stack:
        stack.enter_context(_random_state())
        stack.enter_context(_attributes(model))
        stack.enter_context(_modes(model, training))
        stack.enter_context(_gradients(model))
        if weights:
            stack.enter_context(_weights(model))
        if attention is not None:
            stack.enter_context(attention_implementation(model, attention))
        stack.enter_context(experts_implementation(model, "eager"))
        yield


@contextmanager
def attention_implementation(model: torch.nn.Module, name: str) -> Iterator[None]:
    """Run `model` with another attention implementation; see `guarded` for the names.

    Raises:
        UserError: for a name that transformers does not know.
    """
    configs = model_configs(model)
    before = [config._attn_implementation for config in configs]
    with ExitStack() as stack:
        if name == "math":
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        elif name != "eager":
            from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

            if name not in ALL_ATTENTION_FUNCTIONS.valid_keys():
                raise UserError(f"attention: '{name}' is not registered with transformers; use 'math' or 'eager'")
        try:
            for config, current in zip(configs, before, strict=True):
                config._attn_implementation_internal = _differentiable(config, current) if name == "math" else name
            yield
        finally:
            for config, current in zip(configs, before, strict=True):
                config._attn_implementation_internal = current


@contextmanager
def experts_implementation(model: torch.nn.Module, name: str) -> Iterator[None]:
    """Run the mixtures of experts in `model` by another implementation of transformers' `ExpertsInterface`."""
    configs = [config for config in model_configs(model) if hasattr(config, "_experts_implementation_internal")]
    before = [config._experts_implementation_internal for config in configs]
    try:
        for config, current in zip(configs, before, strict=True):
            config._experts_implementation_internal = name if current is not None else None
        yield
    finally:
        for config, current in zip(configs, before, strict=True):
            config._experts_implementation_internal = current


def _differentiable(config: Any, current: str | None) -> str:
    """`eager` for models that run it or whose scores are soft-capped (SDPA cannot do that), else `sdpa`."""
    return "eager" if current == "eager" or getattr(config, "attn_logit_softcapping", None) else "sdpa"


def model_configs(model: torch.nn.Module) -> list[Any]:
    """Every distinct transformers configuration that a module of `model` holds, sub-configurations included."""
    found: dict[int, Any] = {}

    def visit(config: Any) -> None:
        if config is None or not hasattr(config, "_attn_implementation_internal") or id(config) in found:
            return
        found[id(config)] = config
        for name in getattr(config, "sub_configs", None) or {}:
            visit(getattr(config, name, None))

    for module in model.modules():
        visit(getattr(module, "config", None))
    return list(found.values())


@contextmanager
def _random_state() -> Iterator[None]:
    cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    before = torch.get_rng_state()
    before_cuda = torch.cuda.get_rng_state_all() if cuda else []
    try:
        yield
    finally:
        torch.set_rng_state(before)
        if before_cuda:
            torch.cuda.set_rng_state_all(before_cuda)


@contextmanager
def _attributes(model: torch.nn.Module) -> Iterator[None]:
    """Attributes and buffers of every module: the very objects, and of rotary embeddings the values in their tensors too.

    Rotary embeddings that scale with the length of the text write to their frequencies in every forward pass.
    """
    before = [(module, dict(module.__dict__), dict(module._buffers)) for module in model.modules()]
    written = [
        (tensor, tensor.detach().clone())
        for module, attributes, buffers in before
        if "inv_freq" in buffers or any(name.endswith("_inv_freq") for name in buffers)
        for tensor in (*attributes.values(), *buffers.values())
        if isinstance(tensor, torch.Tensor)
    ]
    try:
        yield
    finally:
        for module, attributes, buffers in before:
            for name in module.__dict__.keys() - attributes.keys():
                del module.__dict__[name]
            module.__dict__.update(attributes)
            module._buffers.clear()
            module._buffers.update(buffers)
        with torch.no_grad():
            for tensor, values in written:
                tensor.copy_(values)


@contextmanager
def _modes(model: torch.nn.Module, training: bool | None) -> Iterator[None]:
    before = [(module, module.training) for module in model.modules()]
    try:
        if training is not None:
            model.train(training)
        yield
    finally:
        for module, mode in before:
            module.training = mode


@contextmanager
def _gradients(model: torch.nn.Module) -> Iterator[None]:
    before = [(parameter, parameter.grad, parameter.requires_grad) for parameter in model.parameters()]
    try:
        for parameter, _, _ in before:
            parameter.grad = None
        yield
    finally:
        for parameter, gradient, requires_grad in before:
            parameter.requires_grad_(requires_grad)
            parameter.grad = gradient


@contextmanager
def _weights(model: torch.nn.Module) -> Iterator[None]:
    tensors = [*model.parameters(), *model.buffers()]
    before = [(tensor, tensor.data, tensor.detach().clone()) for tensor in tensors]
    try:
        yield
    finally:
        for tensor, data, copy in before:
            tensor.data = data
            data.copy_(copy)
