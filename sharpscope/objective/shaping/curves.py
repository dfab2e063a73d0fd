"""Pointwise shapings: a token's weight from that token's own statistics. All take (N, T) and give (N, T)."""

from __future__ import annotations

import torch
from torch import Tensor

from sharpscope.config.token_weights import EntropyShaping, LinearShaping, PowerShaping, SigmoidShaping
from sharpscope.objective.values import StepTensors

#: Smallest 1 − π that log-odds tell apart; float32 log-probabilities end there.
SMALLEST_COMPLEMENT = 2.0**-24


def shaping_input(shaping: SigmoidShaping | EntropyShaping, step: StepTensors) -> Tensor:
    """u of a sigmoid or entropy shaping, (N, T)."""
    if isinstance(shaping, EntropyShaping):
        return -step.entropy if shaping.direction == "low" else step.entropy
    if shaping.input == "logit":
        return step.logit
    if shaping.input == "logp":
        return step.logp
    if shaping.input == "prob":
        return step.logp.exp()
    return step.logp - (-torch.expm1(step.logp)).clamp(min=SMALLEST_COMPLEMENT).log()


def sigmoid_weights(shaping: SigmoidShaping | EntropyShaping, step: StepTensors) -> Tensor:
    """clip(alpha·[sigmoid((u − u0)/tau) − mu], L, U); the shaping must be calibrated if it needs to be."""
    known = shaping.constants()
    alpha, tau, mu, low, high, u0 = (_number(known.get(name)) for name in ("alpha", "tau", "mu", "L", "U", "u0"))
    u = shaping_input(shaping, step)
    return (alpha * (torch.sigmoid((u - u0) / tau) - mu)).clamp(low, high)


def linear_weights(shaping: LinearShaping, step: StepTensors) -> Tensor:
    """alpha·π + 1 − alpha."""
    alpha = _number(shaping.alpha)
    return alpha * step.logp.exp() + (1 - alpha)


def power_weights(shaping: PowerShaping, step: StepTensors) -> Tensor:
    """clip(π^gamma, L, U)."""
    return (_number(shaping.gamma) * step.logp).exp().clamp(_number(shaping.L), _number(shaping.U))


def _number(value: object) -> float:
    if not isinstance(value, int | float):
        raise ValueError(f"a constant is still {value!r}: call calibrate() and .at(progress) first")
    return float(value)
