"""The loss of one microbatch: ratio, weight, clip, divergence terms, aggregation. Pure functions of tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from sharpscope.config.method import CispoClip, Clip, EwmaProximal, KlCovPenalty, Method, PpoClip
from sharpscope.objective.ratios import importance_ratio
from sharpscope.objective.values import LossOutput, Plan

#: [nats] e^80 still fits in float32; an infinite ratio would turn the zero gradient of a clipped token into NaN.
LARGEST_LOG_RATIO = 80.0


def policy_loss(
    method: Method,
    plan: Plan,
    logp: Tensor,
    normalizer: Tensor,
    *,
    reference_logp: Tensor | None = None,
    proximal_logp: Tensor | None = None,
    pass_index: int = 0,
) -> LossOutput:
    """This microbatch's share of an update's loss; ∂loss/∂logp is the token's `loss_coef`.

    With x_t = w_t·r_t (`weight_on=ratio`) or r_t, S(x, A) the clipped objective, c_t the normalizer and P the tokens of
    this pass: loss = Σ_{t ∈ P} c_t·{ −keep_t·[w_t]·b_t·S(x_t, A_t) + penalty_t·D_t + β·[w_t]·k3_t }, where [w_t] is the
    weight where it belongs and 1 elsewhere, D_t the KL-Cov divergence and b_t = π_prox/π_behavior for a decoupled
    objective, else 1. No gradient flows through w, b, the mask or the bounds.

    Args:
        method: the objective; its schedules are read at `plan.progress`.
        plan: the rows of `prepare`'s plan that belong to this microbatch.
        logp: (n, T) [nats] under the current policy, with gradient.
        normalizer: (n, T) rows of `token_normalizer` over all completions of the update.
        reference_logp: (n, T) [nats] under the reference policy; needed if `method.kl.coef` is not 0.
        proximal_logp: (n, T) [nats] under the proximal policy; needed if `method.needs_proximal`.
        pass_index: which of the `passes_of(method)` optimizer passes this update is.

    Raises:
        ValueError: shapes differ, or log-probabilities that the method needs are missing.
    """
    method = method.at(plan.progress)
    mask = plan.mask
    if logp.shape != mask.shape or normalizer.shape != mask.shape:
        raise ValueError(
            f"logp {tuple(logp.shape)}, normalizer {tuple(normalizer.shape)} and plan {tuple(mask.shape)} must agree"
        )
    decoupled = isinstance(method.proximal, EwmaProximal)
    if decoupled and proximal_logp is None:
        raise ValueError("this method needs proximal_logp")
    if method.kl.coef > 0 and reference_logp is None:
        raise ValueError("this method needs reference_logp: kl.coef is not 0")
    active = torch.where(plan.pass_index == pass_index, normalizer, 0.0)  # (n, T); masked-out tokens are in no pass
    logp = torch.where(mask, logp, 0.0)  # values outside the mask may be anything, also not finite
    anchor = proximal_logp if decoupled and proximal_logp is not None else plan.behavior_logp
    log_ratio = torch.where(mask, logp - anchor.detach(), 0.0).clamp(max=LARGEST_LOG_RATIO)
    ratio = importance_ratio(method.ratio, log_ratio, mask)

    weight = plan.weight
    coordinate = weight * ratio if method.weight_on == "ratio" else ratio
    objective, clipped = clipped_objective(method.clip, coordinate, plan.advantage, logp)
    if method.weight_on == "surrogate":
        objective = weight * objective
    if decoupled:
        stale = torch.where(mask, anchor - plan.behavior_logp, 0.0).detach()
        objective = importance_ratio(method.ratio, stale, mask) * objective
    surrogate = -(torch.where(plan.keep, objective, 0.0) * active).sum()
    loss = surrogate
    if isinstance(method.penalty, KlCovPenalty):
        loss = loss + (plan.penalty * _drift(method.penalty, log_ratio) * active).sum()
    kl = torch.zeros_like(logp)
    if reference_logp is not None:
        kl = k3(logp, torch.where(mask, reference_logp.detach(), 0.0))
        if method.kl.coef > 0:
            term = weight * kl if method.kl.weighted else kl
            loss = loss + method.kl.coef * (term * active).sum()
    clipped = torch.where(plan.keep, clipped, 0).to(torch.int8)
    return LossOutput(loss, surrogate.detach(), torch.where(mask, ratio, 1.0).detach(), clipped, kl.detach())


def clipped_objective(clip: Clip, ratio: Tensor, advantage: Tensor, logp: Tensor) -> tuple[Tensor, Tensor]:
    """S(x, A) per token, and where a bound acts (−1 low, 1 high, else 0).

    none: x·A. ppo: min(x·A, clip(x, 1 − low, 1 + high)·A); a bound acts where it takes the gradient away: above for A >
    0, below for A < 0. cispo: sg[clip(x, 1 − low, 1 + high)]·A·ln π; a bound acts where it binds and A ≠ 0.

    Args:
        clip: which, and its bounds.
        ratio: (n, T) x: the ratio, or weight × ratio.
        advantage: (n, T).
        logp: (n, T) [nats]; read by cispo only.
    """
    if isinstance(clip, CispoClip):
        low, high = ratio.detach() < 1 - clip.low, ratio.detach() > 1 + clip.high
        objective = ratio.detach().clamp(1 - clip.low, 1 + clip.high) * advantage * logp
        return objective, torch.where(advantage == 0, 0, high.int() - low.int())
    if isinstance(clip, PpoClip):
        bounded = torch.minimum(ratio * advantage, ratio.clamp(1 - clip.low, 1 + clip.high) * advantage)
        return bounded, gradient_killed(clip, ratio.detach(), advantage)
    return ratio * advantage, torch.zeros_like(ratio, dtype=torch.int32)


def gradient_killed(clip: PpoClip, ratio: Tensor, advantage: Tensor) -> Tensor:
    """Tokens whose surrogate is constant, int32: 1 where x > 1 + high and A > 0, −1 where x < 1 − low and A < 0.

    `ratio` is weight × ratio for `weight_on=ratio`: at ratio 1 every weight above 1 + high kills a positive token
    (TR-GRPO's trap).
    """
    above = (ratio > 1 + clip.high) & (advantage > 0)
    below = (ratio < 1 - clip.low) & (advantage < 0)
    return above.int() - below.int()


def k3(logp: Tensor, reference_logp: Tensor) -> Tensor:
    """k3 = π_ref/π − ln(π_ref/π) − 1 ≥ 0 [nats], an unbiased estimate of KL(π‖π_ref) on tokens drawn from π."""
    difference = reference_logp - logp
    return torch.expm1(difference) - difference


def _drift(penalty: KlCovPenalty, log_ratio: Tensor) -> Tensor:
    """D(π_old‖π) per token [nats]: |ln r|, or r − 1 − ln r."""
    return log_ratio.abs() if penalty.estimator == "abs" else torch.expm1(log_ratio) - log_ratio
