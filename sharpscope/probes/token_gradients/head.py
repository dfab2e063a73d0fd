"""Gradients of log-probabilities at the output layer, in closed form."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from sharpscope.policy import Head

# Logits held at once; a softmax, its gradient and two matrix products run over them while they are in reach.
LOGIT_BYTES = {"cpu": 16 * 2**20, "cuda": 512 * 2**20}


@dataclass(frozen=True)
class HeadChunk:
    """A run of consecutive tokens at the output layer a = W h + b, z = cap·tanh(scale·a/cap), p = softmax(z/T).

    Attributes:
        rows: which of the M tokens.
        logp: (C,) ln p_y [nats].
        pull: (C, V) ∂ ln p_y/∂a.
        to_hidden: (C, d) ∂ ln p_y/∂h, in the weight's type.
    """

    rows: slice
    logp: Tensor
    pull: Tensor
    to_hidden: Tensor


@dataclass(frozen=True)
class HeadGradients:
    """∇ log π at the output layer, for M tokens.

    Attributes:
        logp: (M,) [nats].
        to_hidden: (M, d) ∂ log π/∂h.
        pull_squared: (M,) ‖∂ log π/∂a‖², the squared norm for the layer's bias.
        weight_squared: (M,) ‖∂ log π/∂W‖² = pull_squared·‖h‖², W in its use as output layer only.
    """

    logp: Tensor
    to_hidden: Tensor
    pull_squared: Tensor
    weight_squared: Tensor


@torch.no_grad()
def head_chunks(hidden: Tensor, head: Head, targets: Tensor, temperature: float) -> Iterator[HeadChunk]:
    """Walk over M tokens: hidden (M, d), targets (M,).

    1 − p_y is summed over the other words, so it keeps its relative precision when p_y is near 1.
    """
    for rows in _blocks(hidden, head):
        z = head.logits(hidden[rows])  # (C, V)
        slope = None if head.soft_cap is None else 1 - (z / head.soft_cap).square_()
        y = targets[rows, None]
        logp, p, rest = _softmax(z, y, temperature)
        pull = p.neg_().scatter_(1, y, rest[:, None]).mul_(head.scale / temperature)
        if slope is not None:
            pull.mul_(slope)
        yield HeadChunk(rows, logp, pull, pull.to(head.weight.dtype) @ head.weight.detach())


def _blocks(hidden: Tensor, head: Head) -> Iterator[slice]:
    """Number of tokens whose logits are in memory at once."""
    budget = LOGIT_BYTES.get(hidden.device.type, LOGIT_BYTES["cuda"])
    size = max(1, budget // (head.weight.shape[0] * max(hidden.element_size(), 4)))
    for start in range(0, len(hidden), size):
        yield slice(start, min(start + size, len(hidden)))


def _softmax(z: Tensor, y: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """The numbers ln p_y (C,), p (C, V) with 0 at y, and 1 − p_y (C,) of logits z (C, V), which are overwritten, and words y (C, 1)."""
    if temperature != 1.0:
        z.div_(temperature)
    highest = z.amax(1)
    zy = z.gather(1, y)[:, 0] - highest
    p = torch.softmax(z, 1)
    py, log_total = p.gather(1, y)[:, 0], -torch.log(p.amax(1))  # the largest shifted logit is 0
    p.scatter_(1, y, 0.0)
    rest = p.sum(1)
    return torch.where(py > 0.5, torch.log1p(-rest), zy - log_total), p, rest


@torch.no_grad()
def head_gradients(
    hidden: Tensor, head: Head, targets: Tensor, temperature: float, *, words: Tensor | None = None
) -> tuple[HeadGradients, Tensor | None]:
    """∂ log π at the output layer for M tokens: hidden (M, d), targets (M,).

    Args:
        words: (M, L) token ids or None. Where given, ∂ log π/∂a at these words, (M, L), is returned too: with tied
            embeddings it couples the output layer's gradient to the input embedding's.
    """
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    M = len(hidden)
    logp, squared = hidden.new_empty(M, dtype=dtype), hidden.new_empty(M, dtype=dtype)
    to_hidden = torch.empty_like(hidden)
    coupled = None if words is None else hidden.new_empty(words.shape, dtype=dtype)
    for chunk in head_chunks(hidden, head, targets, temperature):
        logp[chunk.rows] = chunk.logp
        squared[chunk.rows] = torch.linalg.vecdot(chunk.pull, chunk.pull)
        to_hidden[chunk.rows] = chunk.to_hidden
        if coupled is not None and words is not None:
            coupled[chunk.rows] = chunk.pull.gather(1, words[chunk.rows])
    weight_squared = squared * torch.linalg.vecdot(hidden.to(dtype), hidden.to(dtype))
    return HeadGradients(logp, to_hidden, squared, weight_squared), coupled
