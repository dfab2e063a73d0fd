"""From rewards to advantages, and what DAPO does to rewards and groups before that."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from sharpscope.config.method import (
    Advantage,
    DecoupledAdvantage,
    GroupAdvantage,
    LeaveOneOutAdvantage,
    LengthBaselineAdvantage,
    MeanScaledAdvantage,
    Sampling,
    TokenBaselineAdvantage,
    WhitenedAdvantage,
)
from sharpscope.errors import UserError

STD_EPSILON = 1e-4
"""Added to a std of rewards, as in TRL [reward]."""
SQUARE_EPSILON = 1e-8
"""Added to variances of returns and sums of squared norms, as in verl."""


def estimate_advantages(
    spec: Advantage,
    reward: Tensor,
    group: Tensor,
    mask: Tensor,
    *,
    parts: Mapping[str, Tensor] | None = None,
    correct: Tensor | None = None,
    logp: Tensor | None = None,
    collision: Tensor | None = None,
    token_reward: Tensor | None = None,
) -> Tensor:
    """Advantages of all completions of a step by the estimator `spec`, whose class has the equation. Computed in float64.

    Args:
        spec: the estimator.
        reward: (N,) finite.
        group: (N,) integer labels, in any order.
        mask: (N, T) loss tokens, bool or 0/1.
        parts: (N,) finite by name, the reward's parts; for `decoupled`.
        correct: (N,) whether each answer is correct; for `mean_scaled`.
        logp: (N, T) [nats] of the sampled tokens at the start of the step, anything outside the mask; for
            `token_baseline`.
        collision: (N, T) Σ_v π_v² at the same places.
        token_reward: (N, T) part of `reward` that single tokens got (a divergence), anything outside the mask; None: the whole
            reward is for the completion. `whitened` without a baseline and `token_baseline` give a token only what comes at
            it or after it; the others see `reward` alone.

    Returns:
        In the dtype of `reward`: (N, T) and 0 outside the mask for `whitened` and `token_baseline`, else (N,).

    Raises:
        ValueError: a reward is not finite, shapes differ, or a value that the estimator needs is missing.
        UserError: no completion has a part of the reward that `decoupled` weights.
    """
    _check(reward, group)
    if mask.shape[:1] != reward.shape:
        raise ValueError(f"mask {tuple(mask.shape)} must have a row for each reward {tuple(reward.shape)}")
    match spec:
        case GroupAdvantage():
            return group_advantages(reward, group, spec)
        case LeaveOneOutAdvantage():
            return _leave_one_out(reward, group)
        case WhitenedAdvantage():
            return _whitened(spec, reward, group, mask.bool(), token_reward)
        case LengthBaselineAdvantage():
            return _length_baseline(reward, group, mask.bool())
        case TokenBaselineAdvantage():
            if logp is None or collision is None:
                raise ValueError("advantage.kind=token_baseline needs logp and collision")
            return _token_baseline(reward, group, mask.bool(), logp, collision, token_reward)
        case DecoupledAdvantage():
            return _decoupled(spec, group, parts or {}).to(reward.dtype)
        case MeanScaledAdvantage():
            if correct is None:
                raise ValueError("advantage.kind=mean_scaled needs correct")
            return _mean_scaled(correct.to(reward), group)


def group_advantages(reward: Tensor, group: Tensor, spec: GroupAdvantage | None = None) -> Tensor:
    """A_i = (R_i − mean R)/(std R + 1e-4) within each group (GRPO, arXiv 2402.03300; std with n − 1 as in TRL).

    With `scale="batch"` the std is that of all N rewards (arXiv 2508.08221); with `scale="none"`, A_i = R_i − mean R
    (Dr. GRPO, arXiv 2503.20783). A group whose rewards are all equal, or that has one member, gives exactly 0. Computed in
    float64.

    Args:
        reward: (N,) finite.
        group: (N,) integer labels, in any order.
        spec: defaults to GRPO's.

    Returns:
        (N,) advantages in the dtype of `reward`.

    Raises:
        ValueError: a reward is not finite, or the shapes differ.
    """
    spec = spec or GroupAdvantage()
    centered, member, count, informative = _centered(reward, group)
    if spec.scale == "group":
        square = torch.zeros_like(count).index_add_(0, member, centered**2)
        std = (square / (count - 1).clamp(min=1)).sqrt()
        centered = centered / (std + STD_EPSILON)[member]
    if spec.scale == "batch":
        centered = _divided(centered, reward.double())
    return torch.where(informative[member], centered, 0.0).to(reward.dtype)


def _leave_one_out(reward: Tensor, group: Tensor) -> Tensor:
    centered, member, count, informative = _centered(reward, group)
    factor = count / (count - 1).clamp(min=1)
    return torch.where(informative[member], centered * factor[member], 0.0).to(reward.dtype)


def _whitened(
    spec: WhitenedAdvantage, reward: Tensor, group: Tensor, mask: Tensor, token_reward: Tensor | None
) -> Tensor:
    returns = reward.double()[:, None].expand(mask.shape)  # (N, T)
    if spec.baseline == "group":
        centered, member, _, informative = _centered(reward, group)
        returns = torch.where(informative[member], centered, 0.0)[:, None].expand(mask.shape)
    elif token_reward is not None:  # without what came before the token
        given = torch.where(mask, token_reward.double(), 0.0)
        returns = returns - (given.cumsum(1) - given)
    inside = returns[mask]
    if inside.numel() == 0 or not bool(inside.max() > inside.min()):
        return torch.zeros_like(returns).to(reward.dtype)
    white = (returns - inside.mean()) / (inside.var(correction=1) + SQUARE_EPSILON).sqrt()
    return torch.where(mask, white, 0.0).to(reward.dtype)


def _length_baseline(reward: Tensor, group: Tensor, mask: Tensor) -> Tensor:
    member, count, informative = _groups(reward, group)
    length = mask.sum(1).double()
    total = torch.zeros_like(count).index_add_(0, member, length)
    weighted = torch.zeros_like(count).index_add_(0, member, length * reward.double())
    advantage = reward.double() - (weighted / total.clamp(min=1))[member]
    return torch.where((informative & (total > 0))[member], advantage, 0.0).to(reward.dtype)


def _token_baseline(
    reward: Tensor,
    group: Tensor,
    mask: Tensor,
    logp: Tensor,
    collision: Tensor,
    token_reward: Tensor | None,
) -> Tensor:
    if not logp.shape == collision.shape == mask.shape:
        raise ValueError(f"logp {tuple(logp.shape)}, collision {tuple(collision.shape)} and mask must agree")
    member, count, informative = _groups(reward, group)
    # ‖p − e_y‖² is not negative; rounding of its summands is
    energy = torch.where(mask, 1 - 2 * logp.double().exp() + collision.double(), 0.0).clamp(min=0)
    energy = energy.cumsum(1)  # (N, T): V up to each token
    value = reward.double()[:, None].expand(mask.shape)
    if token_reward is not None:  # without what came before the token
        given = torch.where(mask, token_reward.double(), 0.0)
        value = value - (given.cumsum(1) - given)
    width = mask.shape[1]
    cell = member[:, None] * width + (mask.cumsum(1) - 1).clamp(min=0)  # (N, T) -> index into (groups · T)

    def summed(values: Tensor) -> Tensor:
        total = torch.zeros(len(count) * width, dtype=torch.float64, device=reward.device)
        return total.index_add_(0, cell[mask], values[mask])[cell]  # back to (N, T)

    advantage = value - summed(value * energy) / (summed(energy) + SQUARE_EPSILON)
    advantage = torch.where(informative[member][:, None], advantage, 0.0)
    alone = summed(torch.ones_like(energy)) == 1
    advantage = torch.where(alone, value, advantage)
    return torch.where(mask, advantage, 0.0).to(reward.dtype)


def _decoupled(spec: DecoupledAdvantage, group: Tensor, parts: Mapping[str, Tensor]) -> Tensor:
    total = torch.zeros(group.shape, dtype=torch.float64, device=group.device)
    informative = torch.zeros_like(group, dtype=torch.bool)
    for name, weight in spec.weights.items():
        if weight == 0:
            continue
        if name not in parts:
            raise UserError(
                f"method.advantage.weights.{name} = {weight:g}: the task's reward has no part of this name; "
                f"its parts: {', '.join(parts) or 'none'}; set the weight to 0 and give weights to those"
            )
        value = parts[name].double()
        total = total + weight * group_advantages(value, group)
        informative = informative | informative_groups(value, group)
    normalized = _divided(total - total.mean(), total)
    return torch.where(informative, normalized, 0.0)


def _mean_scaled(reward: Tensor, group: Tensor) -> Tensor:
    centered, member, count, informative = _centered(reward, group)
    mean = torch.zeros_like(count).index_add_(0, member, reward.double()) / count
    informative = informative & (mean > 0)
    scaled = centered / torch.where(informative, mean, 1.0)[member]
    return torch.where(informative[member], scaled, 0.0).to(reward.dtype)


def _divided(centered: Tensor, value: Tensor) -> Tensor:
    """`centered` (N,) divided by the std of `value` (N,) plus 1e-4; the std of one value is 0."""
    return centered / ((value.var(correction=1).sqrt() if len(value) > 1 else 0.0) + STD_EPSILON)


def _centered(reward: Tensor, group: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """R − mean R of the group (N,) in float64, and what `_groups` gives; not exactly 0 where rewards are equal."""
    _check(reward, group)
    value = reward.double()
    member, count, informative = _groups(reward, group)
    mean = torch.zeros_like(count).index_add_(0, member, value) / count
    return value - mean[member], member, count, informative


def _check(reward: Tensor, group: Tensor) -> None:
    if reward.shape != group.shape or reward.dim() != 1:
        raise ValueError(f"reward {tuple(reward.shape)} and group {tuple(group.shape)} must both be (N,)")
    if not bool(torch.isfinite(reward).all()):
        raise ValueError("a reward is not finite")


def informative_groups(reward: Tensor, group: Tensor) -> Tensor:
    """(N,) bool: whether a completion's group has values that differ. Of `reward` (N,) that are not finite, none does."""
    member, _, informative = _groups(reward, group)
    return informative[member]


def _groups(reward: Tensor, group: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Member index (N,), and per group the count (float64) and whether the rewards differ."""
    labels, member = torch.unique(group, return_inverse=True)
    count = torch.zeros(len(labels), dtype=torch.float64, device=reward.device)
    count.index_add_(0, member, torch.ones_like(reward, dtype=torch.float64))
    low = torch.full_like(count, torch.inf).scatter_reduce_(0, member, reward.double(), "amin")
    high = torch.full_like(count, -torch.inf).scatter_reduce_(0, member, reward.double(), "amax")
    return member, count, high > low


def overlong_penalty(sampling: Sampling, length: Tensor, max_completion_length: int) -> Tensor:
    """DAPO's soft overlong penalty, to be added to the reward (arXiv 2503.14476); 0 if `sampling.overlong` is empty.

    With B = buffer·limit: 0 up to limit − B tokens, then −(length − (limit − B))/B, −1 at the limit and beyond.

    Args:
        sampling: its `overlong` holds the buffer.
        length: (N,) completion lengths [tokens].
        max_completion_length: the limit [tokens].

    Returns:
        (N,) float32 in [−1, 0].
    """
    spec = sampling.overlong
    if spec is None:
        return torch.zeros(length.shape, dtype=torch.float32, device=length.device)
    buffer = spec.buffer * max_completion_length
    excess = length.double() - (max_completion_length - buffer)
    return (-(excess / buffer).clamp(0.0, 1.0)).float()
