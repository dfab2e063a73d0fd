"""Restore a model bit for bit after a probe, also if the probe raises; facts about a model: precision, groups of parameters, a cache."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FunctionType, MethodType, NoneType
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

_LAYER = re.compile(r"\.(?:layers|h|blocks|block)\.(\d+)\.")
_WORDS = {
    "norm": ("norm", "ln_", ".ln"),
    "attention": ("attn", "attention"),
    "mlp": ("mlp", "expert", "feed_forward", "ffn"),
    "embedding": ("embed", "wpe", "wte"),
}
_OWN = frozenset(vars(nn.Module()))  # attributes of every module, such as the training mode
Facts = dict[str, object]
"""What is known of a model, by name."""
_SCALARS = (bool, int, float, str, NoneType, torch.dtype)
_known: WeakKeyDictionary[object, tuple[object, list[ref[object]], Facts]] = WeakKeyDictionary()


@contextmanager
def guarded(model: nn.Module, *, attention: str | None = None) -> Iterator[None]:
    """Context manager in which a model is in eval mode and may be differentiated; its state is restored afterwards.

    Restored are `requires_grad`, `.grad` (the same tensors; None inside), module attributes and rotary frequencies (which a
    forward pass may set), train or eval mode, the random states of CPU and CUDA, and the attention and experts implementations
    of all sub-models. The block must not write to the values of parameters. Inside, mixtures of experts use the eager
    implementation, since transformers' grouped matrix product has no forward-mode derivative; `attention`: see
    `attention_implementation`, None for the present one.
    """
    with (
        random_state(),
        _eval_mode(model),
        gradients(model.parameters()),
        nullcontext() if attention is None else attention_implementation(model, attention),
        _implementation(
            model,
            "_experts_implementation_internal",
            lambda _, current: current and "eager",
        ),
    ):
        yield


@contextmanager
def attention_implementation(model: nn.Module, name: str) -> Iterator[None]:
    """Use another attention implementation of transformers' `AttentionInterface` within the block.

    `math` is one with forward-mode and second derivatives: SDPA's MATH kernel, or eager attention if the model uses it or
    soft-caps its scores.
    """
    with (
        sdpa_kernel(SDPBackend.MATH) if name == "math" else nullcontext(),
        _implementation(
            model,
            "_attn_implementation_internal",
            _differentiable if name == "math" else lambda *_: name,
        ),
    ):
        yield


@contextmanager
def _implementation(
    model: nn.Module,
    setting: str,
    chosen: Callable[[object, str | None], str | None],
) -> Iterator[None]:
    """Within the block a setting of the model's configurations is `chosen(configuration, present value)`."""
    before = [
        (config, getattr(config, setting))
        for config in model_configs(model)
        if hasattr(config, setting)
    ]
    try:
        for config, current in before:
            setattr(config, setting, chosen(config, current))
        yield
    finally:
        for config, current in before:
            setattr(config, setting, current)


def _differentiable(config: object, current: str | None) -> str:
    return (
        "eager" if current == "eager" or getattr(config, "attn_logit_softcapping", None) else "sdpa"
    )


def model_configs(model: nn.Module) -> list[object]:
    """The distinct transformers configurations of a model's modules, those of its sub-models included."""
    configs = [getattr(module, "config", None) for module in model.modules()]
    return list(
        {
            id(config): config
            for config in configs
            if hasattr(config, "_attn_implementation_internal")
        }.values()
    )


def random_state() -> AbstractContextManager[None]:
    """Restore the random states of CPU and CUDA after the block."""
    return torch.random.fork_rng(
        range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0)
    )


@contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    """Eval mode within the block; restores attributes (the mode is one) and buffers of all modules, and rotary frequencies."""
    before = [(module, dict(module.__dict__), dict(module._buffers)) for module in model.modules()]
    written = [  # rotary embeddings that depend on the sequence length write to their frequencies in each forward pass
        (tensor, tensor.detach().clone())
        for module, attributes, buffers in before
        if "inv_freq" in buffers or any(name.endswith("_inv_freq") for name in buffers)
        for tensor in (*attributes.values(), *buffers.values())
        if isinstance(tensor, Tensor)
    ]
    try:
        model.eval()
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
                tensor.data.copy_(values)


@contextmanager
def gradients(parameters: Iterable[Tensor]) -> Iterator[None]:
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


@contextmanager
def working_precision(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Context in which half-precision tensors are replaced by float32 copies; the original storage is not written to.

    Perturbations are below the resolution of half precision: rho = 0.05 over 1.5 B parameters moves each by 1.3e-6.
    """
    before = [(tensor, tensor.data) for tensor in tensors]
    try:
        for tensor, data in before:
            if data.dtype in (torch.bfloat16, torch.float16):
                tensor.data = data.float()
        yield
    finally:
        for tensor, data in before:
            tensor.data = data


@contextmanager
def placed(parameters: Sequence[Tensor], values: Sequence[Tensor] | None = None) -> Iterator[None]:
    """Within it the weights are `values` (None: as they are); afterwards they are bit for bit what they were."""
    kept = [parameter.detach().clone() for parameter in parameters]
    try:
        _write(parameters, values or ())
        yield
    finally:
        _write(parameters, kept)


@torch.no_grad()
def _write(parameters: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=False):
        parameter.copy_(value)


@contextmanager
def moved_by(
    parameters: Sequence[Tensor],
    steps: Iterable[Tensor | None],
    scale: float = 1.0,
) -> Iterator[None]:
    """Within it the weights are moved by scale·step (None: not at all); afterwards they are bit for bit what they were."""
    with placed(parameters):
        with torch.no_grad():
            for parameter, step in zip(parameters, steps, strict=True):
                if step is not None:
                    parameter.add_(step, alpha=scale)
        yield


def remembered(model: nn.Module) -> Facts:
    """A cache of facts about a model: a dictionary that is empty again after the model has changed.

    Compared are modules, functions and parameters (by identity; parameters also by type, shape, device and `requires_grad`), plain
    attributes of modules (soft caps, scales, active adapters), the number of hooks, and configurations; not values of weights,
    which training changes at every step, nor those of buffers.
    """
    facts: list[object] = [_plain(vars(config)) for config in model_configs(model)]
    objects: list[object] = []
    for module in model.modules():
        held = {name: value for name, value in vars(module).items() if name not in _OWN}
        functions = [
            value for value in held.values() if isinstance(value, FunctionType | MethodType)
        ]
        parameters = {name: p for name, p in module._parameters.items() if p is not None}
        objects += [module, *functions, *parameters.values()]
        hooks = len(module._forward_hooks) + len(module._forward_pre_hooks)
        facts.append(
            (
                type(module),
                hooks,
                {name: id(child) for name, child in module._modules.items()},
                _plain(held),
            )
        )
        facts += [
            (name, p.dtype, p.shape, p.requires_grad, p.device) for name, p in parameters.items()
        ]
    return _cache(model, facts, objects)


def remembered_closure(loss_fn: Callable[[], Tensor], parameters: Sequence[Tensor]) -> Facts:
    """The cache of a closure over `parameters`; always empty if the closure has no weak references."""
    try:
        return _cache(loss_fn, None, parameters)
    except TypeError:
        return {}


def _cache(key: object, facts: object, objects: Sequence[object]) -> Facts:
    """The dictionary of `key`, a new one unless facts and objects are the same as before and the objects still live."""
    facts = (facts, [id(one) for one in objects])
    known = _known.get(key)
    if known is None or known[0] != facts or any(held() is None for held in known[1]):
        known = _known[key] = facts, [ref(one) for one in objects], {}
    return known[2]


def _plain(value: object, depth: int = 3) -> object:
    """A value as something that can be compared; of other objects the type alone."""
    if isinstance(value, _SCALARS):
        return type(value), value
    if depth and isinstance(value, list | tuple | set | frozenset):
        return type(value), [_plain(part, depth - 1) for part in value]
    if depth and isinstance(value, dict):
        return type(value), {str(name): _plain(part, depth - 1) for name, part in value.items()}
    return type(value)


def tolerance(tensors: Iterable[Tensor]) -> float:
    """The relative error that rounding may explain, from ε of the coarsest type among a model's tensors.

    Two ways to one gradient differ by a small multiple of √layers·ε, while a wrong derivative is seldom right to 10⁻³. 2√ε lies
    between: 7e-4 in float32, 0.06 in float16 and 0.18 in bfloat16 (seen on tiny models: at most 3e-6, 8e-3 and 8e-2). Models in
    float64 count as float32: transformers takes softmax, norms and routers in float32 within them.
    """
    types = {torch.float32, *(tensor.dtype for tensor in tensors if tensor.is_floating_point())}
    return 2 * math.sqrt(max(torch.finfo(dtype).eps for dtype in types))


def group_names(model: nn.Module, named: dict[str, nn.Parameter]) -> dict[str, tuple[str, ...]]:
    """The groups of each parameter: its kind, and `layers.<i>` if it is in a decoder layer.

    Kinds are `embedding` (with a tied output layer), `attention`, `mlp`, `norm` (also of queries and keys), `head`, `other`.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[operator]
    fixed = {id(p): "head" for p in (head.parameters() if head is not None else ())}
    fixed |= {id(p): "embedding" for p in embedding.parameters()}
    names = {id(p): name.lower() for name, p in model.named_parameters()}
    groups: dict[str, tuple[str, ...]] = {}
    for name, parameter in named.items():
        words = names[id(parameter)]
        by_name = (kind for kind, parts in _WORDS.items() if any(part in words for part in parts))
        kind = fixed.get(id(parameter)) or next(by_name, "other")
        layer = _LAYER.search(f".{name}")
        groups[name] = (kind,) if layer is None else (kind, f"layers.{layer.group(1)}")
    return groups
