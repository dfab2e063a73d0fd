"""Restore a model bit for bit after a probe, also if the probe raises."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from sharpscope.errors import UserError


@contextmanager
def guarded(model: torch.nn.Module, *, attention: str | None = None) -> Iterator[None]:
    """Context manager in which a model is in eval mode and may be differentiated; its state is restored afterwards.

    Restored are `requires_grad`, `.grad` (the same tensors; None inside), module attributes and rotary frequencies (which a
    forward pass may set), train or eval mode, the random states of CPU and CUDA, and the attention and experts implementations
    of all sub-models. The block must not write to the values of parameters. Inside, mixtures of experts use the eager
    implementation, since transformers' grouped matrix product has no forward-mode derivative.

    Args:
        model: any module; a transformers model if `attention` is given.
        attention: attention implementation inside the block. None keeps the current one; `math` selects one with forward-mode
            and second derivatives (SDPA's MATH kernel, or eager attention if the model uses it or soft-caps its scores);
            other names are those of transformers' `AttentionInterface`.

    Raises:
        UserError: transformers does not know the attention implementation.
    """
    with (
        random_state(),
        _attributes(model),
        _eval_mode(model),
        gradients(model.parameters()),
        nullcontext() if attention is None else attention_implementation(model, attention),
        _implementation(model, "_experts_implementation_internal", lambda _, current: current and "eager"),
    ):
        yield


@contextmanager
def attention_implementation(model: torch.nn.Module, name: str) -> Iterator[None]:
    """Use another attention implementation within the block; see `guarded` for the names.

    Raises:
        UserError: transformers does not know the name.
    """
    if name not in ("math", "eager"):
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        if name not in ALL_ATTENTION_FUNCTIONS.valid_keys():
            raise UserError(f"attention: '{name}' is not an implementation of transformers; use 'math' or 'eager'")
    with (
        sdpa_kernel(SDPBackend.MATH) if name == "math" else nullcontext(),
        _implementation(model, "_attn_implementation_internal", _differentiable if name == "math" else lambda *_: name),
    ):
        yield


@contextmanager
def _implementation(
    model: torch.nn.Module, setting: str, chosen: Callable[[Any, str | None], str | None]
) -> Iterator[None]:
    """Within the block a setting of the model's configurations is `chosen(configuration, present value)`."""
    before = [(config, getattr(config, setting)) for config in model_configs(model) if hasattr(config, setting)]
    try:
        for config, current in before:
            setattr(config, setting, chosen(config, current))
        yield
    finally:
        for config, current in before:
            setattr(config, setting, current)


def _differentiable(config: Any, current: str | None) -> str:
    """`eager` if the model uses it or soft-caps its attention scores, which SDPA cannot; else `sdpa`."""
    return "eager" if current == "eager" or getattr(config, "attn_logit_softcapping", None) else "sdpa"


def model_configs(model: torch.nn.Module) -> list[Any]:
    """The distinct transformers configurations of a model's modules, including sub-configurations."""
    configs: dict[int, Any] = {}

    def visit(config: Any) -> None:
        if config is None or not hasattr(config, "_attn_implementation_internal") or id(config) in configs:
            return
        configs[id(config)] = config
        for name in getattr(config, "sub_configs", None) or {}:
            visit(getattr(config, name, None))

    for module in model.modules():
        visit(getattr(module, "config", None))
    return list(configs.values())


@contextmanager
def random_state() -> Iterator[None]:
    """Restore the random states of CPU and CUDA after the block."""
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
    """Restore the attributes and buffers of all modules, and the values of rotary frequencies.

    Rotary embeddings that depend on the sequence length write to their frequencies in each forward pass.
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
def _eval_mode(model: torch.nn.Module) -> Iterator[None]:
    before = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, mode in before:
            module.training = mode


@contextmanager
def gradients(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Restore `.grad` and `requires_grad` of leaf tensors after the block; inside, `.grad` is None."""
    before = [(parameter, parameter.grad, parameter.requires_grad) for parameter in parameters]
    try:
        for parameter, _, _ in before:
            parameter.grad = None
        yield
    finally:
        for parameter, gradient, requires_grad in before:
            parameter.requires_grad_(requires_grad)
            parameter.grad = gradient
