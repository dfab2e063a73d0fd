"""Uses of trainable parameters in a forward pass, and squared gradient norms from their inputs and cotangents.

Gradients of weights are not formed. That of a linear map is Σ_s b_s ⊗ a_s (inputs a, cotangents b of the outputs, positions s),
that of a gain Σ_s b_s ∘ x̂_s, that of an embedding the sum of b_s for each word. Linear maps and embeddings are met where the
model calls them, norms by hooks on their modules; a parameter used in any other way has no use here, which `structure` finds
by comparing with autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from sharpscope.errors import UserError
from sharpscope.policy import bare

EXPERTS = "sharpscope"
_CASTS = {Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16, Tensor.to, Tensor.type, Tensor.type_as}


@dataclass
class Use:
    """One use of a weight and/or bias in a forward pass over B rows of L positions.

    Attributes:
        kind: what the operation is.
        weight, bias: names of the trainable parameters it uses, None where absent or frozen.
        x: linear: its inputs (B, L, d_in), with `index` (m, d_in); gain: x̂ (B, L, heads, d); embedding: the ids (B, L).
        size: (B, L).
        index: flat position b·L + l of each of the m rows of an expert's input, or None.
        expert: index of the expert in its parameters, or None.
        ignored: embedding: the word whose gradient is defined as 0, or None.
        transposed: linear: the weight is (d_in, d_out).
    """

    kind: Literal["linear", "gain", "embedding"]
    weight: str | None
    bias: str | None
    x: Tensor
    size: tuple[int, int]
    index: Tensor | None = None
    expert: int | None = None
    ignored: int | None = None
    transposed: bool = False

    def by_position(self, g: Tensor) -> Tensor:
        """(*shape) -> (B, L, heads, d), in at least float32; with `index` (m, d)."""
        return wide(g) if self.index is not None else wide(_by_position(g, self.size))

    @property
    def gram(self) -> Tensor:
        """Inner products of the inputs of positions of a row, (B, L, L) or with `index` (m, m)."""
        if self.kind == "embedding":  # one-hot inputs
            same = self.x[:, :, None] == self.x[:, None, :]
            return (same if self.ignored is None else same & (self.x != self.ignored)[:, None]).float()
        x = wide(self.x)
        return x @ x.mT if self.index is None else self.together * (x @ x.mT)

    @property
    def together(self) -> Tensor:
        """(m, m), 1 where two rows of an expert's input are of the same row of the batch."""
        assert self.index is not None
        row = self.index // self.size[1]
        return (row[:, None] == row).float()

    @property
    def row_of(self) -> Tensor:
        """(m, B), 1 at the row of the batch that each row of an expert's input belongs to."""
        assert self.index is not None
        return F.one_hot(self.index // self.size[1], self.size[0]).float()


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
    """(name, squared norms (B, L)) where position t's cotangent is that of the token that t predicts alone.

    Args:
        use: the use.
        g: cotangent of its output.
    """
    g = use.by_position(g)
    if use.kind == "gain":
        weight, bias = _squares((g * use.x).sum(-2)), _squares(g.sum(-2))
    else:
        bias = _squares(g) if use.index is not None else _squares(g[..., 0, :])
        weight = bias * _squares(wide(use.x)) if use.kind == "linear" else bias
        if use.ignored is not None:
            weight = weight.masked_fill(use.x == use.ignored, 0.0)
    for name, squares in ((use.weight, weight), (use.bias, bias)):
        if name is not None and use.index is not None:
            blank = squares.new_zeros(use.size[0] * use.size[1])
            yield name, blank.index_add(0, use.index, squares).view(use.size)
        elif name is not None:
            yield name, squares


def exact_squares(use: Use, g: Tensor) -> Iterator[tuple[str, Tensor]]:
    """(name, squared norms (B,)) of the sum over the positions of each row, for a cotangent of the use's output."""
    g = use.by_position(g)
    if use.kind == "gain":
        if use.weight is not None:
            yield use.weight, _squares((g * use.x).sum((1, 2)))
        if use.bias is not None:
            yield use.bias, _squares(g.sum((1, 2)))
    elif use.index is not None:
        outer = g @ g.mT  # (m, m)
        for name, gram in ((use.weight, use.gram), (use.bias, use.together)):
            if name is not None:
                yield name, (gram.to(outer) * outer).sum(-1) @ use.row_of.to(outer)
    else:
        g = g[:, :, 0]  # (B, L, d)
        if use.weight is not None and (use.kind == "embedding" or g.shape[1] < 1.4 * use.x.shape[-1]):
            outer = g @ g.mT  # (B, L, L)
            yield use.weight, (use.gram.to(outer) * outer).sum((1, 2))
        elif use.weight is not None:
            yield use.weight, (wide(use.x).mT.to(g) @ g).square().sum((1, 2))
        if use.bias is not None:
            yield use.bias, _squares(g.sum(1))


def rate(use: Use, direction: Mapping[str, Tensor]) -> Tensor | None:
    """What a direction moves the use's output by through its own parameters, as `Use.by_position` has it; or None."""
    weight, bias = (direction.get(name or "") for name in (use.weight, use.bias))
    if use.expert is not None:
        weight, bias = (None if part is None else part[use.expert] for part in (weight, bias))
    if weight is None:
        return bias
    if use.kind == "gain":
        moved = use.x * weight
    elif use.kind == "linear":
        weight = weight.to(use.x)  # a router may compute in another type
        moved = use.x @ (weight if use.transposed else weight.mT)
    else:
        moved = F.embedding(use.x, weight)
        moved = moved if use.ignored is None else moved.masked_fill((use.x == use.ignored)[..., None], 0.0)
    if use.kind != "gain" and use.index is None:
        moved = moved[..., None, :]  # (B, L, 1, d)
    return moved if bias is None else moved + bias


Measure = Callable[[Use, Tensor], None]


class UseRecorder(TorchFunctionMode):
    """Records uses of trainable parameters in a forward pass, whose cotangents `pull` hands to a function.

    A parameter is known by the module that holds it while that module runs, so that weights which exist only then (FSDP2) are
    known too.

    Attributes:
        repeated: parameters whose gradient has parts from several uses (of the same expert), which their norms do not give.
    """

    def __init__(
        self, modules: Mapping[nn.Module, Mapping[str, str]], size: tuple[int, int], *, strict: bool = True
    ) -> None:
        """Record uses in rows (B, L) = `size`.

        Args:
            modules: module -> attribute -> name of its trainable parameters.
            size: (B, L).
            strict: whether a parameter in `repeated` is an error.
        """
        super().__init__()
        self.strict = strict
        self.repeated: set[str] = set()
        self._modules, self._size = modules, size
        self._sources: dict[int, tuple[str, int | None]] = {}  # id -> name of the parameter, expert
        self._alive: list[Tensor] = []  # keeps what `_sources` knows alive, so that ids stay theirs
        self._met: set[tuple[str, int | None]] = set()  # in the backward pass
        self._index: Tensor | None = None
        self._anchor: Tensor | None = None
        self._measure: Measure | None = None

    @contextmanager
    def attached(self, model: nn.Module) -> Iterator[None]:
        """Record the forward passes within the block."""
        with ExitStack() as stack:
            for module, names in self._modules.items():
                follow = lambda module, _, names=names: self._follow(module, names)  # noqa: E731
                stack.callback(module.register_forward_pre_hook(follow).remove)
                if not any(module.children()) and all(p.ndim == 1 for p in module.parameters()):
                    handle = module.register_forward_hook(self._norm, with_kwargs=True)
                    stack.callback(handle.remove)
            stack.enter_context(_recorded_experts(model, self))
            stack.enter_context(self)
            yield

    def stop(self) -> None:
        """Record no more uses."""
        self._sources.clear()

    def pull(self, outputs: Any, cotangents: Any, measure: Measure, wanted: list[Any] | None = None) -> list[Any]:
        """Backward pass that calls `measure` with each use and its cotangent; returns gradients of `wanted` (None: zero)."""
        inputs = [*(wanted or []), *([] if self._anchor is None else [self._anchor])]
        if not inputs:
            return []
        self._measure = measure
        self._met.clear()
        try:
            found = torch.autograd.grad(outputs, inputs, cotangents, retain_graph=True, allow_unused=True)
        finally:
            self._measure = None
        if self.strict and self.repeated:
            raise UserError(f"model: '{min(self.repeated)}' is used in several places for some rows; freeze it")
        return list(found[: len(wanted or [])])

    @contextmanager
    def at(self, index: Tensor) -> Iterator[None]:
        """Context in which inputs (m, d) of linear maps are at the flat positions `index` (m,)."""
        self._index = index
        try:
            yield
        finally:
            self._index = None

    def _follow(self, module: nn.Module, names: Mapping[str, str]) -> None:
        for key, name in names.items():
            self._know(module.get_parameter(key), name, None)

    def _know(self, tensor: Tensor, name: str, expert: int | None) -> None:
        self._sources[id(tensor)] = name, expert
        self._alive.append(tensor)

    def _name(self, tensor: Any) -> str | None:
        return self._sources[id(tensor)][0] if id(tensor) in self._sources else None

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func is F.linear:
            given = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
            self._linear(given["input"], given["weight"], given.get("bias"), out)
        elif func is torch.addmm and len(args) == 3:  # transformers' Conv1D
            self._linear(args[1], args[2], args[0], out, transposed=True)
        elif func is F.embedding:
            out = self._embedding(*args, **kwargs, out=out)
        elif args and id(args[0]) in self._sources and isinstance(out, Tensor):
            name, expert = self._sources[id(args[0])]
            if func in _CASTS:
                self._know(out, name, expert)
            elif func is Tensor.__getitem__ and isinstance(args[1], int) and args[0].ndim > 1:
                self._know(out, name, args[1])
        return out

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, *, transposed: bool = False) -> None:
        rows = self._size[0] * self._size[1]
        if self._index is None and x.numel() == rows * x.shape[-1]:
            self._add("linear", weight, bias, x.detach().reshape(*self._size, -1), out, transposed=transposed)
        elif self._index is not None and x.ndim == 2:
            self._add("linear", weight, bias, x.detach(), out, index=self._index, transposed=transposed)

    def _embedding(
        self, ids: Tensor, weight: Tensor, padding_idx: int | None = None, *rest: Any, out: Tensor, **options: Any
    ) -> Tensor:
        if not torch.is_grad_enabled():
            return out
        if self._anchor is None:  # a backward pass to this zero reaches what depends on an embedding
            self._anchor = torch.zeros((), dtype=out.dtype, device=out.device, requires_grad=True)
        out = out + self._anchor
        if ids.shape == self._size:
            ignored = None if padding_idx is None else padding_idx % len(weight)
            self._add("embedding", weight, None, ids, out, ignored=ignored)
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
            self._add("gain", weight, bias, _by_position(wide(values[0]) - wide(values[1]), self._size), out)

    def _add(self, kind: Any, weight: Tensor, bias: Tensor | None, x: Tensor, out: Tensor, **more: Any) -> None:
        names = self._name(weight), self._name(bias)
        if not out.requires_grad or names == (None, None):
            return
        keys = [self._sources[id(p)] for p in (weight, bias) if id(p) in self._sources]
        use = Use(kind, *names, x, self._size, expert=keys[0][1], **more)

        def hook(g: Tensor) -> None:
            if self._measure is not None:
                self.repeated |= {key[0] for key in keys if key in self._met}
                self._met.update(keys)
                self._measure(use, g)

        # A model may write to a view, which has another graph then.
        inner = out._base if kind == "linear" and out._base is not None and out._base.numel() == out.numel() else out
        inner.register_hook(hook)


_recorders: list[UseRecorder] = []


def _experts(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Each expert on the positions routed to it: hidden_states (B·L, d), top_k_index and top_k_weights (B·L, K)."""

    def mapped(name: str, expert: int, x: Tensor) -> Tensor:
        """The linear map `name` of one expert on its rows x (m, d_in)."""
        weight = getattr(self, name)[expert]
        bias = getattr(self, f"{name}_bias")[expert] if self.has_bias else None
        if not self.is_transposed:
            return F.linear(x, weight, bias)
        return torch.addmm(x.new_zeros(()) if bias is None else bias, x, weight)

    out = torch.zeros_like(hidden_states)
    for expert in range(self.num_experts):
        position, slot = torch.where(top_k_index == expert)
        if not len(position):
            continue
        with _recorders[-1].at(position):
            x = hidden_states[position]
            if self.has_gate:
                x = self._apply_gate(mapped("gate_up_proj", expert, x))
            else:
                x = self.act_fn(mapped("up_proj", expert, x))
            part = mapped("down_proj", expert, x) * top_k_weights[position, slot, None]
        out = out.index_add(0, position, part.to(out.dtype))
    return out


@contextmanager
def _recorded_experts(model: nn.Module, recorder: UseRecorder) -> Iterator[None]:
    """Run transformers' experts so that the recorder knows which position each row of their inputs is."""
    experts: list[Any] = [
        module
        for module in bare(model).modules()
        if hasattr(module, "is_transposed")
        and hasattr(module, "down_proj")
        and not getattr(module, "has_post_expert_norm", False)
    ]
    if not experts:
        yield
        return
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(EXPERTS, _experts)
    before = [(module.config, module.config._experts_implementation) for module in experts]
    _recorders.append(recorder)
    try:
        for config, _ in before:
            config._experts_implementation_internal = EXPERTS
        yield
    finally:
        _recorders.pop()
        for config, implementation in reversed(before):
            config._experts_implementation_internal = implementation
