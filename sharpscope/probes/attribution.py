"""Who made the gradient: directional derivatives of every log-probability, and the shares they give.

A loss that depends on the weights through the tokens' log-probabilities alone has ∇L = Σ_t c_t ∇log π_t, c_t =
∂L/∂log π_t. One directional derivative of all log-probabilities therefore splits any ⟨∇L, u⟩ over the tokens, with
signs: along u = ∇L the squared gradient norm, along D⁻¹Δθ the squared length of what the optimizer did, along minus
a held-out gradient the first-order effect on a held-out loss. What the loss owes to other terms (an entropy bonus, a
penalty on the full distribution) is the remainder, ⟨∇L − Σ_t c_t ∇log π_t, u⟩.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sharpscope.config.probes import Check
from sharpscope.errors import UserError
from sharpscope.probes.guard import guarded
from sharpscope.probes.token_gradients.central import central_derivative, squared_length
from sharpscope.probes.token_gradients.forward_mode import NoForwardModeError, pushed_hidden, pushed_logp
from sharpscope.probes.token_gradients.head import head_chunks, head_gradients
from sharpscope.probes.token_gradients.rows import Rows, make_rows, safe_width, widen
from sharpscope.probes.token_gradients.self_check import (
    check_derivative,
    check_difference,
    check_gradient,
    check_shares,
)
from sharpscope.probes.token_gradients.structure import Structure, hidden_states, read_before, structure_of

Way = Literal["auto", "forward", "central"]


@dataclass(frozen=True)
class Derivatives:
    """Directional derivatives of log π.

    Attributes:
        values: (N, S), 0 where the mask is 0.
        error: (N, S) estimated absolute error of a central difference (its distance to that of twice the step), or
            None.
        way: forward or central.
        checked: largest relative error that the self-check found on this model; None = not checked.
    """

    values: Tensor
    error: Tensor | None
    way: Way
    checked: float | None = None


def attribute(
    model: nn.Module,
    input_ids: Tensor,
    mask: Tensor,
    coef: Tensor,
    direction: Sequence[Tensor] | None = None,
    attention_mask: Tensor | None = None,
    temperature: float = 1.0,
    method: Way = "auto",
    *,
    check: Check = "first",
) -> Tensor:
    """Each token's share c_t⟨∇log π_t, u⟩ of a directional derivative of L, with sign.

    Args:
        model, input_ids, mask, attention_mask, temperature: as in `score_norms`.
        coef: (N, S) c_t = ∂L/∂log π_t.
        direction: u, tensors like the trainable parameters; None: u = ∇L/‖∇L‖² with ∇L = Σ_t c_t ∇log π_t.
        method: forward (one forward-mode pass), central (two forward passes, float32 or float64 weights) or auto
            (forward, or central where a part of the model has no forward-mode derivative).
        check: as in `score_norms`, of the derivatives; unless off, shares without a direction must also sum to 1.

    Returns:
        (N, S), 0 where the mask is 0. Without a direction the shares sum to 1 (to rounding), and are NaN at every
        token if ∇L = 0; with one they are not normalised.

    Raises:
        UserError: the input does not fit together.
        CheckError: derivatives differ from plain autograd's on this model, or shares do not sum to 1.
    """
    if coef.shape != input_ids.shape:
        raise UserError(f"coef, shape {tuple(coef.shape)}: must be that of input_ids, {tuple(input_ids.shape)}")
    along = direction
    if along is None:
        along = logp_gradient(model, input_ids, mask, coef, attention_mask, temperature, check=check)
        squared = squared_length(along)
        if squared == 0.0:
            return torch.where(mask.bool(), math.nan, 0.0).to(coef.dtype)
    found = directional_derivative(model, input_ids, mask, along, attention_mask, temperature, method, check=check)
    shares = coef.to(found.values) * found.values
    if direction is not None:
        return shares
    shares /= squared
    check_shares(model, shares, found.way, check)
    return shares


def directional_derivative(
    model: nn.Module,
    input_ids: Tensor,
    mask: Tensor,
    direction: Sequence[Tensor],
    attention_mask: Tensor | None = None,
    temperature: float = 1.0,
    method: Way = "auto",
    *,
    with_error: bool = False,
    check: Check = "first",
) -> Derivatives:
    """⟨∇log π_t, u⟩ of every token that `mask` marks, u = `direction` (tensors like the trainable parameters, in
    their order).

    Args:
        direction: tensors like the trainable parameters, in the model's order.
        with_error: central only: also estimate the error, at two forward passes more.
        check: as in `score_norms`, along a token's gradient; of central differences also a few tokens of the call against
            forward mode.

    Raises:
        UserError: the input does not fit together, or a central difference of weights or activations of less than
            32 bits is asked for.
        NoForwardModeError: forward alone: an operation of the model has no forward-mode derivative.
        CheckError: the derivatives differ from plain autograd's on this model.
    """
    if method not in ("auto", "forward", "central"):
        raise UserError(f"method, '{method}': use auto, forward or central")
    if method == "auto":
        try:
            return directional_derivative(
                model, input_ids, mask, direction, attention_mask, temperature, "forward", check=check
            )
        except NoForwardModeError:
            method = "central"
    with guarded(model, weights=False):
        rows = make_rows(model, input_ids, mask, attention_mask, temperature)
        structure = structure_of(model)
        _check_direction(structure, direction)
        if method == "central":
            checked = check_derivative(
                model, structure, rows, temperature, "central", check,
                lambda some, along: _central(model, structure, some, along, temperature, False)[0],
            )  # fmt: skip
            values, error = _central(model, structure, rows, direction, temperature, with_error)
            apart = check_difference(
                model, structure, rows, values, check,
                lambda some: _forward(model, structure, some, direction, temperature),
            )  # fmt: skip
            return Derivatives(values, error, "central", checked if apart is None else max(apart, checked or 0.0))
        structure.require_seen()
        checked = check_derivative(
            model, structure, rows, temperature, "forward", check,
            lambda some, along: _forward(model, structure, some, along, temperature),
        )  # fmt: skip
        return Derivatives(_forward(model, structure, rows, direction, temperature), None, "forward", checked)


def _blank(structure: Structure, rows: Rows) -> Tensor:
    dtype = torch.promote_types(structure.head.weight.dtype, torch.float32)
    return torch.zeros(rows.shape, dtype=dtype, device=rows.ids.device)


def _central(
    model: nn.Module,
    structure: Structure,
    rows: Rows,
    direction: Sequence[Tensor],
    temperature: float,
    with_error: bool,
) -> tuple[Tensor, Tensor | None]:
    values = _blank(structure, rows)
    error = torch.zeros_like(values) if with_error else None
    central_derivative(model, structure, rows, direction, temperature, values, error)
    return values, error


def _forward(
    model: nn.Module, structure: Structure, rows: Rows, direction: Sequence[Tensor], temperature: float
) -> Tensor:
    values = _blank(structure, rows)
    by_name = dict(zip(structure.named, direction, strict=True))
    weight = by_name.get(structure.tied or structure.head_weight or "")
    bias = by_name.get(structure.head_bias or "")
    for chunk in rows.chunks(share=structure.shares):
        ids = widen(chunk.ids, safe_width(model, chunk.ids.shape[1]))
        hidden, moved = pushed_hidden(model, structure, ids, direction, before=chunk.before)
        keep = F.pad(chunk.predicts, (0, ids.shape[1] - chunk.ids.shape[1]))
        chunk.write(
            values, pushed_logp(hidden[keep], moved[keep], structure.head, chunk.targets, temperature, weight, bias)
        )
    return values


def _check_direction(structure: Structure, direction: Sequence[Tensor]) -> None:
    shapes = [tuple(parameter.shape) for parameter in structure.named.values()]
    given = [tuple(part.shape) for part in direction]
    if shapes != given:
        at = next(
            (i for i, (a, b) in enumerate(zip(shapes, given, strict=False)) if a != b), min(len(shapes), len(given))
        )
        raise UserError(
            f"direction, {len(given)} tensors: must be like the {len(shapes)} trainable parameters in the model's "
            f"order; tensor {at} differs"
        )


def logp_gradient(
    model: nn.Module,
    input_ids: Tensor,
    mask: Tensor,
    coef: Tensor,
    attention_mask: Tensor | None = None,
    temperature: float = 1.0,
    *,
    check: Check = "first",
) -> list[Tensor]:
    """∇ Σ_t c_t log π_t over the trainable parameters, in the model's order; the logits are never held whole.

    Args:
        coef: (N, S) c_t, constants; read where `mask` is 1.
        check: as in `score_norms`, of a sum over two tokens.
    """
    with guarded(model, weights=False):
        rows = make_rows(model, input_ids, mask, attention_mask, temperature)
        structure = structure_of(model)
        check_gradient(
            model, structure, rows, temperature, check,
            lambda some, each: _gradient(model, structure, some, each, temperature),
        )  # fmt: skip
        return _gradient(model, structure, rows, coef, temperature)


def _gradient(model: nn.Module, structure: Structure, rows: Rows, coef: Tensor, temperature: float) -> list[Tensor]:
    total = [torch.zeros_like(parameter) for parameter in structure.named.values()]
    place = {name: i for i, name in enumerate(structure.named)}
    coef = coef.to(rows.ids.device)
    # A row whose coefficients are all zero adds nothing.
    counts = torch.zeros(len(rows), dtype=torch.bool, device=rows.ids.device)
    counts = ((coef[rows.source].gather(1, rows.place) != 0) & rows.chosen).any(1)
    for chunk in rows.take(counts.nonzero()[:, 0]).chunks(share=structure.shares) if bool(counts.any()) else []:
        with torch.enable_grad():
            hidden = hidden_states(model, chunk.ids, read_before(model, chunk.before))
        states, each = hidden.detach()[chunk.predicts], chunk.gathered(coef)
        output, _ = head_gradients(states, structure.head, chunk.targets, temperature)
        _add_head_gradient(structure, total, place, states, chunk.targets, each, temperature)
        if not hidden.requires_grad:
            continue
        start = torch.zeros_like(hidden)
        start[chunk.predicts] = output.to_hidden * each[:, None].to(output.to_hidden)
        parts = torch.autograd.grad(hidden, list(structure.named.values()), start, allow_unused=True)
        for target, part in zip(total, parts, strict=True):
            if part is not None:
                target.add_(part)
    return total


@torch.no_grad()
def _add_head_gradient(
    structure: Structure,
    total: list[Tensor],
    place: dict[str, int],
    states: Tensor,
    targets: Tensor,
    each: Tensor,
    T: float,
) -> None:
    weight = structure.tied or structure.head_weight
    if weight is None and structure.head_bias is None:
        return
    for part in head_chunks(states, structure.head, targets, T):
        pull = part.pull.mul_(each[part.rows, None].to(part.pull))  # (C, V)
        if weight is not None:
            total[place[weight]] += (pull.T @ states[part.rows].to(pull)).to(total[place[weight]])
        if structure.head_bias is not None:
            total[place[structure.head_bias]] += pull.sum(0).to(total[place[structure.head_bias]])


def failure_coefficients(mask: Tensor, success: Tensor) -> Tensor:
    """c (N, S) with Σ c·∇log π = ∇ of the expected failure, on rows that the present policy drew.

    The expected failure is mean_i [1 − R_i·exp(Σ_t log r_it)], whose gradient at r = 1 is −mean_i R_i Σ_t ∇log π_it.

    Args:
        mask: (N, S); success: (N,) R in [0, 1].
    """
    return -mask.to(success) * success[:, None] / len(mask)


def nll_coefficients(mask: Tensor) -> Tensor:
    """c (N, S) with Σ c·∇log π = ∇ of the mean negative log-likelihood per masked token."""
    return -mask.float() / mask.sum().clamp_min(1)


def heldout_influence(
    model: nn.Module,
    input_ids: Tensor,
    mask: Tensor,
    coef: Tensor,
    heldout_gradient: Sequence[Tensor],
    attention_mask: Tensor | None = None,
    temperature: float = 1.0,
    method: Way = "auto",
    *,
    check: Check = "first",
) -> Tensor:
    """c_t⟨∇log π_t, ∇L_heldout⟩ (N, S): how much a token lowers a held-out loss, to first order and per unit
    learning rate.

    Descent on token t's part of the loss moves the weights by −η·c_t·∇log π_t and the held-out loss by
    −η·c_t⟨∇log π_t, ∇L_heldout⟩: positive means that the token lowers it.

    Args:
        heldout_gradient: ∇L_heldout, tensors like the trainable parameters (`logp_gradient` makes one from
            `failure_coefficients` or `nll_coefficients`).
        check: as in `score_norms`.
    """
    return attribute(model, input_ids, mask, coef, heldout_gradient, attention_mask, temperature, method, check=check)


@dataclass(frozen=True)
class UpdateSplit:
    """AdamW's next step Δθ = −(lr/b₁)·D⁻¹(β₁m + (1 − β₁)·κ∇L) − lr·λ·θ, D = √v̂ + ε, with clip factor κ and b₁ = 1 −
    β₁^k.

    `gradient` + `momentum` + `weight_decay` = 1, the parts of ‖Δθ‖² = ⟨Δθ, Δθ⟩.

    Attributes:
        direction: u with ⟨∇L, u⟩ = what ∇L adds to ‖Δθ‖²; like the trainable parameters.
        squared_length: ‖Δθ‖².
        gradient: share of this round's gradient: the tokens' shares and, if the loss has other terms, a remainder.
        momentum, weight_decay: shares of m and of λ.
    """

    direction: list[Tensor]
    squared_length: float
    gradient: float
    momentum: float
    weight_decay: float


@torch.no_grad()
def coming_update(
    optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter], clip_factor: float = 1.0
) -> UpdateSplit:
    """The step that `optimizer.step()` will take, from `.grad` before clipping, before it is taken.

    It is known beforehand, and must be: the tokens' gradients belong to the weights before the step.

    Args:
        optimizer: AdamW (or Adam without weight decay).
        parameters: the trainable parameters in the model's order; those without a gradient stay as they are.
        clip_factor: κ, what the gradients will be multiplied by.

    Raises:
        UserError: another optimizer, or an option whose step is not the one above.
    """
    settings = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    direction = []
    squared = from_gradient = from_momentum = from_decay = 0.0
    for parameter in parameters:
        group = settings.get(id(parameter))
        if group is None or parameter.grad is None:
            direction.append(torch.zeros_like(parameter))
            continue
        _check_optimizer(optimizer, group)
        beta1, beta2 = group["betas"]
        lr, decay = float(group["lr"]), group["weight_decay"]
        state = optimizer.state.get(parameter, {})
        k = float(state.get("step", 0)) + 1
        m = state.get("exp_avg", torch.zeros_like(parameter))
        v = state.get("exp_avg_sq", torch.zeros_like(parameter))
        g = parameter.grad * clip_factor
        root = (v * beta2).addcmul_(g, g, value=1 - beta2).div_(1 - beta2**k).sqrt_().add_(group["eps"])
        rate = lr / (1 - beta1**k) / root
        kept, fresh, shrunk = -beta1 * rate * m, -(1 - beta1) * rate * g, -lr * decay * parameter
        step = kept + fresh + shrunk
        squared += _inner(step, step)
        from_gradient += _inner(fresh, step)
        from_momentum += _inner(kept, step)
        from_decay += _inner(shrunk, step)
        direction.append(step.mul_(rate).mul_(-(1 - beta1) * clip_factor))
    if squared == 0.0:
        return UpdateSplit(direction, 0.0, math.nan, math.nan, math.nan)
    return UpdateSplit(direction, squared, from_gradient / squared, from_momentum / squared, from_decay / squared)


def update_attribution(
    model: nn.Module,
    input_ids: Tensor,
    mask: Tensor,
    coef: Tensor,
    split: UpdateSplit,
    attention_mask: Tensor | None = None,
    temperature: float = 1.0,
    method: Way = "auto",
    *,
    check: Check = "first",
) -> Tensor:
    """Each token's share of ‖Δθ‖², (N, S); with `split.momentum`, `split.weight_decay` and any remainder they sum to 1.

    The remainder, of terms of the loss that do not go through log π, is `split.gradient` minus the tokens' sum. Call it
    before the optimizer's step. NaN at every token if Δθ = 0. Arguments as in `attribute`.
    """
    if split.squared_length == 0.0:
        return torch.where(mask.bool(), math.nan, 0.0).to(coef.dtype)
    shares = attribute(model, input_ids, mask, coef, split.direction, attention_mask, temperature, method, check=check)
    return shares / split.squared_length


def _inner(a: Tensor, b: Tensor) -> float:
    return float(torch.dot(a.flatten().double(), b.flatten().double()))


def _check_optimizer(optimizer: torch.optim.Optimizer, group: dict) -> None:
    decoupled = isinstance(optimizer, torch.optim.AdamW) or group.get("weight_decay") == 0
    if not isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW) or not decoupled:
        raise UserError(
            f"optimizer, {type(optimizer).__name__}: update attribution knows AdamW (and Adam without weight decay)"
        )
    for option in ("amsgrad", "maximize"):
        if group.get(option):
            raise UserError(f"optimizer, {option}: update attribution does not know it; switch it off")
