"""Where a forward pass uses each trainable parameter, and the squared gradient norm that one use makes of a token.

A gradient with respect to a weight is never formed: of a linear map's weight it is Σ_s b_s ⊗ a_s (inputs a,
cotangents b of the outputs, s over positions), of a norm's gain Σ_s b_s ∘ x̂_s, of an embedding the b_s gathered by
word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

Layout = Literal["rows", "flat", "heads", "gathered"]
Named = list[tuple[str, Tensor]]

GRAM_BLOCK = 48  # rows of a symmetric product made at once: fewer skip more of its mirror image, more run faster

_PRODUCTS = {torch.mul, torch.multiply, Tensor.mul, Tensor.__mul__, Tensor.__rmul__}
_SUMS = {torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__}
_CASTS = {Tensor.float, Tensor.double, Tensor.to, Tensor.type_as}
_ITEMS = {Tensor.__getitem__}
_LINEARS = {F.linear, torch.addmm}


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
    transposed: bool = False  # linear: the weight is (d_in, d_out)
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


def _without_ignored(use: Use, g: Tensor) -> Tensor:
    if use.ignored is None or use.x is None:
        return g
    return g.masked_fill((use.x == use.ignored)[..., None], 0.0)


def local_squares(use: Use, g: Tensor) -> Named:
    """Squared norms (B, L) per parameter when position t's cotangent belongs to the token that t predicts alone.

    Args:
        use: the use; `g`: cotangent of `use.out`.
    """
    g = use.canonical(g)
    if use.kind == "embedding":
        assert use.weight is not None and use.x is not None
        return [(use.weight, _without_ignored(use, g[..., 0, :]).square().sum(-1))]
    if use.layout == "gathered":
        assert use.index is not None and use.x is not None
        b2 = g.square().sum(-1)  # (m,)
        each = {use.weight: b2 * use.x.square().sum(-1), use.bias: b2}
        blank = g.new_zeros(use.size[0] * use.size[1])
        return [(name, blank.index_add(0, use.index, each[name]).view(use.size)) for name in use.names]
    if use.kind == "gain":
        parts: dict[str | None, Tensor] = {use.bias: g.sum(-2).square().sum(-1)}
        if use.weight is not None and use.x is not None:
            parts[use.weight] = (g * use.x).sum(-2).square().sum(-1)
        return [(name, parts[name]) for name in use.names]
    assert use.x is not None
    b2 = g.square().sum(-1)[..., 0]
    return [(name, b2 * use.x.square().sum(-1) if name == use.weight else b2) for name in use.names]


def exact_squares(use: Use, g: Tensor) -> Tensor:
    """Squared norms (n, B, parameters of the use) of n·B tokens, given their cotangents g (n, *out.shape)."""
    g = use.canonical(g)
    if use.kind == "embedding":
        return _embedding_squares(use, g[..., 0, :])[..., None]
    if use.layout == "gathered":
        return _gathered_squares(use, g)
    if use.kind == "gain":
        parts = [] if use.weight is None or use.x is None else [(g * use.x).sum((-2, -3))]
        if use.bias is not None:
            parts.append(g.sum((-2, -3)))
        return torch.stack([part.square().sum(-1) for part in parts], -1)
    g = g[..., 0, :]  # (n, B, L, d_out)
    found = []
    if use.weight is not None:
        assert use.x is not None
        if use.gram is None and (use.x.shape[1] + GRAM_BLOCK) / 2 < use.x.shape[2]:
            use.gram = _lower_blocks(torch.bmm(use.x, use.x.mT))  # the same for every batch of cotangents
        found.append(_gram_squares(use.gram, g) if use.gram is not None else _product_squares(use.x, g))
    if use.bias is not None:
        found.append(g.sum(-2).square().sum(-1))
    return torch.stack(found, -1)


def _lower_blocks(gram: Tensor) -> list[Tensor]:
    """A symmetric matrix (B, L, L) as rows up to the diagonal, `GRAM_BLOCK` at a time, (B, b·stop, 1) each.

    What stands left of a diagonal block counts twice, for its mirror image too.
    """
    B, L, _ = gram.shape
    blocks = []
    for start in range(0, L, GRAM_BLOCK):
        stop = min(start + GRAM_BLOCK, L)
        block = gram[:, start:stop, :stop].clone()
        block[..., :start] *= 2
        blocks.append(block.view(B, -1, 1))
    return blocks


def _gram_squares(gram: list[Tensor], b: Tensor) -> Tensor:
    """‖aᵀb‖²_F (n, B) as ⟨aaᵀ, bbᵀ⟩: aaᵀ = `gram` by `_lower_blocks`, b (n, B, L, d_out)."""
    n, B, L, _ = b.shape
    rows = b.reshape(n * B, L, -1)
    total = b.new_zeros(B, n, 1)
    for block, start in zip(gram, range(0, L, GRAM_BLOCK), strict=True):
        stop = min(start + GRAM_BLOCK, L)
        outer = torch.bmm(rows[:, start:stop], rows[:, :stop].mT).view(n, B, -1)
        total.baddbmm_(outer.transpose(0, 1), block)
    return total[..., 0].T


def _product_squares(a: Tensor, b: Tensor) -> Tensor:
    """‖aᵀb‖²_F (n, B), from the products themselves: a (B, L, d_in), b (n, B, L, d_out)."""
    found = []
    for row in range(len(a)):  # a row's inputs are shared by its n tokens without a copy
        whole = torch.bmm(a[row].mT.expand(len(b), -1, -1), b[:, row])  # (n, d_in, d_out)
        found.append(torch.linalg.vector_norm(whole.flatten(1), dim=-1).square())
    return torch.stack(found, 1)


def _embedding_squares(use: Use, g: Tensor) -> Tensor:
    """(n, B): Σ over words of ‖Σ_{s: x_s = word} g_s‖², plus the coupling with the output layer where they are tied."""
    assert use.x is not None
    if use.gram is None:  # the Gram matrix of one-hot inputs says which positions hold the same word
        same = use.x[:, :, None] == use.x[:, None, :]
        if use.ignored is not None:
            same &= (use.x != use.ignored)[:, None, :]
        use.gram = _lower_blocks(same.to(g.dtype))
    squares = _gram_squares(use.gram, g)
    if use.tied is not None:
        hidden, pull = use.tied  # (n, B, d), (n, B, L)
        if use.ignored is not None:
            pull = pull.masked_fill(use.x == use.ignored, 0.0)
        squares = squares + 2 * torch.linalg.vecdot(pull.to(g), torch.matmul(g, hidden[..., None])[..., 0])
    return squares


def _gathered_squares(use: Use, g: Tensor) -> Tensor:
    """(n, B, parameters): rows of a use on gathered positions pair only with those of the same row of the batch."""
    assert use.index is not None
    n, B = len(g), use.size[0]
    row = torch.div(use.index, use.size[1], rounding_mode="floor")
    same = (row[:, None] == row[None, :]).to(g.dtype)  # (m, m)
    found = []
    for name in use.names:
        gram = same if name == use.bias or use.x is None else same * (use.x @ use.x.mT)
        each = torch.linalg.vecdot(torch.matmul(gram, g), g)  # (n, m)
        found.append(g.new_zeros(n, B).index_add_(1, row, each))
    return torch.stack(found, -1)


# The operation of a use, as the recorder runs it: what it was called with and what came out.
Wrap = Callable[[Use], Tensor]


class Recorder(TorchFunctionMode):
    """Watches a forward pass over B rows of L positions and notes every use of a trainable parameter.

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
    ) -> None:
        """Watch `named` over (B, L) = `size`, leaving `native` names alone; `wrap` replaces a use's output."""
        super().__init__()
        self.uses: list[Use] = []
        self.unhandled: dict[str, str] = {}
        self._size, self._wrap = size, wrap
        self._names = {id(parameter): name for name, parameter in named.items() if name not in native}
        self._aliases: dict[int, Tensor] = {}  # keeps derived tensors alive, so that their ids stay theirs
        self._index: Tensor | None = None

    @contextmanager
    def gathered(self, index: Tensor) -> Iterator[None]:
        """Within the block, two-dimensional inputs hold these flat positions (m,)."""
        before, self._index = self._index, index
        try:
            yield
        finally:
            self._index = before

    def _name(self, value: Any) -> str | None:
        return self._names.get(id(value)) if isinstance(value, Tensor) else None

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        touched = [name for value in (*args, *kwargs.values()) if (name := self._name(value)) is not None]
        if not touched or getattr(func, "__name__", "") == "__get__":
            return func(*args, **kwargs)
        out = func(*args, **kwargs)
        use = self._read(func, args, kwargs, out)
        if use is None:
            if not self._alias(func, args, out, touched):
                for name in touched:
                    self.unhandled.setdefault(name, getattr(func, "__name__", str(func)))
            return out
        self.uses.append(use)
        return out if self._wrap is None else self._wrap(use)

    def _alias(self, func: Any, args: tuple, out: Any, touched: list[str]) -> bool:
        """Whether `out` is the parameter again: cast, plus a constant, or one of its slices."""
        if not isinstance(out, Tensor) or len(touched) != 1:
            return False
        plus_constant = func in _SUMS and len(args) == 2 and not all(isinstance(value, Tensor) for value in args)
        sliced = func in _ITEMS and out.ndim == args[0].ndim - 1 and out.ndim == 2
        if not (func in _CASTS or plus_constant or sliced):
            return False
        if (func in _CASTS or plus_constant) and self._name(args[0]) is None:
            return False
        self._names[id(out)] = touched[0]
        self._aliases[id(out)] = out
        return True

    def _read(self, func: Any, args: tuple, kwargs: dict, out: Any) -> Use | None:
        if func in _LINEARS:
            return self._linear(func, args, kwargs, out)
        if func is F.embedding:
            return self._embedding(args, kwargs, out)
        if func is F.layer_norm:
            return self._layer_norm(args, kwargs, out)
        if func in _PRODUCTS and len(args) == 2:
            gain, x = args if self._name(args[0]) is not None else args[::-1]
            return self._elementwise(gain, x, out)
        if func in _SUMS and len(args) == 2 and all(isinstance(value, Tensor) for value in args):
            bias, _ = args if self._name(args[0]) is not None else args[::-1]
            return self._elementwise(bias, None, out)
        return None

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

    def _linear(self, func: Any, args: tuple, kwargs: dict, out: Tensor) -> Use | None:
        if func is torch.addmm:  # transformers' Conv1D: bias, inputs, weight
            if len(args) != 3 or kwargs:
                return None
            bias, x, weight = args
        else:
            x, weight = args[0], args[1]
            bias = args[2] if len(args) > 2 else kwargs.get("bias")
        layout = self._layout(x.shape)
        if layout is None or (layout in ("rows", "heads") and x.ndim != 3):
            return None
        inputs = x.detach() if layout == "gathered" else x.detach().reshape(*self._size, x.shape[-1])
        return Use(
            "linear", self._name(weight), self._name(bias), inputs, out, layout, self._size, self._index,
            weight_value=weight, bias_value=bias, transposed=func is torch.addmm,
        )  # fmt: skip

    def _embedding(self, args: tuple, kwargs: dict, out: Tensor) -> Use | None:
        ids, weight = args[0], args[1]
        if (
            any(args[3:])
            or kwargs.get("max_norm") is not None
            or kwargs.get("scale_grad_by_freq")
            or kwargs.get("sparse")
        ):
            return None
        if tuple(ids.shape) != self._size:
            return None
        ignored = args[2] if len(args) > 2 else kwargs.get("padding_idx")
        return Use(
            "embedding", self._name(weight), None, ids, out, "rows", self._size, ignored=ignored, weight_value=weight
        )

    def _layer_norm(self, args: tuple, kwargs: dict, out: Tensor) -> Use | None:
        values = dict(zip(("input", "normalized_shape", "weight", "bias", "eps"), args, strict=False)) | kwargs
        x, weight, bias = values["input"], values.get("weight"), values.get("bias")
        layout = self._layout(x.shape)
        if layout in (None, "gathered") or len(values["normalized_shape"]) != 1:
            return None
        plain = F.layer_norm(x.detach(), values["normalized_shape"], eps=values.get("eps", 1e-5))
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
        if not isinstance(x, Tensor) or x.shape != out.shape or self._name(x) is not None:
            return None
        factor = _canonical(x.detach(), x.shape, layout, self._size)
        return Use("gain", self._name(parameter), None, factor, out, layout, self._size, weight_value=parameter)
