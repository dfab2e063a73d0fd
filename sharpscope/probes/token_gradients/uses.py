"""Uses of trainable parameters in a forward pass, and squared gradient norms from their inputs and cotangents.

Gradients of weights are not formed. That of a linear map is Σ_s b_s ⊗ a_s (inputs a, cotangents b of the outputs, positions s),
that of a gain Σ_s b_s ∘ x̂_s, that of an embedding the sum of b_s for each word. Uses are met by hooks on linear maps, embeddings
and norms; a parameter that is used in any other way, or twice, is `unhandled`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from sharpscope.policy import bare


@dataclass
class Use:
    """One use of a weight and/or bias in a forward pass over B rows of L positions."""

    kind: Literal["linear", "gain", "embedding"]
    weight: str | None  # names of the trainable parameters, None where absent or frozen
    bias: str | None
    x: Tensor  # linear: its inputs (B, L, d_in); gain: x̂ (B, L, heads, d); embedding: the ids (B, L)
    size: tuple[int, int]  # (B, L)
    ignored: int | None = None  # embedding: the word whose gradient is defined as 0

    def by_position(self, g: Tensor) -> Tensor:
        """(*shape) -> (B, L, heads, d), in at least float32."""
        return wide(_by_position(g, self.size))

    @property
    def gram(self) -> Tensor:
        """Inner products of the inputs of positions of a row, (B, L, L)."""
        if self.kind == "embedding":  # one-hot inputs
            same = self.x[:, :, None] == self.x[:, None, :]
            return (same if self.ignored is None else same & (self.x != self.ignored)[:, None]).float()
        x = wide(self.x)
        return x @ x.mT


def wide(x: Tensor) -> Tensor:
    """`x` in at least float32, since squares above 256² overflow float16."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _by_position(g: Tensor, size: tuple[int, int]) -> Tensor:
    if g.ndim == 4 and tuple(g.shape[:2]) != size:  # (B, heads, L, d)
        g = g.transpose(1, 2)
    return g.reshape(*size, -1, g.shape[-1])


def _squares(x: Tensor) -> Tensor:
    return x.square().sum(-1)


def local_squares(use: Use, g: Tensor) -> Iterator[tuple[str, Tensor]]:
    """(name, squared norms (B, L)) from the output's cotangent `g`, where that at position t is of the token that t predicts."""
    g = use.by_position(g)
    if use.kind == "gain":
        weight, bias = _squares((g * use.x).sum(-2)), _squares(g.sum(-2))
    else:
        bias = _squares(g[..., 0, :])
        weight = bias * _squares(wide(use.x)) if use.kind == "linear" else bias
        if use.ignored is not None:
            weight = weight.masked_fill(use.x == use.ignored, 0.0)
    for name, squares in ((use.weight, weight), (use.bias, bias)):
        if name is not None:
            yield name, squares


def exact_squares(use: Use, g: Tensor) -> Iterator[tuple[str, Tensor]]:
    """(name, squared norms (B,)) of the sum over the positions of each row, for a cotangent of the use's output."""
    g = use.by_position(g)
    if use.kind == "gain":
        if use.weight is not None:
            yield use.weight, _squares((g * use.x).sum((1, 2)))
        if use.bias is not None:
            yield use.bias, _squares(g.sum((1, 2)))
    else:
        g = g[:, :, 0]  # (B, L, d)
        if use.weight is not None and (use.kind == "embedding" or g.shape[1] < 1.4 * use.x.shape[-1]):
            outer = g @ g.mT  # (B, L, L)
            yield use.weight, (use.gram.to(outer) * outer).sum((1, 2))
        elif use.weight is not None:
            yield use.weight, (wide(use.x).mT.to(g) @ g).square().sum((1, 2))
        if use.bias is not None:
            yield use.bias, _squares(g.sum(1))


Measure = Callable[[Use, Tensor], None]


class UseRecorder:
    """Records uses of trainable parameters in a forward pass, whose cotangents `pull` hands to a function.

    A parameter is known by the module that holds it, so that weights which exist only while it runs (FSDP2) are known too.
    """

    def __init__(self, modules: Mapping[nn.Module, Mapping[str, str]], size: tuple[int, int]) -> None:
        self.used: dict[str, int] = {}  # how often each parameter was used, in the order of their first uses
        # Module -> attribute -> name of its trainable parameters; (B, L) of the rows.
        self._modules, self._size = modules, size
        self._anchor: Tensor | None = None
        self._measure: Measure | None = None

    @contextmanager
    def attached(self, model: nn.Module) -> Iterator[None]:
        """Record the forward passes within the block."""
        embedding: Any = bare(model).get_input_embeddings()
        with ExitStack() as stack:
            for module in dict.fromkeys([embedding, *self._modules]):
                if isinstance(module, nn.Linear | Conv1D):
                    hook: Any = self._linear
                elif isinstance(module, nn.Embedding) or module is embedding:
                    hook = self._embedding
                elif not any(module.children()) and all(p.ndim == 1 for p in module.parameters()):
                    hook = self._norm
                else:
                    continue
                stack.callback(module.register_forward_hook(hook, with_kwargs=True, prepend=True).remove)
            yield

    def unhandled(self, named: Mapping[str, nn.Parameter], output: Tensor) -> frozenset[str]:
        """The parameters that `output` depends on in another way than through one recorded use."""
        rest = [name for name in named if self.used.get(name) != 1]
        if not rest or not output.requires_grad:
            return frozenset()
        gradients = torch.autograd.grad(output.sum(), [named[name] for name in rest], allow_unused=True)
        return frozenset(name for name, gradient in zip(rest, gradients, strict=True) if gradient is not None)

    def pull(self, outputs: Any, cotangents: Any, measure: Measure) -> None:
        """Backward pass that calls `measure` with each use and its cotangent."""
        if self._anchor is None:
            return
        self._measure = measure
        try:
            torch.autograd.grad(outputs, self._anchor, cotangents, retain_graph=True, allow_unused=True)
        finally:
            self._measure = None

    def _linear(self, module: nn.Module, args: tuple, kwargs: dict, out: Tensor) -> None:
        x = args[0] if args else kwargs["input"]
        # A module with another output, such as a router's, is found to be unhandled.
        if isinstance(out, Tensor) and x.numel() == self._size[0] * self._size[1] * x.shape[-1]:
            self._add("linear", module, x.detach().reshape(*self._size, -1), out)

    def _embedding(self, module: nn.Module, args: tuple, kwargs: dict, out: Tensor) -> Tensor | None:
        if not torch.is_grad_enabled():
            return None
        if self._anchor is None:  # a backward pass to this zero reaches what depends on an embedding
            self._anchor = torch.zeros((), dtype=out.dtype, device=out.device, requires_grad=True)
        out = out + self._anchor
        ids = args[0] if args else kwargs["input"]
        # Learned positions are often subclasses that are called with the words.
        plain = type(module).forward is nn.Embedding.forward or hasattr(module, "embed_scale")
        if isinstance(module, nn.Embedding) and plain and ids.shape == self._size:
            factor = getattr(module, "embed_scale", 1.0)  # as Gemma's
            self._add("embedding", module, ids, out, ignored=module.padding_idx, factor=factor)
        return out

    def _norm(self, module: nn.Module, args: tuple, kwargs: dict, out: Any) -> None:
        """Record a module y = x̂∘w + b or x̂∘(1 + w): x̂ is the change from w = 0 to w = 1."""
        weight, bias = (module._parameters.get(key) for key in ("weight", "bias"))
        if not isinstance(out, Tensor) or weight is None or out.shape[-1:] != weight.shape:
            return
        values = []
        with torch.no_grad():
            for value in (1.0, 0.0):
                replaced = {"weight": torch.full_like(weight, value), "bias": None if bias is None else bias * 0}
                try:
                    module._parameters.update(replaced)  # type: ignore[arg-type]
                    values.append(module.forward(*args, **kwargs))
                finally:
                    module._parameters.update({"weight": weight, "bias": bias})
        if out.numel() % (self._size[0] * self._size[1] * out.shape[-1]) == 0:
            self._add("gain", module, _by_position(wide(values[0]) - wide(values[1]), self._size), out)

    def _add(self, kind: Any, module: nn.Module, x: Tensor, out: Tensor, *, factor: Any = 1.0, **more: Any) -> None:
        """Record a use, whose cotangent is that of `out` times `factor`."""
        names = self._modules.get(module, {})
        if not names or not out.requires_grad:
            return
        use = Use(kind, names.get("weight"), names.get("bias"), x, self._size, **more)
        for name in filter(None, (use.weight, use.bias)):
            self.used[name] = self.used.get(name, 0) + 1

        def hook(g: Tensor) -> None:
            if self._measure is not None:
                self._measure(use, g * factor)

        out.register_hook(hook)
