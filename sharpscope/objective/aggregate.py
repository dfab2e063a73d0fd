"""How token losses become one number: the per-token coefficient, fixed for all microbatches of an update."""

from __future__ import annotations

import torch
from torch import Tensor

from sharpscope.config.method import Method


def token_normalizer(
    method: Method, mask: Tensor, max_completion_length: int, *, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Coefficient of each token's loss, over all completions of ONE update; loss = Σ coefficient·token loss.

    sequence_mean: 1/(n·length_i); token_mean: 1/Σ length; constant: 1/(n·max_completion_length); sequence_sum: 1/n. Token
    selections and passes do not change it: every pass of Lopti divides by the full token count.

    Args:
        method: its `aggregate` decides.
        mask: (n, T) loss tokens of all completions of the update; a row without tokens still counts in n.
        max_completion_length: the completion limit [tokens].
        dtype: of the result.

    Returns:
        (n, T), 0 outside the mask.
    """
    mask = mask.bool()
    rows = mask.shape[0]
    counts = mask.to(dtype)
    if method.aggregate == "sequence_mean":
        return counts / (rows * counts.sum(-1, keepdim=True).clamp(min=1))
    if method.aggregate == "token_mean":
        return counts / counts.sum(dtype=torch.float64).clamp(min=1).to(dtype)
    if method.aggregate == "sequence_sum":
        return counts / rows
    return counts / (rows * max_completion_length)
