"""Causal attention with the derivatives that the tiers need, registered at transformers' `AttentionInterface`.

Fused kernels have neither forward-mode derivatives nor a batched backward, and no library's attention can be told to
hold other positions' keys and values constant. The probabilities P are kept, in blocks of query rows, so that what a
causal mask hides is not computed. Shapes: q (B, H, L, d), k and v (B, Hkv, L, d), H = groups·Hkv.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sharpscope.errors import UserError
from sharpscope.probes.token_gradients.batched import each

CUT, FULL, FORWARD = (f"sharpscope_{name}" for name in ("cut", "full", "forward"))
"""Attention whose gradient reaches a position only through itself; with a batched backward; with a forward mode."""

# Rows of P made at once: small enough for a cache, large enough for an efficient matrix product. Where many cotangents
# share P, smaller blocks skip more of what the causal mask hides.
QUERY_BLOCK, SHARED_BLOCK = 128, 64


@dataclass
class Scene:
    """What one attention call computed: enough for every derivative of it.

    Attributes:
        q: (B·Hkv, groups, L, d); k, v: (B·Hkv, before + L, d).
        blocks: per block of queries (start, stop, P (B·Hkv, groups, stop − start, before + stop), slope of the soft cap
            or None).
        out: (B·Hkv, groups, L, d).
        before: keys that stand before the first query's own: of a beginning that the rows share and that was read before.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    blocks: list[tuple[int, int, Tensor, Tensor | None]]
    out: Tensor
    shape: tuple[int, int, int, int]
    before: int = 0


def look(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, cap: float | None, size: int = QUERY_BLOCK
) -> Scene:
    """softmax(cap·tanh(s·q·kᵀ/cap) + mask)·v, without any graph; `mask` (1, 1, L, keys) additive, None = causal.

    Args:
        size: rows of a block.
    """
    B, H, L, d = q.shape
    kv = k.shape[1]
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
            seen += mask[0, 0, start:stop, :end]
        P = torch.softmax(seen, -1)
        out[:, :, start:stop] = torch.bmm(P.flatten(1, 2), v[:, :end]).view(B * kv, H // kv, stop - start, -1)
        blocks.append((start, stop, P, None if slope is None else slope.view_as(P)))
    return Scene(q, k, v, scale, blocks, out, (B, H, L, out.shape[-1]), before)


def _score_pull(scene: Scene, block: tuple[int, int, Tensor, Tensor | None], g: Tensor) -> Tensor:
    """Cotangent of one block's scores, (B·kv, groups, b, before + stop), from that of the output, g (B·kv, groups, L, d)."""
    start, stop, P, slope = block
    rows = g[:, :, start:stop]
    D = torch.linalg.vecdot(rows, scene.out[:, :, start:stop]).flatten(1)[:, :, None]  # (B·kv, g·b, 1)
    dS = torch.baddbmm(D, rows.flatten(1, 2), scene.v[:, : scene.before + stop].mT, beta=-1).view_as(P).mul_(P)
    if slope is not None:
        dS.mul_(slope)
    return dS.mul_(scene.scale)


def pull_back(scene: Scene, g: Tensor) -> tuple[Tensor, ...]:
    """Vector-Jacobian products of n cotangents: g (n, B, H, L, d) -> dq (n, B, H, L, d), dk, dv (n, B, Hkv, L, d).

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
    # The last block of queries reaches every key: it fills dk and dv, the others add to them.
    for start, stop, weights, slope in reversed(scene.blocks):
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
    return dq.transpose(2, 3), dk.transpose(2, 3), dv.transpose(2, 3)


def pull_back_cut(scene: Scene, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`pull_back` with other positions' keys and values constant: position t's cotangent reaches k_t, v_t only."""
    B, H, L, _ = scene.shape
    q, k = scene.q, scene.k
    g = g.reshape(scene.out.shape)
    dq = torch.empty_like(q)
    own_score, own_weight = q.new_empty(*q.shape[:3], 1), q.new_empty(*q.shape[:3], 1)
    for block in scene.blocks:
        start, stop, P, _ = block
        dS = _score_pull(scene, block, g)
        dq[:, :, start:stop] = torch.bmm(dS.flatten(1, 2), k[:, : scene.before + stop]).view(
            *q.shape[:2], stop - start, -1
        )
        own_score[:, :, start:stop, 0] = dS.diagonal(scene.before + start, -2, -1)
        own_weight[:, :, start:stop, 0] = P.diagonal(scene.before + start, -2, -1)
    dk, dv = (own_score * q).sum(1), (own_weight * g).sum(1)  # (B·kv, L, d), over the heads that share a key
    dk, dv = (torch.nn.functional.pad(part, (0, 0, scene.before, 0)) for part in (dk, dv))  # (B·kv, before + L, d)
    return dq.view(B, H, L, -1), dk.view(B, -1, *dk.shape[1:]), dv.view(B, -1, *dv.shape[1:])


def push_forward(scene: Scene, tq: Tensor, tk: Tensor, tv: Tensor) -> Tensor:
    """Jacobian-vector product: tangents of q, k, v -> tangent of the output (B, H, L, d)."""
    q, k, v = scene.q, scene.k, scene.v
    tq, tk, tv = tq.reshape(q.shape), tk.reshape(k.shape), tv.reshape(v.shape)
    keys = torch.cat([k, tk], -1)
    tangent = torch.empty_like(scene.out)
    for start, stop, P, slope in scene.blocks:
        end = scene.before + stop
        rows = torch.cat([tq[:, :, start:stop], q[:, :, start:stop]], -1).flatten(1, 2).mul_(scene.scale)
        W = torch.bmm(rows, keys[:, :end].mT).view_as(P).mul_(P)  # P∘dS
        if slope is not None:
            W.mul_(slope)
        moved = torch.bmm(W.flatten(1, 2), v[:, :end]).baddbmm_(P.flatten(1, 2), tv[:, :end])
        part = tangent[:, :, start:stop]
        part.copy_(moved.view_as(part))
        part.addcmul_(W.sum(-1, keepdim=True), scene.out[:, :, start:stop], value=-1)
    return tangent.view(scene.shape)


def pull_back_at(scene: Scene, g: Tensor, where: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`pull_back` of n cotangents that each live on one position per row.

    Args:
        g: (n, B, H, d), cotangents of the output at `where` (n, B).

    Returns:
        dq (n, B, H, L, d), dk, dv (n, B, Hkv, L, d): at one position for dq, at every earlier one for dk, dv.
    """
    n = len(g)
    B, H, L, d = scene.shape
    kv = len(scene.k) // B
    groups = H // kv
    index = where[:, :, None].expand(n, B, kv).reshape(n, B * kv)
    row, lane = index.flatten(), torch.arange(B * kv, device=g.device).repeat(n)
    P, slope = _rows_of_p(scene, row, lane)
    g = g.reshape(n * B * kv, groups, d)
    dS = (
        torch.bmm(g, scene.v.mT[lane]) - torch.linalg.vecdot(g, scene.out[lane, :, row])[:, :, None]
    )  # (n·B·kv, groups, L)
    dS = dS.mul_(P).mul_(scene.scale)
    if slope is not None:
        dS.mul_(slope)
    q_row = scene.q[lane, :, row]  # (n·B·kv, groups, d)
    dq = g.new_zeros(n * B * kv, groups, L, scene.q.shape[-1])
    dq[torch.arange(len(row), device=g.device), :, row] = torch.bmm(dS, scene.k[lane])
    dk, dv = torch.bmm(dS.mT, q_row), torch.bmm(P.mT, g)
    return dq.view(n, B, H, L, -1), dk.view(n, B, kv, L, -1), dv.view(n, B, kv, L, -1)


def _rows_of_p(scene: Scene, row: Tensor, lane: Tensor) -> tuple[Tensor, Tensor | None]:
    """Rows of P (len, groups, L), zero beyond the diagonal, and of the soft cap's slope."""
    L = scene.shape[2]
    P = scene.q.new_zeros(len(row), scene.q.shape[1], L)
    slopes = None if scene.blocks[0][3] is None else torch.zeros_like(P)
    for start, stop, block, slope in scene.blocks:
        here = ((row >= start) & (row < stop)).nonzero()[:, 0]
        P[here, :, :stop] = block[lane[here], :, row[here] - start]
        if slopes is not None and slope is not None:
            slopes[here, :, :stop] = slope[lane[here], :, row[here] - start]
    return P, slopes


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, cap: float | None
    ) -> Tensor:
        ctx.scene = look(q, k, v, mask, scale, cap)
        return ctx.scene.out.view(ctx.scene.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        return (*pull_back_cut(ctx.scene, g), None, None, None)


class _Full(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, cap: float | None
    ) -> Tensor:
        ctx.scene = look(q, k, v, mask, scale, cap, SHARED_BLOCK)
        return ctx.scene.out.view(ctx.scene.shape)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        return (*each(g, lambda all_: pull_back(ctx.scene, all_)), None, None, None)


def _pushed(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, cap: float | None) -> Tensor:
    """Attention of dual tensors."""
    (q, tq), (k, tk), (v, tv) = (forward_ad.unpack_dual(x) for x in (q, k, v))
    scene = look(q, k, v, mask, scale, cap)
    out = scene.out.view(scene.shape)
    if tq is None and tk is None and tv is None:
        return out
    blank = [torch.zeros_like(p) if t is None else t for p, t in ((q, tq), (k, tk), (v, tv))]
    return forward_ad.make_dual(out, push_forward(scene, *blank))


class Stopped(Exception):  # noqa: N818 - not an error: the forward pass has given what was wanted
    """Raised at the last attention call where that was asked for, with that call's arguments."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, cap: float | None) -> None:
        super().__init__()
        self.q, self.k, self.v = q, k, v
        self.mask, self.scale, self.cap = mask, scale, cap


@dataclass
class Calls:
    """Counts the attention calls of a forward pass; the `split`-th is treated specially where that is set.

    Attributes:
        made: calls so far.
        split: number of the last call (1-based) or None.
        stop: end the forward pass there.
        leaf: (q, k, v, out) of that call, when it was cut off from what comes before.
        module: the attention module that called last.
    """

    made: int = 0
    split: int | None = None
    stop: bool = False
    leaf: tuple[Tensor, Tensor, Tensor, Tensor] | None = None
    module: torch.nn.Module | None = None


calls = Calls()
"""Of the forward pass in progress; set anew by whoever starts one."""


def begin(split: int | None = None, *, stop: bool = False) -> Calls:
    """Count from zero again."""
    global calls  # noqa: PLW0603 - the attention interface leaves no other way in
    calls = Calls(split=split, stop=stop)
    return calls


def _entry(kind: str) -> Any:
    def attention(
        module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
        scaling: float | None = None, softcap: float | None = None, **rest: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        for name in ("s_aux", "position_bias"):
            if rest.get(name) is not None:
                raise UserError(f"{type(module).__name__}: attention with `{name}` is not known to token gradients")
        scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
        mask = None if attention_mask is None else attention_mask[:1]  # rows have no padding on their left
        calls.made += 1
        calls.module = module
        if kind == FORWARD:
            out = _pushed(query, key, value, mask, scale, softcap)
        elif calls.made == calls.split:
            if calls.stop:
                raise Stopped(query, key, value, mask, scale, softcap)
            with torch.no_grad():
                scene = look(query, key, value, mask, scale, softcap)
                out = scene.out.view(scene.shape)
            out.requires_grad_()
            calls.leaf = (query, key, value, out)
        else:
            function = _Cut if kind == CUT else _Full
            out = function.apply(query, key, value, mask, scale, softcap)
        return out.transpose(1, 2).contiguous(), None

    return attention


for _kind in (CUT, FULL, FORWARD):
    ALL_ATTENTION_FUNCTIONS.register(_kind, _entry(_kind))
    ALL_MASK_ATTENTION_FUNCTIONS.register(_kind, eager_mask)
