"""Shapings that look at the whole step: the covariance kernel and the entropy polarity. All give (N, T)."""

from __future__ import annotations

import torch
from torch import Tensor

from sharpscope.config.token_weights import PolarityShaping
from sharpscope.objective.statistics import masked_mean, token_covariance
from sharpscope.objective.values import StepTensors


def covariance_gaussian_weights(step: StepTensors) -> Tensor:
    """exp(−(c − mean c)²/(2 std(c)²)) over the step's loss tokens; 1 where std(c) = 0 (arXiv 2605.11538, normalisation
    ours).
    """
    mask = step.mask.bool()
    covariance = token_covariance(step)
    inside = covariance[mask]
    std = inside.std(correction=0)
    if not bool(std > 0):
        return torch.ones_like(step.logp)
    return torch.exp(-(((covariance - inside.mean()) / std) ** 2) / 2).to(step.logp.dtype)


def polarity_weights(shaping: PolarityShaping, step: StepTensors) -> Tensor:
    """1 + alpha·phase·sign(ΔH_t) with ΔH_t = −A_t·polarity_t and phase = clip((target − mean H)/target, −1, 1)
    (ours).
    """
    if shaping.target is None:
        raise ValueError("the polarity target is still empty: call calibrate() first")
    alpha, target = float(shaping.alpha), float(shaping.target)  # type: ignore[arg-type]  # schedules are resolved before
    phase = max(-1.0, min(1.0, (target - masked_mean(step.entropy, step.mask.bool())) / target))
    return 1 + alpha * phase * torch.sign(-step.advantage[:, None] * step.polarity)  # (N, 1) · (N, T)
