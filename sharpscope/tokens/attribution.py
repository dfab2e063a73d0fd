"""Attribution of gradients to tokens by directional derivatives of log-probabilities.

A loss that depends on the weights only through the tokens' log-probabilities has ∇L = Σ_t c_t ∇log π_t with c_t = ∂L/∂log π_t.
A directional derivative of all log-probabilities therefore splits ⟨∇L, u⟩ over the tokens: the squared gradient norm for u =
∇L, the first-order effect on a held-out loss for a held-out gradient. Other terms of the loss (an entropy bonus, a penalty on
the whole distribution) are the remainder ⟨∇L − Σ_t c_t ∇log π_t, u⟩.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from sharpscope.config.run import Check
from sharpscope.errors import UserError
from sharpscope.policy.directions import length
from sharpscope.policy.guard import guarded
from sharpscope.policy.token_stats import flat_logp
from sharpscope.tokens.forward_mode import KEPT_BYTES, Keeping, logp_derivative
from sharpscope.tokens.rows import Rows, make_rows
from sharpscope.tokens.self_check import check_derivative, check_shares
from sharpscope.tokens.structure import Structure, hidden_states, read_before, structure_of


def attribute(
    model: nn.Module,
    input_ids: Tensor,
    mask: Tensor,
    coef: Tensor,
    direction: Sequence[Tensor] | None = None,
    attention_mask: Tensor | None = None,
    temperature: float = 1.0,
    *,
    check: Check = "first",
) -> Tensor:
    """Each token's signed share c_t⟨∇log π_t, u⟩ of a directional derivative of the loss.

    Args:
        model: see `score_norms`.
        input_ids: (N, S) tokens.
        mask: (N, S), 1 on the tokens to attribute to.
        coef: (N, S) c_t = ∂L/∂log π_t.
        direction: u, tensors like the trainable parameters in the model's order; None for u = ∇L/‖∇L‖² with
            ∇L = Σ_t c_t ∇log π_t. Then values of the gradient's pass are kept for that of the derivative: up to 512 MiB on a CPU,
            2 GiB on a GPU.
        attention_mask: (N, S), 0 on padding; None for no padding.
        temperature: softmax temperature.
        check: when to compare the derivatives with autograd, see `score_norms`. Unless off, shares without a direction must
            also sum to 1.

    Returns:
        (N, S) shares, 0 where the mask is 0. Without a direction they sum to 1 up to rounding, and are NaN at masked tokens if
        ∇L = 0. With a direction they are not normalized.

    Raises:
        UserError: shapes that do not fit together, or a part of the model without a forward-mode derivative.
        CheckError: the derivatives differ from autograd's on this model, or the shares do not sum to 1.

    Examples:
        >>> import torch
        >>> from transformers import Qwen2Config, Qwen2ForCausalLM
        >>> import sharpscope
        >>> sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        >>> model = Qwen2ForCausalLM(Qwen2Config(vocab_size=16, num_key_value_heads=2, **sizes)).eval()
        >>> input_ids = torch.tensor([[3, 1, 4, 1, 5]])
        >>> mask = torch.tensor([[0, 0, 1, 1, 1]])  # the completion
        >>> coef = -1.0 * mask  # L = -Σ log π, the loss of fine-tuning on this completion
        >>> shares = sharpscope.attribute(model, input_ids, mask, coef)
        >>> shares.shape, round(shares.sum().item(), 3)
        (torch.Size([1, 5]), 1.0)
    """
    if coef.shape != input_ids.shape:
        raise UserError(
            f"coef, shape {tuple(coef.shape)}: must be that of input_ids, {tuple(input_ids.shape)}"
        )
    with guarded(model):
        rows = _counting(make_rows(model, input_ids, mask, attention_mask, temperature), coef)
        structure = structure_of(model)
        kept = list[list[Tensor]]()
        squared = 1.0
        along = (
            _gradient(model, structure, rows, coef, temperature, kept)
            if direction is None
            else direction
        )
        shapes, given = (
            [tuple(part.shape) for part in parts] for parts in (structure.named.values(), along)
        )
        if shapes != given:
            raise UserError(
                f"direction, {len(given)} tensors: must be like the {len(shapes)} trainable parameters in the model's order"
            )
        if direction is None:
            squared = math.fsum(length(part) ** 2 for part in along)
            if squared == 0.0:
                return torch.where(mask.bool(), math.nan, 0.0).to(coef.dtype)
        check_derivative(model, structure, rows, temperature, check)
        values = logp_derivative(model, structure, rows, along, temperature, kept)
        shares = coef.to(values) * values / squared
        if direction is None:
            check_shares(model, shares, check)
        return shares


def logp_gradient(
    model: nn.Module,
    input_ids: Tensor,
    mask: Tensor,
    coef: Tensor,
    attention_mask: Tensor | None = None,
    temperature: float = 1.0,
) -> list[Tensor]:
    """∇ Σ_t c_t log π_t for the trainable parameters in the model's order, without holding all logits.

    Args are those of `attribute`.
    """
    with guarded(model):
        rows = make_rows(model, input_ids, mask, attention_mask, temperature)
        return _gradient(model, structure_of(model), rows, coef, temperature)


def _counting(rows: Rows, coef: Tensor) -> Rows:
    """The rows with only those tokens chosen whose coefficient is not 0."""
    coef = coef.to(rows.ids.device)[rows.source[:, None], rows.columns]
    return replace(rows, chosen=rows.chosen & (coef != 0))


def _gradient(
    model: nn.Module,
    structure: Structure,
    rows: Rows,
    coef: Tensor,
    temperature: float,
    kept: list[list[Tensor]] | None = None,
) -> list[Tensor]:
    """∇ Σ_t c_t log π_t by autograd; `kept` gets the outputs of the linear maps for each chunk of `rows`, while there is room."""
    parameters = list(structure.named.values())
    total = [torch.zeros_like(p) for p in parameters]
    coef = coef.to(rows.ids.device)
    room = 0 if kept is None else KEPT_BYTES.get(rows.ids.device.type, KEPT_BYTES["cuda"])
    for chunk in _counting(rows, coef).chunks(share=structure.shares):
        with torch.enable_grad():
            with Keeping(room) as keeping:
                hidden = hidden_states(
                    model,
                    chunk.ids,
                    read_before(model, chunk.before, len(chunk.ids)),
                )
            states = hidden[chunk.predicts].to(structure.dtype)
            logp, _ = flat_logp(states, structure.head, chunk.targets, temperature, stats=False)
        room = keeping.room
        if kept is not None:
            kept.append(keeping.values)
        if logp.requires_grad:
            parts = torch.autograd.grad(
                logp,
                parameters,
                coef[chunk.place].to(logp),
                allow_unused=True,
            )
            for target, gradient in zip(total, parts, strict=True):
                if gradient is not None:
                    target.add_(gradient)
    return total


def failure_coefficients(mask: Tensor, success: Tensor) -> Tensor:
    """Coefficients c (N, S) with Σ c·∇log π = ∇ expected failure, for rows drawn from the current policy.

    The expected failure is mean_i [1 − R_i·exp(Σ_t log r_it)]; its gradient at r = 1 is −mean_i R_i Σ_t ∇log π_it. `mask` is
    (N, S), 1 on completion tokens; `success` (N,) R in [0, 1].
    """
    return -mask.to(success) * success[:, None] / len(mask)
