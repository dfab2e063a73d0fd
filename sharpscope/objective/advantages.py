"""From rewards to advantages, and what DAPO does to rewards and groups before that."""

from __future__ import annotations

import torch
from torch import Tensor

from sharpscope.config.method import Advantage, Sampling


def group_advantages(reward: Tensor, group: Tensor, spec: Advantage | None = None) -> Tensor:
    """A_i = (r_i − mean r)/(std r + epsilon) within each group (GRPO, arXiv 2402.03300; std with n − 1 as in TRL).

    With `scale="none"`, A_i = r_i − mean r (Dr. GRPO, arXiv 2503.20783). A group whose rewards are all equal, or that
    has one member, gives exactly 0. Computed in float64.

    Args:
        reward: (N,) finite.
        group: (N,) integer labels, in any order.
        spec: defaults to GRPO's.

    Returns:
        (N,) advantages in the dtype of `reward`.

    Raises:
        ValueError: a reward is not finite, or the shapes differ.
    """
    spec = spec or Advantage()
    if reward.shape != group.shape or reward.dim() != 1:
        raise ValueError(f"reward {tuple(reward.shape)} and group {tuple(group.shape)} must both be (N,)")
    if not bool(torch.isfinite(reward).all()):
        raise ValueError("a reward is not finite")
    value = reward.double()
    member, count, informative = _groups(reward, group)
    mean = torch.zeros_like(count).index_add_(0, member, value) / count
    centered = value - mean[member]
    if spec.scale == "group":
        square = torch.zeros_like(count).index_add_(0, member, centered**2)
        std = (square / (count - spec.ddof).clamp(min=1)).sqrt()
        # a subnormal spread can round to std 0: without an epsilon that group has nothing to say either
        scale = std + spec.epsilon
        informative = informative & (scale > 0)
        centered = centered / torch.where(scale > 0, scale, 1.0)[member]
    return torch.where(informative[member], centered, 0.0).to(reward.dtype)


def informative_groups(reward: Tensor, group: Tensor) -> Tensor:
    """(N,) bool: whether a completion's group has rewards that differ; DAPO's dynamic sampling redraws the others."""
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

    With B = buffer·limit: 0 up to limit − B tokens, then −scale·(length − (limit − B))/B, −scale at the limit and
    beyond.

    Args:
        sampling: its `overlong` holds buffer and scale.
        length: (N,) completion lengths [tokens].
        max_completion_length: the limit [tokens].

    Returns:
        (N,) float32 in [−scale, 0].
    """
    spec = sampling.overlong
    if spec is None:
        return torch.zeros(length.shape, dtype=torch.float32, device=length.device)
    buffer = spec.buffer * max_completion_length
    excess = length.double() - (max_completion_length - buffer)
    return (-spec.scale * (excess / buffer).clamp(0.0, 1.0)).float()
