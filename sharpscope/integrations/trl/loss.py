"""TRL's loss for each token: its ratio, whether its clip acted, its divergence from the reference."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sharpscope.config.method import PpoClip
from sharpscope.integrations.hf_trainer import TokenLoss
from sharpscope.objective import gradient_killed, k3


@torch.no_grad()
def token_loss(trainer: Any, inputs: dict[str, Any], logp: Tensor) -> TokenLoss:
    """TRL's ratio (of tokens or sequences), where its clip removes the gradient, and k3 to its reference.

    Args:
        trainer: whose options apply.
        inputs: TRL's batch of n rows.
        logp: (n, T) [nats], what the trainer's loss differentiates.
    """
    mask = inputs["completion_mask"]
    if inputs.get("tool_mask") is not None:
        mask = mask * inputs["tool_mask"]
    logp = logp.detach()
    old = inputs.get("old_per_token_logps")
    change = own = torch.zeros_like(logp) if old is None else torch.where(mask.bool(), logp - old, 0.0)
    if trainer.importance_sampling_level == "sequence":
        change = (change.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)).expand(logp.shape)
    ratio = change.exp()
    advantage = inputs["advantages"]
    advantage = (advantage if advantage.dim() == 2 else advantage[:, None]).expand(logp.shape)
    reference = inputs.get("ref_per_token_logps")
    kl = torch.zeros_like(logp) if reference is None else torch.where(mask.bool(), k3(logp, reference), 0.0)
    clipped = _clipped(trainer, ratio, advantage) * mask.int()
    correction = inputs.get("importance_sampling_ratio")
    return TokenLoss(torch.where(mask.bool(), ratio, 1.0), own, clipped, kl, correction)


def _clipped(trainer: Any, ratio: Tensor, advantage: Tensor) -> Tensor:
    if trainer.loss_type == "cispo":  # TRL bounds the ratio itself, from above only
        return ((ratio > trainer.epsilon_high) & (advantage != 0)).int()
    if trainer.loss_type in ("sapo", "vespo"):  # they have no clip
        return torch.zeros_like(ratio, dtype=torch.int32)
    low, high = float(trainer.epsilon_low), float(trainer.epsilon_high)
    killed = gradient_killed(PpoClip.model_construct(low=low, high=high), ratio, advantage)
    if trainer.args.delta is not None:  # two-sided: a negative token with a ratio above delta has no gradient either
        killed = torch.where((ratio > trainer.args.delta) & (advantage < 0), 1, killed)
    return killed
