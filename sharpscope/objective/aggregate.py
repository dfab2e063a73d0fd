"""How token losses become one number: the per-token coefficient, and the size of the gradient that a token gets by it."""

from __future__ import annotations

import torch
from torch import Tensor

from sharpscope.config.method import AllTokens, Method
from sharpscope.objective.values import per_token


def token_normalizer(
    method: Method,
    mask: Tensor,
    max_completion_length: int,
    *,
    keep: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Coefficient of each token's loss, over all completions of ONE update; loss = Σ coefficient·token loss.

    sequence_mean: 1/(n·length_i); token_mean: 1/Σ length; constant: 1/(n·max_completion_length); sequence_sum: 1/n;
    kept_mean: 1/Σ keep. Otherwise token selections do not change it, and passes never do: every pass of Lopti divides by the
    full token count.

    Args:
        method: its `aggregate` decides.
        mask: (n, T) loss tokens of all completions of the update; a row without tokens still counts in n.
        max_completion_length: the completion limit [tokens].
        keep: (n, T) bool, rows of the plan's `keep`; needed by `kept_mean` unless the method keeps all tokens.
        dtype: of the result.

    Returns:
        (n, T), 0 outside the mask.

    Raises:
        ValueError: `keep` is needed and missing.
    """
    mask = mask.bool()
    rows = mask.shape[0]
    counts = mask.to(dtype)
    if method.aggregate == "sequence_mean":
        return counts / (rows * counts.sum(-1, keepdim=True).clamp(min=1))
    if method.aggregate == "token_mean":
        return counts / counts.sum(dtype=torch.float64).clamp(min=1).to(dtype)
    if method.aggregate == "kept_mean":
        if keep is None and not isinstance(method.tokens, AllTokens):
            raise ValueError("aggregate=kept_mean needs keep")
        kept = mask if keep is None else mask & keep
        return counts / kept.sum(dtype=torch.float64).clamp(min=1).to(dtype)
    if method.aggregate == "sequence_sum":
        return counts / rows
    return counts / (rows * max_completion_length)


def gradient_mass(method: Method, mask: Tensor, advantage: Tensor, logit_grad_norm: Tensor) -> Tensor:
    """|A_t|·coefficient_t·‖p_t − e_y‖₂, what each token gives to the gradient by its logits at weight 1 and ratio 1.

    It equals |c_t|·‖p_t − e_y‖ for c_t = ∂L/∂ln π_t of an update over all rows, up to a factor common to all tokens.

    Args:
        method: its `aggregate` decides.
        mask: (N, T) loss tokens of the step.
        advantage: (N,) or (N, T).
        logit_grad_norm: (N, T) ‖p − e_y‖₂.

    Returns:
        (N, T) in the dtype of `logit_grad_norm`, 0 outside the mask.
    """
    coefficient = token_normalizer(method, mask, 1, keep=mask.bool(), dtype=logit_grad_norm.dtype)
    size = per_token(advantage, logit_grad_norm).to(logit_grad_norm).abs() * logit_grad_norm
    return torch.where(mask.bool(), coefficient * size, 0.0)
