"""Causal attention for transformers' `AttentionInterface`, with other positions' keys constant or with a forward mode.

Fused kernels have no forward-mode derivative, and no attention of PyTorch treats other positions' keys and values as constants.
Probabilities are made in blocks of query rows, so that masked parts are not computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sharpscope.errors import UserError

CUT, FORWARD = "sharpscope_cut", "sharpscope_forward"
"""Attention whose gradient reaches a position only through itself; attention with a forward mode."""

QUERY_BLOCK = 128  # rows of probabilities made at once: small enough for a cache, large enough for efficient products


class AttentionError(UserError):
    """An attention call that the attention of this module cannot replace."""


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, cap: float | None, cut: bool) -> Tensor:
    """softmax(cap·tanh(scale·q·kᵀ/cap) + mask)·v, (B, H, L, d).

    Args:
        q: (B, H, L, d).
        k: (B, Hkv, before + L, d) with H a multiple of Hkv; the last L keys are those of the queries' positions.
        v: like k.
        mask: (B or 1, H or 1, L, keys), added, or boolean (True: seen); None: causal.
        scale: of the scores.
        cap: soft cap of the scores, or None.
        cut: whether a position's cotangent reaches only its own query, key and value.
    """
    (B, H, L, _), (kv, keys) = q.shape, k.shape[1:3]
    before, groups = keys - L, H // kv
    q, k, v = q.reshape(B * kv, groups, L, -1) * scale, k.reshape(B * kv, keys, -1), v.reshape(B * kv, keys, -1)
    own_k, own_v = (x[:, None, before:] - x[:, None, before:].detach() for x in (k, v))  # 0, with the own gradient
    if cut:
        k, v = k.detach(), v.detach()
    parts = []
    for start in range(0, L, QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, L)
        rows, end, at = q[:, :, start:stop], before + stop, before + start  # `end`: of the keys that the block sees
        S = torch.bmm(rows.flatten(1, 2), k[:, :end].mT).unflatten(1, (groups, -1))  # (B·kv, groups, b, end)
        if cut:
            diagonal = S.diagonal(at, -2, -1) + torch.linalg.vecdot(rows.detach(), own_k[:, :, start:stop])
            S = torch.diagonal_scatter(S, diagonal, at, -2, -1)
        if cap is not None:
            S = cap * torch.tanh(S / cap)
        if mask is None:
            hidden = torch.ones(stop - start, end, dtype=torch.bool, device=q.device).triu_(at + 1)
            S = S.masked_fill(hidden, torch.finfo(S.dtype).min)
        else:
            part = mask[:, :, start:stop, :end]
            part = part[:, :, None] if part.shape[1] == 1 else part.unflatten(1, (kv, -1))  # (B, kv, groups, b, end)
            S = S.unflatten(0, (B, kv))
            S = S.masked_fill(~part, torch.finfo(S.dtype).min) if part.dtype == torch.bool else S + part
            S = S.flatten(0, 1)
        P = torch.softmax(S, -1)
        out = torch.bmm(P.flatten(1, 2), v[:, :end]).unflatten(1, (groups, -1))  # (B·kv, groups, b, d)
        if cut:
            out = out + P.diagonal(at, -2, -1).detach()[..., None] * own_v[:, :, start:stop]
        parts.append(out)
    return torch.cat(parts, 2).view(B, H, L, -1)


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
        out = attend(query, key, value, attention_mask, scale, softcap, kind == CUT)
        return out.transpose(1, 2).contiguous(), None

    return attention


for _kind in (CUT, FORWARD):
    ALL_ATTENTION_FUNCTIONS.register(_kind, _entry(_kind))
    ALL_MASK_ATTENTION_FUNCTIONS.register(_kind, eager_mask)
