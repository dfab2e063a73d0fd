"""Causal attention for transformers' `AttentionInterface`, with other positions' keys constant or with a forward mode.

Fused kernels have no forward-mode derivative, and no attention of PyTorch treats other positions' keys and values as constants.
The probabilities P are stored in blocks of query rows, so that masked parts are not computed. Shapes: q (B, H, L, d), k and v
(B, Hkv, keys, d), H = groups·Hkv; the last L keys are those of the queries' positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sharpscope.errors import UserError

CUT, FORWARD = "sharpscope_cut", "sharpscope_forward"
"""Attention whose gradient reaches a position only through itself; attention with a forward mode."""

QUERY_BLOCK = {
    CUT: 128,
    FORWARD: 64,
}  # rows of P made at once: small enough for a cache, large enough for efficient products


class AttentionError(UserError):
    """An attention call that the attention of this module cannot replace."""


class _Block(NamedTuple):
    """Queries from `start` to `stop`: P (B·Hkv, groups, stop − start, keys seen), and the soft cap's slope like P or None."""

    start: int
    stop: int
    P: Tensor
    slope: Tensor | None


class _Result(NamedTuple):
    """An attention call: q and out (B·Hkv, groups, L, d), k and v (B·Hkv, before + L, d)."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    blocks: list[_Block]
    scale: float
    before: int
    shape: tuple[int, int, int, int]  # (B, H, L, d) of the output


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, cap: float | None, size: int
) -> _Result:
    """softmax(cap·tanh(scale·q·kᵀ/cap) + mask)·v without a graph; mask: added, or boolean (True: seen); None: causal."""
    B, H, L, d = q.shape
    kv, keys = k.shape[1], k.shape[2]
    before, groups = keys - L, H // kv
    q, k, v = q.reshape(B * kv, groups, L, d), k.reshape(B * kv, keys, -1), v.reshape(B * kv, keys, -1)
    out = q.new_empty(B * kv, groups, L, v.shape[-1])
    blocks = []
    for start in range(0, L, size):
        stop = min(start + size, L)
        end = before + stop  # of the keys that the block sees
        S = torch.bmm(q[:, :, start:stop].flatten(1, 2) * scale, k[:, :end].mT)  # (B·kv, groups·b, end)
        slope = None
        if cap is not None:
            S.div_(cap).tanh_()
            slope = (1 - S.square()).view(B * kv, groups, -1, end)
            S.mul_(cap)
        S = S.view(B * kv, groups, stop - start, end)
        if mask is None:
            hidden = torch.ones(stop - start, end, dtype=torch.bool, device=q.device).triu_(before + start + 1)
            S.masked_fill_(hidden, torch.finfo(S.dtype).min)
        else:
            part, scores = mask[:, :, start:stop, :end], S.view(B, kv, groups, -1, end)
            part = part[:, :, None] if part.shape[1] == 1 else part.unflatten(1, (kv, -1))  # (B, kv, groups, b, end)
            if part.dtype == torch.bool:
                scores.masked_fill_(~part, torch.finfo(S.dtype).min)
            else:
                scores += part
        P = torch.softmax(S, -1)
        out[:, :, start:stop] = torch.bmm(P.flatten(1, 2), v[:, :end]).view(B * kv, groups, stop - start, -1)
        blocks.append(_Block(start, stop, P, slope))
    return _Result(q, k, v, out, blocks, scale, before, (B, H, L, v.shape[-1]))


class _Cut(torch.autograd.Function):
    """Attention in whose backward pass position t's cotangent reaches only its own query, key and value."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        q, k, v, mask, scale, cap = arguments
        ctx.result = _attend(q, k, v, mask, scale, cap, QUERY_BLOCK[CUT])
        return ctx.result.out.view(ctx.result.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, blocks, scale, before, (B, H, L, _) = ctx.result
        g = g.reshape(out.shape)
        dq = torch.empty_like(q)
        score, weight = q.new_empty(*q.shape[:3], 1), q.new_empty(*q.shape[:3], 1)  # of the own key and value
        D = torch.linalg.vecdot(g, out)[..., None]  # (B·kv, groups, L, 1)
        for start, stop, P, slope in blocks:
            end = before + stop
            dP = torch.bmm(g[:, :, start:stop].flatten(1, 2), v[:, :end].mT).view_as(P)
            dS = dP.sub_(D[:, :, start:stop]).mul_(P).mul_(scale)
            if slope is not None:
                dS.mul_(slope)
            dq[:, :, start:stop] = torch.bmm(dS.flatten(1, 2), k[:, :end]).view(*q.shape[:2], stop - start, -1)
            score[:, :, start:stop, 0] = dS.diagonal(before + start, -2, -1)
            weight[:, :, start:stop, 0] = P.diagonal(before + start, -2, -1)
        dk, dv = (score * q).sum(1), (weight * g).sum(1)  # (B·kv, L, d), over the heads that share a key
        dk, dv = (nn.functional.pad(part, (0, 0, before, 0)).unflatten(0, (B, -1)) for part in (dk, dv))
        return dq.view(B, H, L, -1), dk, dv, None, None, None


def _pushed(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, cap: float | None) -> Tensor:
    """Attention of dual tensors."""
    parts = [forward_ad.unpack_dual(x) for x in (q, k, v)]
    q, k, v = (part.primal for part in parts)
    result = _attend(q, k, v, mask, scale, cap, QUERY_BLOCK[FORWARD])
    out = result.out.view(result.shape)
    if all(part.tangent is None for part in parts):
        return out
    q, k, v, blocks = result.q, result.k, result.v, result.blocks
    tq, tk, tv = (
        torch.zeros_like(like) if part.tangent is None else part.tangent.reshape(like.shape)
        for part, like in zip(parts, (q, k, v), strict=True)
    )
    keys = torch.cat([k, tk], -1)
    tangent = torch.empty_like(result.out)
    for start, stop, P, slope in blocks:
        end = result.before + stop
        rows = torch.cat([tq[:, :, start:stop], q[:, :, start:stop]], -1).flatten(1, 2).mul_(result.scale)
        W = torch.bmm(rows, keys[:, :end].mT).view_as(P).mul_(P)  # P∘dS
        if slope is not None:
            W.mul_(slope)
        moved = torch.bmm(W.flatten(1, 2), v[:, :end]).baddbmm_(P.flatten(1, 2), tv[:, :end])
        part = tangent[:, :, start:stop]
        part.copy_(moved.view_as(part))
        part.addcmul_(W.sum(-1, keepdim=True), result.out[:, :, start:stop], value=-1)
    return forward_ad.make_dual(out, tangent.view(result.shape))


_calls: list[list[nn.Module]] = []


@contextmanager
def counting() -> Iterator[list[nn.Module]]:
    """List of the modules that call attention within the block."""
    _calls.append([])
    try:
        yield _calls[-1]
    finally:
        _calls.pop()


def _entry(kind: str) -> Any:
    """The attention of one kind as a function for the interface of transformers."""

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        softcap: float | None = None,
        **rest: Any,
    ) -> tuple[Tensor, None]:
        unknown = [name for name in ("s_aux", "position_bias", "indices") if rest.get(name) is not None]
        if unknown:
            raise AttentionError(f"{type(module).__name__} has attention with `{unknown[0]}`")
        if attention_mask is not None and (
            attention_mask.requires_grad or forward_ad.unpack_dual(attention_mask).tangent is not None
        ):
            raise AttentionError(f"{type(module).__name__} has a trainable attention mask")
        if _calls:
            _calls[-1].append(module)
        scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
        attend = _Cut.apply if kind == CUT else _pushed
        out = attend(query, key, value, attention_mask, scale, softcap)
        return out.transpose(1, 2).contiguous(), None

    return attention


for _kind in (CUT, FORWARD):
    ALL_ATTENTION_FUNCTIONS.register(_kind, _entry(_kind))
    ALL_MASK_ATTENTION_FUNCTIONS.register(_kind, eager_mask)
