"""Causal attention with the derivatives that the tiers need, for transformers' `AttentionInterface`.

Fused kernels have no forward-mode derivatives and no batched backward pass, and cannot treat other positions' keys and values
as constants. The probabilities P are stored in blocks of query rows, so that masked parts are not computed. Shapes:
q (B, H, L, d), k and v (B, Hkv, L, d), H = groups·Hkv. Attention sinks, one logit per head that enters the softmax without a
value, are given per query, (B, L, H).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sharpscope.errors import UserError
from sharpscope.probes.token_gradients.batched import each
from sharpscope.probes.token_gradients.tangents import Tangents, carried, carry

CUT, FULL, FORWARD = (f"sharpscope_{name}" for name in ("cut", "full", "forward"))
"""Attention whose gradient reaches a position only through itself; with a batched backward; with a forward mode."""

# Rows of P made at once: small enough for a cache, large enough for an efficient matrix product. Where many cotangents
# share P, smaller blocks skip more of what the causal mask hides.
QUERY_BLOCK, SHARED_BLOCK = 128, 64
# Scores of a block of queries in a forward-mode pass: on a CPU they should stay in its cache until their derivative is used.
SCORE_BYTES = {"cpu": 2**19, "cuda": 2**28}


class Call(NamedTuple):
    """Arguments of an attention call.

    Attributes:
        q: (B, H, L, d); k, v: (B, Hkv, keys, d), the last L keys are the queries' own.
        sinks: (B, L, H) or None.
        mask: (B or 1, H or 1, L, keys), added to the scores, or boolean (True: seen); None = causal. Never differentiated.
        scale: factor on the scores.
        cap: bound of the scores, or None.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None
    mask: Tensor | None
    scale: float
    cap: float | None

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The differentiable inputs: q, k, v and the sinks, if there are any."""
        return (self.q, self.k, self.v) if self.sinks is None else (self.q, self.k, self.v, self.sinks)

    def take(self, rows: slice) -> Call:
        """The call for some rows."""
        sinks = None if self.sinks is None else self.sinks[rows]
        mask = self.mask if self.mask is None or len(self.mask) == 1 else self.mask[rows]
        return self._replace(q=self.q[rows], k=self.k[rows], v=self.v[rows], sinks=sinks, mask=mask)


class Block(NamedTuple):
    """A block of queries from `start` to `stop`.

    Attributes:
        P: (B·Hkv, groups, stop − start, before + stop) probabilities of the keys.
        slope: of the soft cap, like P, or None.
        sink: (B·Hkv, groups, stop − start, 1) probability of the sink, or None.
    """

    start: int
    stop: int
    P: Tensor
    slope: Tensor | None
    sink: Tensor | None


@dataclass
class Scene:
    """Results of an attention call that its derivatives need.

    Attributes:
        q: (B·Hkv, groups, L, d); k, v: (B·Hkv, before + L, d).
        blocks: of queries.
        out: (B·Hkv, groups, L, d).
        before: keys that stand before the first query's own: of a beginning that the rows share and that was read before.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    blocks: list[Block]
    out: Tensor
    shape: tuple[int, int, int, int]
    before: int = 0


def _by_key_head(x: Tensor, kv: int) -> Tensor:
    """(..., B, L, H) -> (..., B·Hkv, groups, L), one number per head and query."""
    return x.unflatten(-1, (kv, -1)).movedim(-3, -1).flatten(-4, -3)


def _by_query(x: Tensor, kv: int) -> Tensor:
    """(..., B·Hkv, groups, L) -> (..., B, L, H), the inverse of `_by_key_head`."""
    return x.unflatten(-3, (-1, kv)).movedim(-1, -3).flatten(-2, -1)


def _apply_mask(seen: Tensor, mask: Tensor, kv: int) -> None:
    """Mask scores (B·Hkv, groups, b, keys) in place by a mask (B or 1, H or 1, b, keys)."""
    scores = seen.view(-1, kv, *seen.shape[1:])
    mask = mask[:, :, None] if mask.shape[1] == 1 else mask.unflatten(1, (kv, -1))  # (B, kv, groups, b, keys)
    if mask.dtype == torch.bool:
        scores.masked_fill_(~mask, torch.finfo(seen.dtype).min)
    else:
        scores += mask


def look(call: Call, size: int = QUERY_BLOCK) -> Scene:
    """softmax([cap·tanh(s·q·kᵀ/cap) + mask, sink])·[v, 0], without graph.

    Args:
        size: rows of a block.
    """
    q, k, v, sinks, mask, scale, cap = call
    B, H, L, d = q.shape
    kv = k.shape[1]
    logits = None if sinks is None else _by_key_head(sinks, kv)[..., None].to(q)  # (B·kv, groups, L, 1)
    keys = k.shape[2]
    before = keys - L
    q, k, v = q.reshape(B * kv, H // kv, L, d), k.reshape(B * kv, keys, -1), v.reshape(B * kv, keys, -1)
    out = q.new_empty(B * kv, H // kv, L, v.shape[-1])
    blocks = []
    for start in range(0, L, size):
        stop = min(start + size, L)
        end = before + stop  # of the keys that the block sees
        rows = q[:, :, start:stop].flatten(1, 2) * scale  # (B·kv, g·b, d)
        S = torch.bmm(rows, k[:, :end].mT)  # (B·kv, g·b, end)
        slope = None
        if cap is not None:
            S.div_(cap).tanh_()
            slope = 1 - S.square()
            S.mul_(cap)
        seen = S.view(B * kv, H // kv, stop - start, end)
        if mask is None:
            hidden = torch.ones(stop - start, end, dtype=torch.bool, device=q.device).triu_(before + start + 1)
            seen.masked_fill_(hidden, torch.finfo(S.dtype).min)
        else:
            _apply_mask(seen, mask[:, :, start:stop, :end], kv)
        if logits is None:
            P, sink = torch.softmax(seen, -1), None
        else:
            whole = torch.softmax(torch.cat([seen, logits[:, :, start:stop]], -1), -1)
            P, sink = whole[..., :-1].contiguous(), whole[..., -1:]
        out[:, :, start:stop] = torch.bmm(P.flatten(1, 2), v[:, :end]).view(B * kv, H // kv, stop - start, -1)
        blocks.append(Block(start, stop, P, None if slope is None else slope.view_as(P), sink))
    return Scene(q, k, v, scale, blocks, out, (B, H, L, out.shape[-1]), before)


def pull_back(scene: Scene, g: Tensor) -> tuple[Tensor, ...]:
    """Vector-Jacobian products of n cotangents.

    g (n, B, H, L, d) -> dq (n, B, H, L, d), dk and dv (n, B, Hkv, L, d), and with sinks theirs, (n, B, L, H).

    Cotangents stand beside each other, behind positions and the heads that share a key: (B·kv, L, groups, n, ·). So
    each product is one matrix product per key head, whatever n.
    """
    n = len(g)
    B, H, L, _ = scene.shape
    KV, groups = scene.q.shape[:2]
    kv = KV // B
    q = scene.q.transpose(1, 2).reshape(KV, L * groups, -1) * scene.scale  # (B·kv, L·groups, d)
    k = scene.k * scene.scale
    g = g.reshape(n, KV, groups, L, -1).permute(1, 3, 2, 0, 4).contiguous()
    D = (g * scene.out.transpose(1, 2)[:, :, :, None]).sum(-1)  # (B·kv, L, groups, n)
    # Written position by position, as the layers before read them: what follows need not be copied into that order.
    dq, dk, dv = (g.new_empty(n, B, L, heads, x.shape[-1]) for heads, x in ((H, q), (kv, k), (kv, scene.v)))
    to_q = dq.view(n, B, L, kv, groups, -1).permute(1, 3, 2, 4, 0, 5)  # (B, kv, L, groups, n, d)
    to_k, to_v = dk.permute(1, 3, 0, 2, 4), dv.permute(1, 3, 2, 0, 4)  # (B, kv, n, L, d), (B, kv, L, n, d)
    dsinks = None if scene.blocks[0].sink is None else g.new_empty(n, KV, groups, L)
    # The last block of queries reaches every key: it fills dk and dv, the others add to them.
    for start, stop, weights, slope, sink in reversed(scene.blocks):
        b = (stop - start) * groups
        P = weights.transpose(1, 2).reshape(KV, b, stop)
        rows = g[:, start:stop].reshape(KV, b * n, -1)
        dS = torch.baddbmm(D[:, start:stop].reshape(KV, b * n, 1), rows, scene.v[:, :stop].mT, beta=-1)
        dS.view(KV, b, n, stop).mul_(P[:, :, None])
        if slope is not None:
            dS.view(KV, b, n, stop).mul_(slope.transpose(1, 2).reshape(KV, b, 1, stop))
        to_q[:, :, start:stop] = torch.bmm(dS, k[:, :stop]).view(B, kv, stop - start, groups, n, -1)
        each_k = torch.bmm(dS.view(KV, b, n * stop).mT, q[:, start * groups : stop * groups]).view(B, kv, n, stop, -1)
        each_v = torch.bmm(P.mT, rows.view(KV, b, -1)).view(B, kv, stop, n, -1)
        if stop == L:
            to_k.copy_(each_k)
            to_v.copy_(each_v)
        else:
            to_k[:, :, :, :stop] += each_k
            to_v[:, :, :stop] += each_v
        if dsinks is not None and sink is not None:
            dsinks[..., start:stop] = -sink[..., 0] * D[:, start:stop].permute(3, 0, 2, 1)
    gradients = (dq.transpose(2, 3), dk.transpose(2, 3), dv.transpose(2, 3))
    return gradients if dsinks is None else (*gradients, _by_query(dsinks, kv))


def pull_back_cut(scene: Scene, g: Tensor) -> tuple[Tensor, ...]:
    """`pull_back` of one cotangent (B, H, L, d), where position t's cotangent reaches only its own key and value."""
    B, H, L, _ = scene.shape
    q, k = scene.q, scene.k
    g = g.reshape(scene.out.shape)
    dq = torch.empty_like(q)
    own_score, own_weight = q.new_empty(*q.shape[:3], 1), q.new_empty(*q.shape[:3], 1)
    D = torch.linalg.vecdot(g, scene.out)  # (B·kv, groups, L)
    dsinks = None if scene.blocks[0].sink is None else torch.empty_like(D)
    for start, stop, P, slope, sink in scene.blocks:
        values = scene.v[:, : scene.before + stop].mT
        dS = torch.baddbmm(
            D[:, :, start:stop].flatten(1)[..., None], g[:, :, start:stop].flatten(1, 2), values, beta=-1
        )
        dS = dS.view_as(P).mul_(P)
        if slope is not None:
            dS.mul_(slope)
        dS.mul_(scene.scale)
        if dsinks is not None and sink is not None:
            dsinks[:, :, start:stop] = -sink[..., 0] * D[:, :, start:stop]
        dq[:, :, start:stop] = torch.bmm(dS.flatten(1, 2), k[:, : scene.before + stop]).view(
            *q.shape[:2], stop - start, -1
        )
        own_score[:, :, start:stop, 0] = dS.diagonal(scene.before + start, -2, -1)
        own_weight[:, :, start:stop, 0] = P.diagonal(scene.before + start, -2, -1)
    dk, dv = (own_score * q).sum(1), (own_weight * g).sum(1)  # (B·kv, L, d), over the heads that share a key
    dk, dv = (torch.nn.functional.pad(part, (0, 0, scene.before, 0)) for part in (dk, dv))  # (B·kv, before + L, d)
    gradients = (dq.view(B, H, L, -1), dk.view(B, -1, *dk.shape[1:]), dv.view(B, -1, *dv.shape[1:]))
    return gradients if dsinks is None else (*gradients, _by_query(dsinks, len(k) // B))


def push_forward(scene: Scene, tq: Tensor, tk: Tensor, tv: Tensor, tsinks: Tensor | None = None) -> Tensor:
    """Jacobian-vector product: tangents of q, k, v and the sinks -> tangent of the output (B, H, L, d)."""
    q, k, v = scene.q, scene.k, scene.v
    drift = (
        None if tsinks is None else _by_key_head(tsinks, len(k) // scene.shape[0])[..., None]
    )  # (B·kv, groups, L, 1)
    tq, tk, tv = tq.reshape(q.shape), tk.reshape(k.shape), tv.reshape(v.shape)
    keys = torch.cat([k, tk], -1)
    tangent = torch.empty_like(scene.out)
    for start, stop, P, slope, sink in scene.blocks:
        end = scene.before + stop
        rows = torch.cat([tq[:, :, start:stop], q[:, :, start:stop]], -1).flatten(1, 2).mul_(scene.scale)
        W = torch.bmm(rows, keys[:, :end].mT).view_as(P).mul_(P)  # P∘dS
        if slope is not None:
            W.mul_(slope)
        moved = torch.bmm(W.flatten(1, 2), v[:, :end]).baddbmm_(P.flatten(1, 2), tv[:, :end])
        part = tangent[:, :, start:stop]
        part.copy_(moved.view_as(part))
        total = W.sum(-1, keepdim=True)
        if drift is not None and sink is not None:
            total += sink * drift[:, :, start:stop]
        part.addcmul_(total, scene.out[:, :, start:stop], value=-1)
    return tangent.view(scene.shape)


def pull_back_at(scene: Scene, g: Tensor, where: Tensor) -> tuple[Tensor, ...]:
    """`pull_back` of n cotangents that each live on one position per row.

    Args:
        g: (n, B, H, d), cotangents of the output at `where` (n, B).

    Returns:
        dq (n, B, H, L, d), dk, dv (n, B, Hkv, L, d), with sinks theirs (n, B, L, H): at one position for dq and the
        sinks, at every earlier one for dk, dv.
    """
    n = len(g)
    B, H, L, d = scene.shape
    kv = len(scene.k) // B
    groups = H // kv
    index = where[:, :, None].expand(n, B, kv).reshape(n, B * kv)
    row, lane = index.flatten(), torch.arange(B * kv, device=g.device).repeat(n)
    P, slope, sink = _rows_of_p(scene, row, lane)
    g = g.reshape(n * B * kv, groups, d)
    D = torch.linalg.vecdot(g, scene.out[lane, :, row])  # (n·B·kv, groups)
    dS = (torch.bmm(g, scene.v.mT[lane]) - D[:, :, None]).mul_(P).mul_(scene.scale)  # (n·B·kv, groups, L)
    if slope is not None:
        dS.mul_(slope)
    q_row = scene.q[lane, :, row]  # (n·B·kv, groups, d)
    dq = g.new_zeros(n * B * kv, groups, L, scene.q.shape[-1])
    dq[torch.arange(len(row), device=g.device), :, row] = torch.bmm(dS, scene.k[lane])
    dk, dv = torch.bmm(dS.mT, q_row), torch.bmm(P.mT, g)
    gradients = (dq.view(n, B, H, L, -1), dk.view(n, B, kv, L, -1), dv.view(n, B, kv, L, -1))
    if sink is None:
        return gradients
    dsinks = g.new_zeros(n, B, L, H)
    at = where[..., None, None].expand(n, B, 1, H)
    return (*gradients, dsinks.scatter_(2, at, (-sink * D).view(n, B, 1, H)))


def _rows_of_p(scene: Scene, row: Tensor, lane: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Rows of P (len, groups, L), zero beyond the diagonal, of the soft cap's slope and of the sink (len, groups)."""
    L = scene.shape[2]
    P = scene.q.new_zeros(len(row), scene.q.shape[1], L)
    slopes = None if scene.blocks[0].slope is None else torch.zeros_like(P)
    sinks = None if scene.blocks[0].sink is None else P.new_zeros(P.shape[:2])
    for start, stop, block, slope, sink in scene.blocks:
        here = ((row >= start) & (row < stop)).nonzero()[:, 0]
        P[here, :, :stop] = block[lane[here], :, row[here] - start]
        if slopes is not None and slope is not None:
            slopes[here, :, :stop] = slope[lane[here], :, row[here] - start]
        if sinks is not None and sink is not None:
            sinks[here] = sink[lane[here], :, row[here] - start, 0]
    return P, slopes, sinks


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        ctx.scene = look(Call(*arguments))
        return ctx.scene.out.view(ctx.scene.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        return _padded(pull_back_cut(ctx.scene, g))


class _Full(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        ctx.scene = look(Call(*arguments), SHARED_BLOCK)
        return ctx.scene.out.view(ctx.scene.shape)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        return _padded(each(g, lambda all_: pull_back(ctx.scene, all_)))


def _padded(gradients: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    """One entry for each field of `Call`."""
    return (*gradients, *(None for _ in range(len(Call._fields) - len(gradients))))


def _pushed(call: Call) -> Tensor:
    """Attention of dual tensors, or of tensors that carry tangents."""
    given = [carried(x) for x in call.inputs]
    count = next((len(tangents) for tangents in given if tangents is not None), 0)
    if count:
        with torch._C.DisableTorchFunction():  # the pass around it need not see these operations
            return carry(*_push(call, [tangents or [None] * count for tangents in given]))
    parts = [forward_ad.unpack_dual(x) for x in call.inputs]
    primals = dict(zip(("q", "k", "v", "sinks"), (part.primal for part in parts), strict=False))
    out, (tangent,) = _push(call._replace(**primals), [[part.tangent] for part in parts])
    return out if tangent is None else forward_ad.make_dual(out, tangent)


def _push(call: Call, given: list[Tangents]) -> tuple[Tensor, Tangents]:
    """The output of a call and its tangents, where `given` are those of its inputs; a few rows at a time."""
    B, H, L, _ = call.q.shape
    scores = H * min(SHARED_BLOCK, L) * call.k.shape[2] * call.q.element_size()
    size = max(1, SCORE_BYTES.get(call.q.device.type, SCORE_BYTES["cuda"]) // scores)
    directions = list(zip(*given, strict=True))
    outs: list[Tensor] = []
    pushed: list[list[Tensor]] = [[] for _ in directions]
    for start in range(0, B, size):
        rows = slice(start, start + size)
        some = call.take(rows)
        scene = look(some, SHARED_BLOCK)
        outs.append(scene.out.view(scene.shape))
        for moved, parts in zip(directions, pushed, strict=True):
            if any(t is not None for t in moved):
                full = [torch.zeros_like(x) if t is None else t[rows] for x, t in zip(some.inputs, moved, strict=True)]
                parts.append(push_forward(scene, *full))
    return torch.cat(outs), [torch.cat(parts) if parts else None for parts in pushed]


class Stopped(Exception):  # noqa: N818 - not an error: the forward pass has given what was wanted
    """Raised at the last attention call on request, with its arguments."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.call = call


class LearnedMaskError(UserError):
    """An attention mask depends on trainable parameters, but attention treats it as a constant."""


@dataclass
class Calls:
    """Counts the attention calls of a forward pass; the `split`-th is treated specially where that is set.

    Attributes:
        made: calls so far.
        split: number of the last call (1-based) or None.
        stop: end the forward pass there.
        leaf: (inputs of that call, its output), when it was cut off from what comes before.
        module: the attention module that called last.
        within: whether a call is being computed.
    """

    made: int = 0
    split: int | None = None
    stop: bool = False
    leaf: tuple[tuple[Tensor, ...], Tensor] | None = None
    module: torch.nn.Module | None = None
    within: bool = False


_active: list[Calls] = []


@contextmanager
def counting(split: int | None = None, *, stop: bool = False) -> Iterator[Calls]:
    """Count the attention calls within the block."""
    _active.append(Calls(split=split, stop=stop))
    try:
        yield _active[-1]
    finally:
        _active.pop()


def _depends(x: Tensor) -> bool:
    """Whether `x` requires grad or has a tangent."""
    return x.requires_grad or forward_ad.unpack_dual(x).tangent is not None


def _selected(mask: Tensor, indices: Tensor) -> Tensor:
    """`mask` (B, 1, L, keys) restricted to the keys `indices` (B, L, k) of sparse attention."""
    hidden = torch.ones_like(mask, dtype=torch.bool).expand(len(indices), -1, -1, -1)
    hidden = hidden.scatter(-1, indices.long()[:, None], False)
    return mask & ~hidden if mask.dtype == torch.bool else mask.masked_fill(hidden, torch.finfo(mask.dtype).min)


def _entry(kind: str) -> Any:
    """The attention of one kind as a function for the interface of transformers."""

    def attention(
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **rest: Any,
    ) -> tuple[Tensor, None]:
        if rest.get("position_bias") is not None:
            raise UserError(f"{type(module).__name__}: attention with `position_bias` is not known to token gradients")
        if rest.get("indices") is not None and attention_mask is not None:
            attention_mask = _selected(attention_mask, rest["indices"])
        if attention_mask is not None and _depends(attention_mask):
            raise LearnedMaskError(f"{type(module).__name__}: its attention mask depends on trainable parameters")
        B, H, L, d = query.shape
        # Per query, as a bias is: so recorders see at which position the parameter is used.
        sinks = None if s_aux is None else query.new_zeros(B, L, H) + s_aux
        scale = d**-0.5 if scaling is None else float(scaling)
        call = Call(query, key, value, sinks, attention_mask, scale, softcap)
        calls = _active[-1]
        calls.made += 1
        calls.module, calls.within = module, True
        if kind == FORWARD:
            out = _pushed(call)
        elif calls.made == calls.split:
            if calls.stop:
                raise Stopped(call)
            with torch.no_grad():
                scene = look(call)
                out = scene.out.view(scene.shape)
            out.requires_grad_()
            calls.leaf = (call.inputs, out)
        else:
            out = (_Cut if kind == CUT else _Full).apply(*call)
        calls.within = False
        return out.transpose(1, 2).contiguous(), None

    return attention


for _kind in (CUT, FULL, FORWARD):
    ALL_ATTENTION_FUNCTIONS.register(_kind, _entry(_kind))
    ALL_MASK_ATTENTION_FUNCTIONS.register(_kind, eager_mask)
