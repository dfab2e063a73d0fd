"""What every token did in a step: the policy's statistics at its start, and what the first update that used it did."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from sharpscope.objective import StepTensors
from sharpscope.policy import Rollouts, TokenStats


@dataclass
class TokenRecord:
    """What each token did in the first update that used it; all (N, T), on the CPU."""

    stats: TokenStats
    weight: Tensor
    advantage: Tensor
    loss_coef: Tensor  # ∂L/∂log π_t of that update
    ratio: Tensor
    clipped: Tensor  # int8: −1 clipped low, 0 not, 1 clipped high
    kl: Tensor
    update: Tensor  # int32; −1 where no update used the token

    def tensors(self, *, stats: bool) -> list[Tensor]:
        """All of them, the statistics too if `stats`."""
        own = [getattr(self, part.name) for part in fields(self) if part.name != "stats"]
        return own + ([getattr(self.stats, part.name) for part in fields(TokenStats)] if stats else [])


def step_tensors(
    rollouts: Rollouts, advantage: Tensor, stats: TokenStats, old_logp: Tensor, progress: float
) -> StepTensors:
    """What the objective needs of a step, from rollouts (N, T) and the statistics of the policy at its start."""
    return StepTensors(
        mask=rollouts.completion_mask, group=rollouts.group, advantage=advantage.to(stats.logp), behavior_logp=old_logp,
        logp=stats.logp, logit=stats.logit, entropy=stats.entropy, collision=stats.collision, polarity=stats.polarity,
        progress=progress,
    )  # fmt: skip


def blank_stats(mask: Tensor, model: torch.nn.Module) -> TokenStats:
    """TokenStats of zeros in the shape of `mask` (N, T), on its device, in the dtype that the model's statistics have."""
    dtype = torch.float64 if next(model.parameters()).dtype == torch.float64 else torch.float32
    return TokenStats(
        **{stat.name: torch.zeros(mask.shape, dtype=dtype, device=mask.device) for stat in fields(TokenStats)}
    )


def write_stats(target: TokenStats, rows: Tensor, values: TokenStats | None) -> None:
    """Put `values` (n, T) into the rows `rows` of `target` (N, T)."""
    assert values is not None
    for name in (stat.name for stat in fields(TokenStats)):
        getattr(target, name)[rows] = getattr(values, name).to(getattr(target, name).dtype)
