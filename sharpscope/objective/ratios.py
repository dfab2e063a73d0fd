"""Importance ratios of the token, of the sequence, and the power mean between them."""

from __future__ import annotations

import torch
from torch import Tensor

from sharpscope.objective.spec import HolderRatio, Ratio, TokenRatio


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
    count = mask.sum(-1, keepdim=True).clamp(min=1)  # (n, 1)
    mean = torch.where(mask, log_ratio, 0.0).sum(-1, keepdim=True) / count  # (n, 1)
    log_mean = mean
    if isinstance(spec, HolderRatio) and spec.p != 0.0:
        # ln M_p = m + ln(1 + mean(e^{p(x − m)} − 1))/p keeps full precision for p → 0, where (ln mean e^{px})/p loses
        # it
        p = float(spec.p)  # type: ignore[arg-type]  # a schedule is resolved before
        spread = torch.where(mask, torch.expm1(p * torch.where(mask, log_ratio - mean, 0.0)), 0.0)
        log_mean = mean + torch.log1p(spread.sum(-1, keepdim=True) / count) / p
    return log_mean.exp().expand_as(log_ratio)  # (n, 1) -> (n, T)
