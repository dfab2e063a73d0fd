"""Differentiable log-probabilities of chosen tokens that never hold all logits of a large vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sharpscope.policy.head import Head, widened
from sharpscope.policy.token_stats import LOGIT_BYTES, STAT_NAMES, cache_budget, chunks, flat_stats, logit_stats

# Logits kept for the backward pass where they are no larger than this; beyond it they are computed twice.
KEEP_BYTES = {"cpu": 256 * 2**20, "cuda": 1024 * 2**20}


def flat_logp(
    hidden: Tensor, head: Head, targets: Tensor, temperature: float, *, stats: bool, keep_logits: bool | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probabilities (M,) of `targets` (M,) given `hidden` (M, d), differentiable in hidden and the head.

    Args:
        hidden: (M, d), at least float32.
        head: the output layer.
        targets: (M,) long.
        temperature: T > 0.
        stats: also return the tokens' statistics, name -> (M,), from the same logits, without gradient.
        keep_logits: True = keep all (M, V) logits for the backward pass; False = compute them again there, in chunks
            (first derivatives only); None = keep them if they are small and the layer is not held in half precision,
            whose float32 copy would be kept with them.
    """
    bytes_per_row = head.weight.shape[0] * max(4, hidden.element_size())
    if keep_logits is None:
        few = len(hidden) * bytes_per_row <= KEEP_BYTES.get(hidden.device.type, KEEP_BYTES["cuda"])
        keep_logits = few and head.weight.dtype == hidden.dtype
    if not keep_logits:
        logp, *others = _ChunkedLogp.apply(hidden, head.weight, head.bias, head, targets, temperature, stats)
        names = [name for name in STAT_NAMES if name != "logp"]
        found = dict(zip(names, others, strict=True)) | {"logp": logp.detach()} if stats else {}
        return logp, found
    z = head.logits(hidden)  # (M, V)
    all_logp = torch.log_softmax(z if temperature == 1.0 else z / temperature, -1)
    logp = all_logp.gather(1, targets[:, None])[:, 0]
    if not stats:
        return logp, {}
    out = {name: torch.empty_like(logp.detach()) for name in STAT_NAMES}
    out["hidden_norm"] = torch.linalg.vector_norm(hidden.detach(), dim=-1, dtype=logp.dtype)
    for start, stop in chunks(len(hidden), bytes_per_row, hidden.device, cache_budget()):
        part = {name: value[start:stop] for name, value in out.items()}
        logit_stats(z.detach()[start:stop].clone(), targets[start:stop], temperature, part)
    return logp, out


class _ChunkedLogp(torch.autograd.Function):
    """logp, then the other statistics if asked for; the backward pass computes the logits of a chunk again."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, head: Head, targets: Tensor, temperature: float,
        stats: bool,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        ctx.save_for_backward(hidden, weight, targets)
        ctx.head, ctx.temperature = head, temperature
        found = flat_stats(hidden, head, targets, temperature)
        others = tuple(found[name] for name in STAT_NAMES if name != "logp") if stats else ()
        ctx.mark_non_differentiable(*others)
        return found["logp"], *others

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets = ctx.saved_tensors
        head: Head = ctx.head
        g = gradients[0]  # (M,)
        wide = torch.promote_types(weight.dtype, torch.float32)  # sums over chunks are not rounded to half precision
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros(len(weight), dtype=wide, device=weight.device) if ctx.needs_input_grad[2] else None
        for start, stop in chunks(len(hidden), len(weight) * wide.itemsize, hidden.device, LOGIT_BYTES):
            z = head.logits(hidden[start:stop])  # (C, V)
            slope = head.scale if head.soft_cap is None else (1 - (z / head.soft_cap) ** 2) * head.scale
            p = torch.softmax(z.div_(ctx.temperature), 1)
            coefficient = g[start:stop, None] / ctx.temperature
            grad_z = p.mul_(-coefficient).scatter_add_(1, targets[start:stop, None], coefficient.to(p.dtype))
            grad_z = grad_z.mul_(slope).to(hidden.dtype)  # ∂/∂(W h + b)
            if grad_hidden is not None:
                for rows, block in widened(weight):
                    grad_hidden[start:stop].addmm_(grad_z[:, rows], block, beta=float(rows.start > 0))
            if grad_weight is not None:
                if grad_weight.dtype == grad_z.dtype:
                    grad_weight.addmm_(grad_z.T, hidden[start:stop])
                else:
                    grad_weight += grad_z.T @ hidden[start:stop]
            if grad_bias is not None:
                grad_bias += grad_z.sum(0, dtype=wide)
        return (
            grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(weight.dtype), None, None, None, None,
        )  # fmt: skip
