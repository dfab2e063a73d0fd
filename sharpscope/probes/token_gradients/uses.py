"""Uses of trainable parameters in a forward pass, and squared gradient norms from their inputs and cotangents.

Gradients of weights are not formed. That of a linear map is Σ_s b_s ⊗ a_s (inputs a, cotangents b of the outputs, positions s),
that of a gain Σ_s b_s ∘ x̂_s, that of an embedding the sum of b_s for each word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

Layout = Literal["rows", "flat", "heads", "gathered"]
Named = list[tuple[str, Tensor]]

GRAM_BLOCK = 32  # rows of a symmetric product made at once: fewer skip more of its mirror image, more run faster

_PRODUCTS = {torch.mul, torch.multiply, Tensor.mul, Tensor.__mul__, Tensor.__rmul__}
_SUMS = {torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__}
_CASTS = {Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16, Tensor.to, Tensor.type, Tensor.type_as}
_MATMULS = {torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__}
# What returns every entry of its input once: the squared norm of a gradient does not depend on their order.
_REARRANGEMENTS: set[Any] = {
    Tensor.T.__get__,  # type: ignore[attr-defined]
    Tensor.mT.__get__,  # type: ignore[attr-defined]
    Tensor.t,
    torch.t,
    Tensor.transpose,
    torch.transpose,
    Tensor.permute,
    torch.permute,
    Tensor.view,
    Tensor.reshape,
    torch.reshape,
    Tensor.contiguous,
    Tensor.clone,
    torch.clone,
    Tensor.flatten,
    torch.flatten,
    Tensor.squeeze,
    torch.squeeze,
    Tensor.unsqueeze,
    torch.unsqueeze,
}
DETACHMENTS: set[Any] = {Tensor.detach, torch.detach, Tensor.data.__get__}  # type: ignore[attr-defined]
_HALVES = (torch.float16, torch.bfloat16)


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in nested tuples, lists and dictionaries."""
    found, todo = [], [value]
    while todo:
        item = todo.pop()
        if isinstance(item, Tensor):
            found.append(item)
        elif isinstance(item, (tuple, list)):
            todo += reversed(item)
        elif isinstance(item, dict):
            todo += reversed(item.values())
    return found


@dataclass
class Use:
    """One use of a weight and/or bias in a forward pass over B rows of L positions.

    Attributes:
        kind: what the operation is.
        weight, bias: names of the trainable parameters it uses, None where absent or frozen.
        x: linear: its inputs (B, L, d_in), gathered (m, d_in); gain: x̂, canonical as `canonical` makes it;
            embedding: the ids (B, L).
        out: its output, in the model's own shape.
        layout: how `out` holds positions: (B, L, …), (B·L, d), (B, H, L, d), or gathered (m, d).
        index: gathered only: flat position b·L + l of each of the m rows.
        ignored: embedding only: the word whose gradient is defined as 0.
    """

    kind: Literal["linear", "gain", "embedding"]
    weight: str | None
    bias: str | None
    x: Tensor | None
    out: Tensor
    layout: Layout
    size: tuple[int, int]
    index: Tensor | None = None
    ignored: int | None = None
    # What stood in for the parameters in this pass: duals in forward mode, slices, casts.
    weight_value: Tensor | None = None
    bias_value: Tensor | None = None
    transposed: bool = False  # linear: the weight is used as (d_in, d_out)
    parts: tuple[tuple[int, ...], ...] = ()  # of each parameter in `names`: the indices of the slice used, () = all
    # Exact tier. x xᵀ (B, L, L) in blocks: of an embedding, of a linear use where products with it cost less than the
    # weight's gradient. Tied embedding: h (n, B, d) and ∂ log π/∂a at the ids (n, B, L) of the tokens that come next.
    gram: list[Tensor] | None = None
    tied: tuple[Tensor, Tensor] | None = None

    @property
    def names(self) -> list[str]:
        """The parameters of this use, weight first."""
        return [name for name in (self.weight, self.bias) if name is not None]

    def canonical(self, g: Tensor) -> Tensor:
        """(…, *out.shape) -> (…, B, L, heads, d); gathered stays (…, m, d)."""
        if self.layout == "gathered":
            return g
        return _canonical(g, self.out.shape, self.layout, self.size)


def _canonical(g: Tensor, shape: torch.Size, layout: Layout, size: tuple[int, int]) -> Tensor:
    batch = g.shape[: g.ndim - len(shape)]
    if layout == "heads":
        g = g.movedim(-2, -3)
    return g.reshape(*batch, *size, -1, shape[-1])


def _wide(x: Tensor) -> Tensor:
    """`x` in at least float32, since squares above 256² overflow float16."""
    return x.float() if x.dtype in _HALVES else x


def squares_of(x: Tensor) -> Tensor:
    """Σ x² over the last dimension."""
    return _wide(x).square().sum(-1)


def _bmm(a: Tensor, b: Tensor) -> Tensor:
    """Batched matrix product with a result of at least float32."""
    if a.dtype == b.dtype and a.dtype in _HALVES and a.is_cuda and _widens():
        return torch.bmm(a, b, out_dtype=torch.float32)
    wide = torch.promote_types(a.dtype, b.dtype)
    wide = torch.float32 if wide in _HALVES else wide
    return torch.bmm(a.to(wide), b.to(wide))


@cache
def _widens() -> bool:
    """Whether half-precision products with float32 results are available (PyTorch 2.8 and later)."""
    a = torch.ones(1, 2, 2, dtype=torch.bfloat16, device="cuda")
    try:
        return torch.bmm(a, a, out_dtype=torch.float32).dtype == torch.float32
    except (TypeError, RuntimeError):
        return False


def _without_ignored(use: Use, g: Tensor) -> Tensor:
    if use.ignored is None or use.x is None:
        return g
    return g.masked_fill((use.x == use.ignored)[..., None], 0.0)


def local_squares(use: Use, g: Tensor) -> Named:
    """Squared norms (B, L) per parameter when position t's cotangent belongs to the token that t predicts alone.

    Args:
        use: the use.
        g: cotangent of `use.out`.
    """
    g = _wide(use.canonical(g))
    if use.kind == "embedding":
        assert use.weight is not None and use.x is not None
        return [(use.weight, squares_of(_without_ignored(use, g[..., 0, :])))]
    if use.layout == "gathered":
        assert use.index is not None and use.x is not None
        b2 = squares_of(g)  # (m,)
        each = {use.weight: b2 * squares_of(use.x), use.bias: b2}
        blank = g.new_zeros(use.size[0] * use.size[1])
        return [(name, blank.index_add(0, use.index, each[name]).view(use.size)) for name in use.names]
    if use.kind == "gain":
        parts: dict[str | None, Tensor] = {use.bias: squares_of(g.sum(-2))}
        if use.weight is not None and use.x is not None:
            parts[use.weight] = squares_of((g * use.x).sum(-2))
        return [(name, parts[name]) for name in use.names]
    assert use.x is not None
    b2 = squares_of(g)[..., 0]
    return [(name, b2 * squares_of(use.x) if name == use.weight else b2) for name in use.names]


def exact_squares(use: Use, g: Tensor) -> Tensor:
    """Squared norms (n, B, parameters of the use) of n·B tokens, given their cotangents g (n, *out.shape)."""
    g = use.canonical(g)
    if use.kind == "embedding":
        return _embedding_squares(use, g[..., 0, :])[..., None]
    if use.layout == "gathered":
        return _gathered_squares(use, _wide(g))
    if use.kind == "gain":
        g = _wide(g)
        parts = [] if use.weight is None or use.x is None else [(g * use.x).sum((-2, -3))]
        if use.bias is not None:
            parts.append(g.sum((-2, -3)))
        return torch.stack([squares_of(part) for part in parts], -1)
    g = g[..., 0, :]  # (n, B, L, d_out)
    squares = []
    if use.weight is not None:
        assert use.x is not None
        if use.gram is None and (use.x.shape[1] + GRAM_BLOCK) / 2 < use.x.shape[2]:
            use.gram = _lower_blocks(_bmm(use.x, use.x.mT))  # the same for every batch of cotangents
        squares.append(_gram_squares(use.gram, g) if use.gram is not None else _product_squares(use.x, g))
    if use.bias is not None:
        squares.append(squares_of(_wide(g).sum(-2)))
    return torch.stack(squares, -1)


def _lower_blocks(gram: Tensor) -> list[Tensor]:
    """A symmetric matrix (B, L, L) as rows up to the diagonal, `GRAM_BLOCK` at a time, (B, 1, b·stop) each.

    What stands left of a diagonal block counts twice, for its mirror image too.
    """
    B, L, _ = gram.shape
    blocks = []
    for start in range(0, L, GRAM_BLOCK):
        stop = min(start + GRAM_BLOCK, L)
        block = gram[:, start:stop, :stop].clone()
        block[..., :start] *= 2
        blocks.append(block.view(B, 1, -1))
    return blocks


def _gram_squares(gram: list[Tensor], b: Tensor) -> Tensor:
    """‖aᵀb‖²_F (n, B) as ⟨aaᵀ, bbᵀ⟩: aaᵀ = `gram` by `_lower_blocks`, b (n, B, L, d_out)."""
    n, B, L, _ = b.shape
    rows = b.reshape(n * B, L, -1)
    total = gram[0].new_zeros(B, 1, n)
    for block, start in zip(gram, range(0, L, GRAM_BLOCK), strict=True):
        stop = min(start + GRAM_BLOCK, L)
        outer = _bmm(rows[:, start:stop], rows[:, :stop].mT).view(n, B, -1)
        total.baddbmm_(block, outer.permute(1, 2, 0))
    return total[:, 0].T


def _product_squares(a: Tensor, b: Tensor) -> Tensor:
    """‖aᵀb‖²_F (n, B), from the products themselves: a (B, L, d_in), b (n, B, L, d_out)."""
    squares = []
    for row in range(len(a)):  # a row's inputs are shared by its n tokens without a copy
        whole = _bmm(a[row].mT.expand(len(b), -1, -1), b[:, row])  # (n, d_in, d_out)
        squares.append(torch.linalg.vector_norm(whole.flatten(1), dim=-1).square())
    return torch.stack(squares, 1)


def _embedding_squares(use: Use, g: Tensor) -> Tensor:
    """(n, B): Σ over words of ‖Σ_{s: x_s = word} g_s‖², plus the coupling with the output layer where they are tied."""
    assert use.x is not None
    if use.gram is None:  # the Gram matrix of one-hot inputs says which positions hold the same word
        same = use.x[:, :, None] == use.x[:, None, :]
        if use.ignored is not None:
            same &= (use.x != use.ignored)[:, None, :]
        use.gram = _lower_blocks(same.to(torch.promote_types(g.dtype, torch.float32)))
    squares = _gram_squares(use.gram, g)
    if use.tied is not None:
        hidden, pull = use.tied  # (n, B, d), (n, B, L)
        if use.ignored is not None:
            pull = pull.masked_fill(use.x == use.ignored, 0.0)
        along = torch.matmul(_wide(g), _wide(hidden)[..., None])[..., 0]
        squares = squares + 2 * torch.linalg.vecdot(pull.to(along), along)
    return squares


def _gathered_squares(use: Use, g: Tensor) -> Tensor:
    """(n, B, parameters): rows of a use on gathered positions pair only with those of the same row of the batch."""
    assert use.index is not None
    n, B = len(g), use.size[0]
    row = torch.div(use.index, use.size[1], rounding_mode="floor")
    same = (row[:, None] == row[None, :]).to(g.dtype)  # (m, m)
    squares = []
    for name in use.names:
        gram = same if name == use.bias or use.x is None else same * (_wide(use.x) @ _wide(use.x).mT)
        each = torch.linalg.vecdot(torch.matmul(gram, g), g)  # (n, m)
        squares.append(g.new_zeros(n, B).index_add_(1, row, each))
    return torch.stack(squares, -1)


# The operation of a use, as the recorder runs it: what it was called with and what came out.
Wrap = Callable[[Use], Tensor]


@dataclass(frozen=True)
class _Source:
    """The trainable parameter that a tensor is made of: whole or a slice, cast, rearranged or plus a constant."""

    name: str
    part: tuple[int, ...] = ()
    rearranged: bool = False


class Recorder(TorchFunctionMode):
    """Records each use of a trainable parameter in a forward pass over B rows of L positions.

    A parameter, or a tensor that consists of its entries (`_Source`), is followed through every PyTorch function that
    takes it, also inside tuples, lists, dictionaries and keywords. Each such function either makes another tensor of
    this kind, or is a use whose formula is known, or makes the parameter `unhandled`. Only functions that autograd
    does not show to `TorchFunctionMode` (`torch.autograd.Function.apply`, compiled code) escape; `structure` looks for
    them.

    Attributes:
        uses: in the order of the pass.
        unhandled: parameter name -> the operation that is not known here.
    """

    def __init__(
        self,
        named: Mapping[str, Tensor],
        size: tuple[int, int],
        *,
        native: frozenset[str] = frozenset(),
        wrap: Wrap | None = None,
        copy: bool = False,
    ) -> None:
        """Record uses of `named` over (B, L) = `size`, except of the names in `native`.

        Args:
            wrap: replaces a use's output.
            copy: keep copies of inputs and hand out copies of outputs, for models that write to activations in place.
        """
        super().__init__()
        self.uses: list[Use] = []
        self.unhandled: dict[str, str] = {}
        self._size, self._wrap, self._copy = size, wrap, copy
        self._sources = {id(parameter): _Source(name) for name, parameter in named.items() if name not in native}
        self._derived: list[Tensor] = []  # keeps derived tensors alive, so that their ids stay theirs
        self._index: Tensor | None = None

    @contextmanager
    def gathered(self, index: Tensor) -> Iterator[None]:
        """Context in which two-dimensional inputs are at these flat positions (m,)."""
        before, self._index = self._index, index
        try:
            yield
        finally:
            self._index = before

    def follow(self, named: Mapping[str, Tensor]) -> None:
        """Record uses of `named` from here on; sharded weights become whole tensors layer by layer."""
        self._sources.update((id(parameter), _Source(name)) for name, parameter in named.items())
        self._derived += named.values()

    def stop(self) -> None:
        """Record no more uses."""
        self._sources.clear()

    def _source(self, value: Any) -> _Source | None:
        return self._sources.get(id(value)) if isinstance(value, Tensor) else None

    def _name(self, value: Any) -> str | None:
        source = self._source(value)
        return None if source is None else source.name

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        touched = [source for value in tensors_in((args, kwargs)) if (source := self._source(value)) is not None]
        out = func(*args, **kwargs)
        if not touched or func in DETACHMENTS or not any(_moves(value) for value in tensors_in(out)):
            return out
        if func in _CASTS and self._source(args[0]) is None:
            return out  # the parameter gives its dtype only
        derived = self._derive(func, args, kwargs, out) if len(touched) == 1 else None
        if derived is not None:
            self._sources[id(out)] = derived
            self._derived.append(out)
            return out
        use = self._read(func, args, kwargs, out)
        if use is None or len(use.names) != len(touched):
            for source in touched:
                self.unhandled.setdefault(source.name, getattr(func, "__name__", str(func)))
            return out
        self.uses.append(use)
        returned = out if self._wrap is None else self._wrap(use)
        return returned.clone() if self._copy else returned

    def _derive(self, func: Any, args: tuple, kwargs: dict, out: Any) -> _Source | None:
        """The source of `out` if it consists of the entries of the parameter `args[0]` (cast, plus a constant, and so on)."""
        source = self._source(args[0]) if args else None
        if source is None or not isinstance(out, Tensor):
            return None
        if func in _CASTS:
            return source
        number = len(args) == 2 and not kwargs and isinstance(args[1], int | float)
        if number and (func in _SUMS or (func in _PRODUCTS and args[1] == 1)):
            return source
        if func in _REARRANGEMENTS and out.numel() == args[0].numel():
            return _Source(source.name, source.part, rearranged=True)
        if func is Tensor.__getitem__ and not source.rearranged:
            index = args[1]
            if isinstance(index, Tensor) and index.ndim == 0 and not index.is_floating_point():
                index = int(index)
            if isinstance(index, int) and not isinstance(index, bool):
                return _Source(source.name, (*source.part, index % len(args[0])))
        return None

    def _read(self, func: Any, args: tuple, kwargs: dict, out: Any) -> Use | None:
        use = None
        if func is F.linear:
            given = _bound(("input", "weight", "bias"), args, kwargs)
            use = self._linear(given.get("input"), given.get("weight"), given.get("bias"), out)
        elif func is torch.addmm and len(args) == 3 and not kwargs:  # transformers' Conv1D
            bias, x, weight = args
            use = self._linear(x, weight, bias, out, transposed=True)
        elif func in _MATMULS and len(args) == 2 and not kwargs:
            use = self._linear(*args, None, out, transposed=True)
        elif func is F.embedding:
            names = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
            use = self._embedding(_bound(names, args, kwargs), out)
        elif func is F.layer_norm:
            use = self._layer_norm(_bound(("input", "normalized_shape", "weight", "bias", "eps"), args, kwargs), out)
        elif func in _PRODUCTS | _SUMS and len(args) == 2 and not kwargs and isinstance(out, Tensor):
            parameter, x = args if self._source(args[0]) is not None else args[::-1]
            if isinstance(x, Tensor):
                use = self._elementwise(parameter, x if func in _PRODUCTS else None, out)
        if use is not None:
            used = [self._source(value) for value in (use.weight_value, use.bias_value)]
            use.parts = tuple(source.part for source in used if source is not None)
            if self._copy and use.x is not None:
                use.x = use.x.clone()
        return use

    def _layout(self, shape: torch.Size) -> Layout | None:
        B, L = self._size
        if self._index is not None:
            return "gathered" if len(shape) == 2 and shape[0] == len(self._index) else None
        if len(shape) >= 3 and tuple(shape[:2]) == (B, L):
            return "rows"
        if len(shape) == 2 and shape[0] == B * L:
            return "flat"
        if len(shape) == 4 and shape[0] == B and shape[2] == L:
            return "heads"
        return None

    def _linear(self, x: Any, weight: Any, bias: Any, out: Tensor, *, transposed: bool = False) -> Use | None:
        """Out = x·weightᵀ + bias, or x·weight + bias where `transposed`."""
        if not isinstance(x, Tensor) or not isinstance(weight, Tensor) or weight.ndim != 2:
            return None
        if isinstance(bias, Tensor) and (bias.ndim != 1 or bias.shape[0] != out.shape[-1]):
            return None
        layout = self._layout(x.shape)
        if layout is None or (layout in ("rows", "heads") and x.ndim != 3):
            return None
        inputs = x.detach() if layout == "gathered" else x.detach().reshape(*self._size, x.shape[-1])
        return Use(
            "linear",
            self._name(weight),
            self._name(bias),
            inputs,
            out,
            layout,
            self._size,
            self._index,
            weight_value=weight,
            bias_value=bias,
            transposed=transposed,
        )

    def _embedding(self, given: dict[str, Any], out: Tensor) -> Use | None:
        ids, weight, ignored = given["input"], given["weight"], given.get("padding_idx")
        if given.get("max_norm") is not None or given.get("scale_grad_by_freq") or given.get("sparse"):
            return None
        if tuple(ids.shape) != self._size:
            return None
        if ignored is not None and ignored < 0:
            ignored += len(weight)
        return Use(
            "embedding", self._name(weight), None, ids, out, "rows", self._size, ignored=ignored, weight_value=weight
        )

    def _layer_norm(self, given: dict[str, Any], out: Tensor) -> Use | None:
        x, shape, weight, bias = given["input"], given["normalized_shape"], given.get("weight"), given.get("bias")
        layout = self._layout(x.shape)
        if layout in (None, "gathered") or len(shape) != 1:
            return None
        plain = F.layer_norm(x.detach(), shape, eps=given.get("eps", 1e-5))
        normed = _canonical(plain, x.shape, layout, self._size)
        return Use(
            "gain",
            self._name(weight),
            self._name(bias),
            normed,
            out,
            layout,
            self._size,
            weight_value=weight,
            bias_value=bias,
        )

    def _elementwise(self, parameter: Tensor, x: Tensor | None, out: Tensor) -> Use | None:
        """parameter∘x (a gain) or parameter + … (a bias, x None), the parameter along the last dimension."""
        layout = self._layout(out.shape)
        if layout in (None, "gathered") or parameter.ndim != 1 or parameter.shape[0] != out.shape[-1]:
            return None
        if x is None:
            return Use("gain", None, self._name(parameter), None, out, layout, self._size, bias_value=parameter)
        if x.shape != out.shape:
            return None
        factor = _canonical(x.detach(), x.shape, layout, self._size)
        return Use("gain", self._name(parameter), None, factor, out, layout, self._size, weight_value=parameter)


def _bound(names: tuple[str, ...], args: tuple, kwargs: dict) -> dict[str, Any]:
    """Positional and keyword arguments by name."""
    return dict(zip(names, args, strict=False)) | kwargs


def _moves(value: Tensor) -> bool:
    """Whether `value` depends on a parameter, in reverse or forward mode."""
    return value.requires_grad or (value.is_floating_point() and forward_ad.unpack_dual(value).tangent is not None)
