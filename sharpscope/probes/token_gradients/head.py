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
    """A run of consecutive tokens at the output layer a = W h + b, z = cap·tanh(scale·a/cap), p = softmax(z/T)."""

    rows: slice  # which of the M tokens
    pull: Tensor  # (C, V) ∂ ln p_y/∂a
    to_hidden: Tensor  # (C, d) ∂ ln p_y/∂h, in the weight's type


@dataclass(frozen=True)
class HeadGradients:
    """∇ log π at the output layer, for M tokens."""

    to_hidden: Tensor  # (M, d) ∂ log π/∂h
    pull_squared: Tensor  # (M,) ‖∂ log π/∂a‖², the squared norm for the layer's bias
    weight_squared: Tensor  # (M,) ‖∂ log π/∂W‖² = pull_squared·‖h‖², W in its use as output layer only


@torch.no_grad()
def head_chunks(hidden: Tensor, head: Head, targets: Tensor, temperature: float) -> Iterator[HeadChunk]:
    """Walk over M tokens: hidden (M, d), targets (M,).

    1 − p_y is summed over the other words, so it keeps its relative precision when p_y is near 1.
    """
    budget = LOGIT_BYTES.get(hidden.device.type, LOGIT_BYTES["cuda"])
    size = max(1, budget // (head.weight.shape[0] * max(hidden.element_size(), 4)))
    for start in range(0, len(hidden), size):
        rows = slice(start, start + size)
        z, y = head.logits(hidden[rows]), targets[rows, None]  # (C, V), (C, 1)
        slope = None if head.soft_cap is None else 1 - (z / head.soft_cap).square_()
        p = torch.softmax(z if temperature == 1.0 else z.div_(temperature), 1).scatter_(1, y, 0.0)
        rest = p.sum(1, keepdim=True)
        pull = p.neg_().scatter_(1, y, rest).mul_(head.scale / temperature)
        if slope is not None:
            pull.mul_(slope)
        yield HeadChunk(rows, pull, pull.to(head.weight.dtype) @ head.weight.detach())


@torch.no_grad()
def head_gradients(
    hidden: Tensor, head: Head, targets: Tensor, temperature: float, *, words: Tensor | None = None
) -> tuple[HeadGradients, Tensor | None]:
    """∂ log π at the output layer for M tokens: hidden (M, d), targets (M,).

    With `words`, token ids (M, L), also ∂ log π/∂a at these, (M, L): with tied embeddings it couples the output layer's
    gradient to the input embedding's.
    """
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    squared = hidden.new_empty(len(hidden), dtype=dtype)
    to_hidden = torch.empty_like(hidden)
    coupled = None if words is None else hidden.new_empty(words.shape, dtype=dtype)
    for chunk in head_chunks(hidden, head, targets, temperature):
        squared[chunk.rows] = torch.linalg.vecdot(chunk.pull, chunk.pull)
        to_hidden[chunk.rows] = chunk.to_hidden
        if coupled is not None and words is not None:
            coupled[chunk.rows] = chunk.pull.gather(1, words[chunk.rows])
    weight_squared = squared * torch.linalg.vecdot(hidden.to(dtype), hidden.to(dtype))
    return HeadGradients(to_hidden, squared, weight_squared), coupled
