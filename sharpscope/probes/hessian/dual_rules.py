"""Operations whose tangent PyTorch computes in a way that cannot be differentiated backward.

The forward-mode rules of softmax, log_softmax and logsumexp (and so of attention) multiply in place, which makes a
backward pass through the tangent raise; that of layer_norm holds mean and scale constant: silently wrong.
Inside `DualRules` these calls have their closed-form tangent instead; their values are PyTorch's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


class DualRules(TorchFunctionMode):
    """Context manager in which softmax, layer norm and scaled dot-product attention accept dual tensors."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _REPLACED.get(func, func)(*args, **(kwargs or {}))


def _dual(value: Tensor, dot: Callable[[Tensor], Tensor], given: Tensor) -> Tensor:
    tangent = forward_ad.unpack_dual(given).tangent
    return value if tangent is None else forward_ad.make_dual(value, dot(tangent))


def _softmax(input: Tensor, dim: int, *_: Any, dtype: torch.dtype | None = None, **__: Any) -> Tensor:
    given = input if dtype is None else input.to(dtype)
    p = torch.softmax(forward_ad.unpack_dual(given).primal, dim)
    return _dual(p, lambda dot: p * (dot - (p * dot).sum(dim, keepdim=True)), given)


def _log_softmax(input: Tensor, dim: int, *_: Any, dtype: torch.dtype | None = None, **__: Any) -> Tensor:
    given = input if dtype is None else input.to(dtype)
    logp = torch.log_softmax(forward_ad.unpack_dual(given).primal, dim)
    return _dual(logp, lambda dot: dot - (logp.exp() * dot).sum(dim, keepdim=True), given)


def _logsumexp(input: Tensor, dim: int, keepdim: bool = False) -> Tensor:
    primal = forward_ad.unpack_dual(input).primal
    value = torch.logsumexp(primal, dim, keepdim)
    return _dual(value, lambda dot: (torch.softmax(primal, dim) * dot).sum(dim, keepdim=keepdim), input)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The definition of `scaled_dot_product_attention`, without dropout."""
    if enable_gqa and key.shape[-3] != query.shape[-3]:
        repeats = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(repeats, -3), value.repeat_interleave(repeats, -3)
    scores = (query * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)) @ key.transpose(-2, -1)  # (…, L, S)
    if is_causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(future, -torch.inf)
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    return _softmax(scores, -1) @ value


def _layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *_: Any,
) -> Tensor:
    """Layer norm composed of operations whose tangents can be differentiated."""
    axes = tuple(range(-len(normalized_shape), 0))
    centered = input - input.mean(axes, keepdim=True)
    normed = centered * torch.rsqrt(centered.square().mean(axes, keepdim=True) + eps)
    normed = normed if weight is None else normed * weight
    return normed if bias is None else normed + bias


_REPLACED: dict[Any, Callable[..., Any]] = {
    torch.softmax: _softmax,
    Tensor.softmax: _softmax,
    F.softmax: lambda input, dim=-1, _stacklevel=3, dtype=None: _softmax(input, dim, dtype=dtype),
    torch.log_softmax: _log_softmax,
    Tensor.log_softmax: _log_softmax,
    F.log_softmax: lambda input, dim=-1, _stacklevel=3, dtype=None: _log_softmax(input, dim, dtype=dtype),
    torch.logsumexp: _logsumexp,
    Tensor.logsumexp: _logsumexp,
    F.scaled_dot_product_attention: _attention,
    F.layer_norm: _layer_norm,
    torch.layer_norm: _layer_norm,
}
