"""Differentiable log-probabilities of tokens without storing all logits of a large vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from sharpscope.policy.head import Head, widened
from sharpscope.policy.token_stats import LOGIT_BYTES, STAT_NAMES, cache_budget, chunks, flat_stats, logit_stats

# Maximum size of logits stored for the backward pass; larger ones are recomputed.
KEEP_BYTES = {"cpu": 256 * 2**20, "cuda": 1024 * 2**20}


def flat_logp(
    hidden: Tensor, head: Head, targets: Tensor, temperature: float, *, stats: bool, keep_logits: bool | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute log-probabilities of tokens, differentiable in `hidden` and the head.

    Args:
        hidden: (M, d) hidden states, at least float32.
        head: The output layer.
        targets: (M,) long.
        temperature: T > 0.
        stats: Whether to also return the tokens' statistics from the same logits, without gradient.
        keep_logits: True: store all (M, V) logits for the backward pass; False: recompute them in chunks (first
            derivatives only); None: store them if they are small and the layer is not in half precision, since its
            float32 copy would be stored too.

    Returns:
        Log-probabilities (M,) [nats], and the statistics by name, (M,) each, or an empty dict.
    """
    bytes_per_row = head.weight.shape[0] * max(4, hidden.element_size())
    if keep_logits is None:
        few = len(hidden) * bytes_per_row <= KEEP_BYTES.get(hidden.device.type, KEEP_BYTES["cuda"])
        keep_logits = few and head.weight.dtype == hidden.dtype
    if not keep_logits:
        logp, *others = _ChunkedLogp.apply(hidden, head.weight, head.bias, head, targets, temperature, stats)
        names = [name for name in STAT_NAMES if name != "logp"]
        values = dict(zip(names, others, strict=True)) | {"logp": logp.detach()} if stats else {}
        return logp, values
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
    """logp and optionally the other statistics; the backward pass recomputes the logits in chunks."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        head: Head,
        targets: Tensor,
        temperature: float,
        stats: bool,
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(hidden, weight, targets)
        ctx.head, ctx.temperature = head, temperature
        values = flat_stats(hidden, head, targets, temperature)
        others = tuple(values[name] for name in STAT_NAMES if name != "logp") if stats else ()
        ctx.mark_non_differentiable(*others)
        return values["logp"], *others

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets = ctx.saved_tensors
        head: Head = ctx.head
        g = gradients[0]  # (M,)
        wide = torch.promote_types(weight.dtype, torch.float32)  # accumulate in at least float32
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
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(weight.dtype),
            None,
            None,
            None,
            None,
        )


def flat_entropy(hidden: Tensor, head: Head, temperature: float) -> Tensor:
    """Entropy (M,) [nats] of softmax(z/T) given `hidden` (M, d), differentiable in hidden and the head.

    Logits are computed in chunks, and again in the backward pass.
    """
    bytes_per_row = head.weight.shape[0] * max(4, hidden.element_size())
    parts = [
        checkpoint(_entropy, hidden[start:stop], head, temperature, use_reentrant=False, preserve_rng_state=False)
        for start, stop in chunks(len(hidden), bytes_per_row, hidden.device, LOGIT_BYTES)
    ]
    return torch.cat(parts)


def _entropy(hidden: Tensor, head: Head, temperature: float) -> Tensor:
    log_p = torch.log_softmax(head.logits(hidden) / temperature, -1)  # (C, V)
    return -(log_p.exp() * log_p).sum(-1)
