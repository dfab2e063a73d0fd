"""From rewards to advantages, and what DAPO does to rewards and groups before that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sharpscope.errors import UserError
from sharpscope.methods import method as settings
from sharpscope.methods.method import Advantage

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

    Returns:
        In the dtype of `reward`: (N, T) and 0 outside the mask for `whitened` and `token_baseline`, else (N,).

    Raises:
        ValueError: a reward is not finite, shapes differ, or a value that the estimator needs is missing.
        UserError: no completion has a part of the reward that `decoupled` weights.
    """
    groups = _grouped(reward, group)
    if mask.shape[:1] != reward.shape:
        raise ValueError(
            f"mask {tuple(mask.shape)} must have a row for each reward {tuple(reward.shape)}"
        )
    match spec:
        case settings.GroupAdvantage():
            found = _group(groups, spec)
        case settings.BaselineAdvantage(kind="leave_one_out"):
            found = groups.informative(
                groups.centered * (groups.count / (groups.count - 1).clamp(min=1))
            )
        case settings.WhitenedAdvantage():
            found = _whitened(
                groups.informative(groups.centered) if spec.baseline == "group" else groups.value,
                mask.bool(),
            )
        case settings.BaselineAdvantage(kind="length_baseline"):
            length = mask.bool().sum(1).double()
            total = groups.sum(length)
            baseline = groups.sum(length * groups.value) / total.clamp(min=1)
            found = torch.where(groups.differ & (total > 0), groups.value - baseline, 0.0)
        case settings.BaselineAdvantage(kind="token_baseline"):
            if logp is None or collision is None:
                raise ValueError("advantage.kind=token_baseline needs logp and collision")
            found = _token_baseline(groups, mask.bool(), logp, collision)
        case settings.DecoupledAdvantage():
            found = _decoupled(spec, group, parts or {})
        case settings.BaselineAdvantage():
            if correct is None:
                raise ValueError("advantage.kind=mean_scaled needs correct")
            right = _grouped(correct.double(), group)
            mean = right.sum(right.value) / right.count
            found = right.informative(right.centered / torch.where(mean > 0, mean, 1.0))
    return found.to(reward.dtype)


def informative_groups(reward: Tensor, group: Tensor) -> Tensor:
    """(N,) bool: whether a completion's group has values that differ. Of `reward` (N,) that are not finite, none does."""
    return _Groups.of(reward, group).differ


@dataclass(frozen=True)
class _Groups:
    """Values (N,) float64 in groups; each tensor is (N,), of the group of each row."""

    value: Tensor
    member: Tensor  # index of the group
    count: Tensor  # float64
    differ: Tensor  # bool, whether the group's values do

    @classmethod
    def of(cls, value: Tensor, group: Tensor) -> _Groups:
        """Values (N,) grouped by labels (N,)."""
        value = value.double()
        _, member, count = torch.unique(group, return_inverse=True, return_counts=True)
        low, high = (
            value.new_zeros(len(count)).scatter_reduce(0, member, value, end, include_self=False)
            for end in ("amin", "amax")
        )
        return cls(value, member, count.double()[member], (high > low)[member])

    def sum(self, values: Tensor) -> Tensor:
        """Sum of `values` (N,) over the group of each row, (N,)."""
        return torch.zeros_like(values).index_add_(0, self.member, values)[self.member]

    @property
    def centered(self) -> Tensor:
        """Values minus their group's mean; not exactly 0 where they are equal."""
        return self.value - self.sum(self.value) / self.count

    def informative(self, values: Tensor) -> Tensor:
        """`values` (N,), 0 in groups whose values are equal."""
        return torch.where(self.differ, values, 0.0)


def _grouped(reward: Tensor, group: Tensor) -> _Groups:
    if reward.shape != group.shape or reward.dim() != 1:
        raise ValueError(
            f"reward {tuple(reward.shape)} and group {tuple(group.shape)} must both be (N,)"
        )
    if not bool(torch.isfinite(reward).all()):
        raise ValueError("a reward is not finite")
    return _Groups.of(reward, group)


def _group(groups: _Groups, spec: settings.GroupAdvantage) -> Tensor:
    centered = groups.centered
    if spec.scale == "group":
        std = (groups.sum(centered**2) / (groups.count - 1).clamp(min=1)).sqrt()
        centered = centered / (std + STD_EPSILON)
    if spec.scale == "batch":
        centered = _divided(centered, groups.value)
    return groups.informative(centered)


def _whitened(value: Tensor, mask: Tensor) -> Tensor:
    returns = value[:, None].expand(mask.shape)  # (N, T)
    inside = returns[mask]
    if inside.numel() == 0 or not bool(inside.max() > inside.min()):
        return torch.zeros_like(returns)
    white = (returns - inside.mean()) / (inside.var(correction=1) + SQUARE_EPSILON).sqrt()
    return torch.where(mask, white, 0.0)


def _token_baseline(groups: _Groups, mask: Tensor, logp: Tensor, collision: Tensor) -> Tensor:
    if not logp.shape == collision.shape == mask.shape:
        raise ValueError(
            f"logp {tuple(logp.shape)}, collision {tuple(collision.shape)} and mask must agree"
        )
    # ‖p − e_y‖² is not negative; rounding of its summands is
    energy = torch.where(mask, 1 - 2 * logp.double().exp() + collision.double(), 0.0).clamp(min=0)
    energy = energy.cumsum(1)  # (N, T): V up to each token
    value = groups.value[:, None].expand(mask.shape)
    width = mask.shape[1]
    # (N, T) -> index into (groups · T)
    cell = groups.member[:, None] * width + (mask.cumsum(1) - 1).clamp(min=0)

    def summed(values: Tensor) -> Tensor:
        """(N, T) sums over the group's completions at the same number of loss tokens."""
        total = values.new_zeros((int(groups.member.max()) + 1) * width)
        return total.index_add_(0, cell[mask], values[mask])[cell]

    advantage = value - summed(value * energy) / (summed(energy) + SQUARE_EPSILON)
    advantage = torch.where(groups.differ[:, None], advantage, 0.0)
    alone = summed(torch.ones_like(energy)) == 1
    return torch.where(mask, torch.where(alone, value, advantage), 0.0)


def _decoupled(
    spec: settings.DecoupledAdvantage,
    group: Tensor,
    parts: Mapping[str, Tensor],
) -> Tensor:
    total = torch.zeros(group.shape, dtype=torch.float64, device=group.device)
    differ = torch.zeros_like(group, dtype=torch.bool)
    for name, weight in spec.weights.items():
        if weight == 0:
            continue
        if name not in parts:
            raise UserError(
                f"method.advantage.weights.{name} = {weight:g}: the task's reward has no part of this name; "
                f"its parts: {', '.join(parts) or 'none'}; set the weight to 0 and give weights to those"
            )
        part = _grouped(parts[name], group)
        total = total + weight * _group(part, settings.GroupAdvantage())
        differ = differ | part.differ
    return torch.where(differ, _divided(total - total.mean(), total), 0.0)


def _divided(centered: Tensor, value: Tensor) -> Tensor:
    """`centered` (N,) divided by the std of `value` (N,) plus 1e-4; the std of one value is 0."""
    return centered / (value.std(correction=min(1, len(value) - 1)) + STD_EPSILON)


def overlong_penalty(share: float, length: Tensor, max_completion_length: int) -> Tensor:
    """DAPO's soft overlong penalty, to be added to the reward (arXiv 2503.14476).

    With B = share·limit: 0 up to limit − B tokens, then −(length − (limit − B))/B, −1 at the limit and beyond. (N,) float32.
    """
    buffer = share * max_completion_length
    excess = length.double() - (max_completion_length - buffer)
    return (-(excess / buffer).clamp(0.0, 1.0)).float()
