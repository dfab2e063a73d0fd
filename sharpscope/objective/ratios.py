"""Importance ratios of the token, of the sequence, and the power mean between them."""

from __future__ import annotations

import torch
from torch import Tensor

from sharpscope.config.method import HolderRatio, Ratio, TokenRatio


def importance_ratio(spec: Ratio, log_ratio: Tensor, mask: Tensor) -> Tensor:
    """r_t, GSPO's s_i or HölderPO's power mean; with gradient through `log_ratio`.

    token: exp(x_t). sequence: exp(mean_t x_t) (arXiv 2507.18071). holder: (mean_t exp(p·x_t))^(1/p) (arXiv 2605.12058),
    whose limit p → 0 is the sequence ratio. Means run over the loss tokens of the completion.

    Args:
        spec: which; a schedule of p must be resolved (`at`).
        log_ratio: (n, T) x_t = ln π − ln π_old [nats], 0 outside the mask.
        mask: (n, T) bool.

    Returns:
        (n, T); sequence ratios repeat along T. 1 outside the mask for token ratios, and in rows without tokens.
    """
    if isinstance(spec, TokenRatio):
        return log_ratio.exp()
    if not isinstance(spec, HolderRatio) or spec.p == 0.0:
        count = mask.sum(-1, keepdim=True).clamp(min=1)  # (n, 1)
        log_mean = torch.where(mask, log_ratio, 0.0).sum(-1, keepdim=True) / count
    else:
        log_mean = _log_power_mean(log_ratio, mask, float(spec.p))  # type: ignore[arg-type]  # a schedule is resolved
    return log_mean.exp().expand_as(log_ratio)  # (n, 1) -> (n, T)


def _log_power_mean(log_ratio: Tensor, mask: Tensor, p: float) -> Tensor:
    """(n, 1) ln (mean_t exp(p·x_t))^(1/p) = x* + ln(1 + mean_t(exp(p·(x_t − x*)) − 1))/p, p ≠ 0; 0 without tokens.

    x* is the token with the largest p·x_t, so no exponential overflows. The form with exp(·) − 1 keeps its precision
    for p → 0, where ln(mean exp(p·x_t))/p loses it. float64, because that mean comes close to −1 in long rows.
    """
    x = torch.where(mask, log_ratio, 0.0).double()
    sign = 1.0 if p > 0 else -1.0
    top = sign * torch.where(mask, sign * x.detach(), -torch.inf).amax(-1, keepdim=True)  # (n, 1)
    top = torch.where(mask.any(-1, keepdim=True), top, 0.0)  # the value does not depend on x*, so it needs no gradient
    excess = torch.where(mask, torch.expm1(p * torch.where(mask, x - top, 0.0)), 0.0)  # in (−1, 0]
    mean = excess.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    return (top + torch.log1p(mean) / p).to(log_ratio.dtype)
