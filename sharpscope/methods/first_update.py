"""The first update of a step under a method, as a function of log-probabilities: the tokens' coefficients."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sharpscope.methods.loss import policy_loss, token_normalizer
from sharpscope.methods.method import Method
from sharpscope.methods.plan import LossOutput, Plan


@dataclass(frozen=True, kw_only=True)
class FirstUpdate:
    """One update on all rows of a step, which no weights have made; (N, T) each."""

    loss: LossOutput
    coef: Tensor  # ∂L/∂log π
    kl_coef: Tensor  # the KL term's part of it


def first_update(
    method: Method,
    plan: Plan,
    group: Tensor,
    max_completion_length: int,
    logp: Tensor | None = None,
    reference_logp: Tensor | None = None,
) -> FirstUpdate:
    """The update of a plan's first pass, at log-probabilities `logp` (N, T) [nats]; None: where the ratio is 1."""
    leaf = (plan.behavior_logp if logp is None else logp).detach().clone().requires_grad_()
    normalizer = token_normalizer(
        method,
        plan.mask,
        max_completion_length,
        keep=plan.keep,
        group=group,
        dtype=leaf.dtype,
    )
    kl_coef = torch.zeros_like(leaf)
    with torch.enable_grad():
        out = policy_loss(method, plan, leaf, normalizer, reference_logp=reference_logp)
        if out.divergence is not None:
            (kl_coef,) = torch.autograd.grad(out.divergence, leaf, retain_graph=True)
        (coef,) = torch.autograd.grad(out.loss, leaf)
    return FirstUpdate(loss=out, coef=coef, kl_coef=kl_coef)
